"""Time, utilization and peak memory of training, evaluation and saving excluded."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megafp8.config import Config
from megafp8.fp8 import Recipe
from megafp8.fp8.formats import Scale
from megafp8.plan.flops import fp8_training_flops_per_token, training_flops_per_token

GIB = 1 << 30


class IntervalTimer:
    """Wall time since the last `lap`, without what ran inside `paused`. Seconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._paused = 0.0

    @contextmanager
    def paused(self):
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed = now - self._start - self._paused
        self._start, self._paused = now, 0.0
        return elapsed


def max_memory_gib(device: torch.device) -> float:
    """Peak memory so far: allocated on the GPU, or resident in this process on the CPU. GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB


@dataclass(frozen=True)
class Peaks:
    """Dense peaks of a GPU's matrix products, TFLOPS, as its vendor states them (those with sparsity are twice as
    high). fp32: without tensor cores, since TF32 is never used here. hbm_gb_per_s: its memory's bandwidth, where the
    planner asks for it."""

    fp32: float
    bf16: float
    fp8: float | None
    hbm_gb_per_s: float | None = None


PEAKS = {  # by what the device's name contains; the first that fits counts
    "H100 PCIe": Peaks(51, 756, 1513, 2000),
    "H100 NVL": Peaks(60, 835, 1671, 3900),
    "H100": Peaks(67, 989, 1979, 3350),
    "H200": Peaks(67, 989, 1979, 4800),
    "H800": Peaks(67, 989, 1979, 3350),
    "H20": Peaks(44, 148, 296),
    "GB200": Peaks(80, 2500, 5000),
    "B200": Peaks(75, 2250, 4500),
    "B100": Peaks(60, 1800, 3500),
    "A100": Peaks(19.5, 312, None),
    "L40S": Peaks(91.6, 362, 733),
}


def peaks_of(device_name: str) -> Peaks | None:
    """The peaks of a GPU; None for one that is not in the table."""
    return next((peaks for name, peaks in PEAKS.items() if name in device_name), None)


def ideal_seconds_per_token(config: Config, peaks: Peaks, *, has_mxfp8: bool) -> float:
    """Seconds that a token's products would take one GPU at its dense peaks, each product at that of its dtype.

    has_mxfp8: whether the GPU multiplies MXFP8 itself; elsewhere that is emulated in BF16, and counted as such.
    """
    high = peaks.bf16 if config.train.bf16 else peaks.fp32

    def runs_in_fp8(recipe: Recipe) -> bool:
        return peaks.fp8 is not None and (recipe.scale is not Scale.E8M0 or has_mxfp8)

    in_fp8 = fp8_training_flops_per_token(config, runs_in_fp8)
    rest = training_flops_per_token(config) - in_fp8
    return (rest / high + in_fp8 / (peaks.fp8 or high)) / 1e12


def utilization(config: Config, device: torch.device, tokens_per_second_per_gpu: float) -> float | None:
    """MFU: the ideal time of a token over the time it takes; None on the CPU and on GPUs without an entry in PEAKS."""
    peaks = peaks_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peaks is None:
        return None
    has_mxfp8 = torch.cuda.get_device_capability(device)[0] >= 10
    return ideal_seconds_per_token(config, peaks, has_mxfp8=has_mxfp8) * tokens_per_second_per_gpu
