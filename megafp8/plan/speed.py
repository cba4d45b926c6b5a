"""How fast one GPU computes: GEMMs by a table of measurements, the rest by bandwidth.

FP8 GEMMs go by the table that training picks backends by (fp8/gemm_speed.json): the speed of the backend that it picks,
at the weight that is nearest. The table was measured with rests between calls; in a step a GPU is at its power limit
and lowers its clock, which `SUSTAINED` stands for. All other figures here are of work without rests. All were measured
on one H200 (docs/gemm_kernels.md, docs/conversions.md, docs/optimizer.md); on another GPU they are taken in proportion
to its peaks. Nothing is fitted to the time of a step.

    t = max(FLOP / speed, bytes / HBM bandwidth)

A GEMM of few tiles leaves multiprocessors idle: its speed is taken down by the share of them that has a tile of
128 x 128 in a full number of rounds, relative to the measured one.
"""

from __future__ import annotations

import math
from functools import cache

from megafp8.fp8 import Recipe, gemm_speed
from megafp8.plan.cluster import Cluster

MEASURED_BF16, MEASURED_FP8 = 989.0, 1979.0
"""Peaks of the GPU that was measured, TFLOPS."""
SUSTAINED = 0.87
"""Of an FP8 GEMM's speed with rests, what is left back to back: median of 18 (docs/gemm_kernels.md), 0.85 to 1.02."""
BF16_TFLOPS = 686.0
"""BF16 GEMMs of six Llama-3-8B layers, forward and backward: 64.3 TFLOP in 93.8 ms of kernels."""
ATTENTION_TFLOPS = 397.0
"""cuDNN's causal attention of those layers: 5.77 TFLOP, backward 2.5 times forward, in 14.55 ms of kernels."""
COPY_EFFICIENCY = 0.885
"""Of HBM's bandwidth, by a copy; memory-bound kernels reach 0.76 to 0.99 of that."""
ATTENTION_BACKWARD = 2.5
"""Products of attention's backward, in forwards: it makes the scores once more."""

GROUPED = (  # groups, rows of each, N, K; TFLOPS without rests: FP8 fprop and wgrad (with its addition), BF16 alike
    (8, 4096, 4096, 7168, 1220, 837, 688, 559),
    (8, 4096, 7168, 2048, 1211, 863, 701, 554),
    (4, 8192, 4096, 7168, 1302, 863, 739, 640),
    (4, 8192, 7168, 2048, 1176, 880, 680, 643),
    (32, 1024, 4096, 7168, 1126, 623, 634, 298),
    (32, 1024, 7168, 2048, 1192, 644, 698, 305),
)


def memory_seconds(cluster: Cluster, size: float) -> float:
    """Time of a memory-bound kernel that reads and writes `size` bytes."""
    return size / (cluster.hbm_gb_per_s * 1e9 * COPY_EFFICIENCY)


def attention_seconds(cluster: Cluster, flops: float) -> float:
    """Time of attention's products."""
    return flops / (ATTENTION_TFLOPS * 1e12 * cluster.bf16_tflops / MEASURED_BF16)


@cache
def gemm_seconds(
    cluster: Cluster, role: str, recipe: Recipe | None, rows: int, out: int, inside: int, groups: int = 1
) -> float:
    """Time of one GEMM of a linear `[out, inside]` on `rows` rows, of all `groups` like ones together.

    role: "fprop", "dgrad", or "wgrad", which adds into FP32. recipe: None for BF16; MXFP8 without hardware for it runs
    decoded, as BF16.
    """
    if not rows:
        return 0.0
    in_fp8 = recipe is not None and recipe.block == 128
    flops, element = 2.0 * rows * out * inside, 1 if in_fp8 else 2
    speed = (
        _grouped(role, in_fp8, rows / groups, out, inside) if groups > 1 else _dense(role, recipe, in_fp8, out, inside)
    )
    speed *= cluster.fp8_tflops / MEASURED_FP8 if in_fp8 else cluster.bf16_tflops / MEASURED_BF16
    sides = {"fprop": (rows / groups, out), "dgrad": (rows / groups, inside), "wgrad": (out, inside)}[role]
    speed *= _filled(sides, groups, cluster.multiprocessors)
    read = {"fprop": rows * inside, "dgrad": rows * out, "wgrad": rows * (out + inside)}[role]
    written = {"fprop": rows * out, "dgrad": rows * inside, "wgrad": 0}[role]
    size = element * read + 2 * written + groups * out * inside * (8 if role == "wgrad" else element)
    return max(flops / (speed * 1e12), memory_seconds(cluster, size))


def _dense(role: str, recipe: Recipe | None, in_fp8: bool, out: int, inside: int) -> float:
    """TFLOPS measured at the nearest weight."""
    if not in_fp8:
        return BF16_TFLOPS
    tensor = recipe.quantizer("weight").spec.tile.kind == "tensor"
    if role == "wgrad":
        kind, weight = "tensorwise+=" if tensor else "1d1d+=", (out, inside)
    else:
        kind, weight = "tensorwise" if tensor else "1d2d", (out, inside) if role == "fprop" else (inside, out)
    kinds = next(iter(gemm_speed.table().values()))
    nearest = _nearest(kinds[kind], weight, slice(0, 2) if role == "wgrad" else slice(1, 3))
    return SUSTAINED * max(nearest[3].values())


def _grouped(role: str, in_fp8: bool, rows: float, out: int, inside: int) -> float:
    row = min(GROUPED, key=lambda r: _distance((rows, out, inside), r[1:4]))
    return row[(4 if in_fp8 else 6) + (role == "wgrad")]


def _nearest(measured: list, weight: tuple[int, int], sides: slice) -> list:
    return min(measured, key=lambda row: _distance(weight, row[sides]))


def _distance(ours: tuple, theirs: tuple) -> float:
    return sum((math.log2(a) - math.log2(b)) ** 2 for a, b in zip(ours, theirs, strict=True))


def _filled(sides: tuple[float, float], groups: int, multiprocessors: int) -> float:
    """Share of the multiprocessors that have a tile, over all rounds. The shapes measured fill 0.9 or more."""
    tiles = groups * math.ceil(sides[0] / 128) * math.ceil(sides[1] / 128)
    return min(1.0, tiles / (math.ceil(tiles / multiprocessors) * multiprocessors) / 0.9)
