"""What one rank sends to reduce gradients, update and publish weights, once a step.

The counterpart of `optimizer`: buckets of gradients and weights, gradients that are parts, the tied embedding, norms,
and the scales of weights that ranks share.
"""

from __future__ import annotations

import math

from megafp8.config import Config
from megafp8.fp8 import policy
from megafp8.fp8.primary import orientations, scale_shape
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.recipe import ROLES
from megafp8.optimizer.layout import ALIGNMENT, BufferLayout
from megafp8.plan.rank_parameters import COLUMN, ROW, RankParameter, rank_layouts, rank_parameters
from megafp8.plan.traffic import Groups, Passes, Traffic

FP32, FP64 = 4, 8


def optimizer_traffic(config: Config, groups: Groups, stage: int) -> list[Traffic]:
    held, layouts, found = rank_parameters(config, stage), rank_layouts(config, stage), Passes()
    _parts(held, groups, found)
    for layout in layouts:
        _buckets(config, layout, groups, found)
        if config.fp8.fp8_param_gather:
            _primary_scales(layout, {p.name: p for p in held}, groups, found)
    _norms(config, layouts, groups, found)
    _scales(config, held, groups, found)
    return found.all


def _parts(held: list[RankParameter], groups: Groups, found: Passes) -> None:
    """Gradients of which ranks have parts: over the tokens, or of the two stages that hold the embedding."""
    for p in held:
        if p.shared:
            found.add("forward", "send", groups["pp"], "gradient of the embedding", p.numel * FP32)
    size = sum(p.numel for p in held if p.partial) * FP32
    found.add("forward", "sum", groups["tp"], "gradients of parts", size, int(size > 0))


def _buckets(config: Config, layout: BufferLayout, groups: Groups, found: Passes) -> None:
    group = groups["edp" if layout.expert else "dp_cp"]
    element = 2 if config.parallel.grad_reduce_in_bf16 else FP32
    copies = len(_orientations(layout, config)) if layout.dtype.itemsize == 1 else 1
    what = " of experts" if layout.expert else ""
    for bucket in layout.buckets:
        size = bucket.stop - bucket.start
        kind = "sum" if layout.shards == 1 else "scatter_sum"
        found.add("forward", kind, group, f"gradients{what}", size * element, int(size > 0))
        if layout.shards > 1 and size:
            share = size // layout.shards * layout.dtype.itemsize
            found.add("forward", "gather", group, f"weights{what}", share * copies, copies)


def _orientations(layout: BufferLayout, config: Config) -> tuple[str, ...]:
    return orientations(_quantizer(layout, config))


def _quantizer(layout: BufferLayout, config: Config) -> Quantizer:
    """Of the FP8 primary weights of a buffer, which share one."""
    name = layout.slots[0].name.removesuffix(".weight")
    return policy.from_config(config)(name).quantizer("weight")


def _primary_scales(layout: BufferLayout, held: dict[str, RankParameter], groups: Groups, found: Passes) -> None:
    """Amaxes of all tiles, over the ranks that share the buffer, and of whole weights over those that cut them."""
    weights = [held[slot.name] for slot in layout.slots if held[slot.name].recipe is not None]
    if layout.dtype.itemsize > 1 or not weights:
        return
    quantizer = weights[0].recipe.quantizer("weight")
    packed = sum(
        -(-math.prod(scale_shape(quantizer, p.shape, o)) // ALIGNMENT) * ALIGNMENT
        for o in orientations(quantizer)
        for p in weights
    )
    if layout.shards > 1:
        group = groups["edp" if layout.expert else "dp_cp"]
        found.add("forward", "max", group, "amaxes of FP8 primary weights", packed * FP32)
    cut = [p for p in weights if _kind(p) in COLUMN + ROW]
    if quantizer.spec.tile.kind == "tensor" and cut:
        group = groups["etp" if layout.expert else "tp"]
        found.add("forward", "max", group, "amaxes of FP8 primary weights", len(cut) * FP32)


def _kind(p: RankParameter) -> str:
    return p.name.removesuffix(".weight").rpartition(".")[2]


def _norms(config: Config, layouts: tuple[BufferLayout, ...], groups: Groups, found: Passes) -> None:
    """Gradient norm, zeros, the norm of masters: the largest value and two flags, and sums on four grids."""
    world, alike = groups["world"], min(groups["dp_cp"].size, groups["edp"].size)
    spread = world.size > alike or any(layout.shards > 1 for layout in layouts)
    norms = 2 if config.logging.log_params_norm else 1
    found.add("forward", "max", world, "norms", norms * 3 * FP64, norms)
    if spread:
        found.add("forward", "sum", world, "norms", norms * 4 * FP64, norms)
        if config.logging.log_num_zeros_in_grad:
            found.add("forward", "sum", world, "zeros", 8)


def _scales(config: Config, held: list[RankParameter], groups: Groups, found: Passes) -> None:
    """Scales of weights that ranks have parts of, all in one message an axis; amaxes of delayed scaling."""
    for axis in ("tp", "etp"):
        group = groups[axis]
        if axis == "etp" and group == groups["tp"]:
            continue
        weights = [
            p
            for p in held
            if p.recipe is not None
            and _kind(p) in COLUMN + ROW
            and groups["etp" if p.expert else "tp"] == group
            and p.recipe.quantizer("weight").spec.tile.kind == "tensor"
            and not (p.recipe.uses_history or config.fp8.fp8_param_gather)
        ]
        found.add("forward", "max", group, "amaxes of weights", len(weights) * FP32, int(bool(weights)))
    count = len(ROLES) * sum(p.recipe is not None and p.recipe.uses_history for p in held)
    same = groups["etp"] == groups["tp"] and groups["edp"] == groups["dp_cp"]
    for axis in ("tp", "dp_cp") if same else ("tp", "dp_cp", "etp", "edp"):
        found.add("forward", "max", groups[axis], "amaxes of delayed scaling", count * FP32, int(count > 0))
