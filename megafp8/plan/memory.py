"""Estimated memory of one rank, in bytes, from the configuration alone.

What stays through a step, n being a parameter's elements and e the bytes of the compute dtype (BF16 2, FP32 4):

    weights           n e
    main gradients    4 n     FP32, each parameter's place in the flat buffer rounded up to 64 elements
    masters           4 n     FP32, laid out alike
    moments           8 n     two in FP32, laid out alike
    FP8 copies        a byte an element and the scales, rowwise and transposed, of each FP8 weight

and what a microbatch of T tokens adds until its backward, by module (`activations`). Left out: workspaces of
libraries, fragmentation, the CUDA context (about 0.5 GiB), and buffers shorter than a layer's forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.config import Config
from megafp8.fp8 import gemm
from megafp8.optimizer.layout import Entry, Group, plan_layouts
from megafp8.plan.activations import Activation, activations, peak_extra, quantized_bytes
from megafp8.plan.shapes import linears, parameters


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
    elements = buffer_elements(config)
    return MemoryPlan(
        weights=sum(p.numel for p in parameters(config)) * dtype.itemsize,
        main_grads=4 * elements,
        masters=4 * elements,
        moments=8 * elements,
        fp8_copies=fp8_copies(config, torch.device(device)),
        activations=tuple(activations(config, torch.device(device))),
        extra=peak_extra(config, torch.device(device)),
    )


def buffer_elements(config: Config) -> int:
    """Returns the elements of the optimizer's flat buffers, alignment included."""
    dtype = torch.bfloat16 if config.train.bf16 else torch.float32
    layouts = plan_layouts(Entry(p.name, p.numel, dtype, p.expert, Group(p.decay)) for p in parameters(config))
    return sum(layout.numel for layout in layouts)


def fp8_copies(config: Config, device: torch.device) -> int:
    """Returns the bytes of the FP8 weight copies that forward and backward keep until the next update."""
    total = 0
    for linear in linears(config):
        if linear.recipe is not None:
            for orientation in set(gemm.needs(linear.recipe, "weight", device).values()):
                shape = (linear.out_features, linear.in_features)
                total += quantized_bytes(linear.recipe, "weight", shape, orientation)
    return total
