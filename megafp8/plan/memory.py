"""Estimated memory of one rank, in bytes, from the configuration alone.

What stays through a step, n being a parameter's elements and e the bytes of the compute dtype (BF16 2, FP32 4):

    weights           n e
    main gradients    4 n     FP32, each parameter's place in the flat buffer rounded up to 64 elements
    masters           4 n     FP32, laid out alike; 2 n with --store-param-remainders
    moments           8 n     two in FP32, laid out alike; in BF16 2 n each, in FP8 (1 + 5/64) n
    FP8 copies        a byte an element and the scales, rowwise and transposed, of each FP8 weight

With --use-distributed-optimizer masters and moments are divided by the ranks that hold the same parameter. With
--fp8-param-gather an FP8 weight is a byte an element and its scales (twice under 1D tiles, which differ by direction),
and of its copies only the transposed one is left.

and what a microbatch of T tokens adds until its backward, by module (`activations`). Left out: workspaces of
libraries, fragmentation, the CUDA context (about 0.5 GiB), and buffers shorter than a layer's forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.config import Config
from megafp8.config.parallel import layout_sizes
from megafp8.fp8 import gemm
from megafp8.fp8.primary import orientations
from megafp8.optimizer.groups import precision_of
from megafp8.optimizer.layout import BufferLayout, Entry, Group, plan_layouts
from megafp8.plan.activations import Activation, activations, peak_extra, quantized_bytes
from megafp8.plan.shapes import LinearShape, linears, parameters


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, by owner. activations: held for backward by one microbatch; extra: the largest of what
    comes and goes on top of them (the logits' gradient, or layers that are being recomputed)."""

    weights: int
    main_grads: int
    masters: int
    moments: int
    fp8_copies: int
    activations: tuple[Activation, ...]
    extra: Activation

    @property
    def static(self) -> int:
        """Bytes that stay through the whole step."""
        return self.weights + self.main_grads + self.masters + self.moments + self.fp8_copies

    @property
    def held(self) -> int:
        """Bytes that one microbatch holds when its forward ends."""
        return sum(a.bytes for a in self.activations)

    @property
    def total(self) -> int:
        """The estimated peak."""
        return self.static + self.held + self.extra.bytes


def plan_memory(config: Config, device: torch.device | str = "cpu") -> MemoryPlan:
    """Returns the memory of one rank that trains the configuration on `device`.

    Args:
        config: resolved, with the vocabulary known (`with_vocab_size`).
        device: whose GEMMs decide on orientations; nothing is allocated there.
    """
    dtype = torch.bfloat16 if config.train.bf16 else torch.float32
    layouts = buffer_layouts(config)
    elements = sum(layout.numel for layout in layouts)
    held = [(layout.numel // layout.shards, layout.precision) for layout in layouts]
    primary = primary_weights(config)
    plain = sum(p.numel for p in parameters(config) if p.name not in primary)
    return MemoryPlan(
        weights=plain * dtype.itemsize + sum(primary.values()),
        main_grads=4 * elements,
        masters=int(sum(n * precision.master_bytes for n, precision in held)),
        moments=int(sum(n * precision.moment_bytes for n, precision in held)),
        fp8_copies=fp8_copies(config, torch.device(device)),
        activations=tuple(activations(config, torch.device(device))),
        extra=peak_extra(config, torch.device(device)),
    )


def buffer_layouts(config: Config) -> tuple[BufferLayout, ...]:
    """Returns the layouts of the optimizer's flat buffers, alignment included, as one bucket each."""
    dtype, primary = torch.bfloat16 if config.train.bf16 else torch.float32, primary_weights(config)
    sizes = layout_sizes(config.parallel)
    shards = (sizes["dp"] * sizes["cp"], sizes["edp"]) if config.optimizer.use_distributed_optimizer else (1, 1)
    entries = (
        Entry(
            p.name,
            p.numel,
            torch.uint8 if p.name in primary else dtype,
            p.expert,
            Group(p.decay),
            precision=precision_of(p.name, p.shape, config),
        )
        for p in parameters(config)
    )
    return plan_layouts(entries, shards=shards[0], expert_shards=shards[1])


def primary_weights(config: Config) -> dict[str, int]:
    """Returns the bytes of each FP8 primary weight, by the parameter's name; none without --fp8-param-gather."""
    if not config.fp8.fp8_param_gather:
        return {}
    return {
        f"{linear.name}.weight": sum(
            _operand_bytes(linear, orientation) for orientation in orientations(linear.recipe.quantizer("weight"))
        )
        for linear in linears(config)
        if linear.recipe is not None
    }


def fp8_copies(config: Config, device: torch.device) -> int:
    """Returns the bytes of the FP8 weight copies that forward and backward keep until the next update."""
    free = {"rowwise"} if config.fp8.fp8_param_gather else set()  # the stored bytes themselves
    return sum(
        _operand_bytes(linear, orientation)
        for linear in linears(config)
        if linear.recipe is not None
        for orientation in set(gemm.needs(linear.recipe, "weight", device).values()) - free
    )


def _operand_bytes(linear: LinearShape, orientation: str) -> int:
    return quantized_bytes(linear.recipe, "weight", (linear.out_features, linear.in_features), orientation)
