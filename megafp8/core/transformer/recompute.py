"""Activation recomputation: run a part again in backward instead of keeping what it saved.

The second pass gets `step.recompute()`: it draws the same random numbers (they are functions of the step, not of a
generator's state) and records no statistics.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafp8.step import StepContext


def recomputed(part: Callable[..., Tensor], step: StepContext, *inputs: Tensor) -> Tensor:
    """`part(*inputs, step)`, of which only `inputs` are kept for backward."""
    if not torch.is_grad_enabled():
        return part(*inputs, step)
    passes = iter([step])

    def run(*inputs: Tensor) -> Tensor:
        return part(*inputs, next(passes, step.recompute()))

    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
