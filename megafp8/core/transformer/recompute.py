"""Activation recomputation: compute again in backward what would otherwise be kept.

`recomputed` runs a whole part again; `remade` replaces one tensor that a consumer would keep, where running its
producer alone is enough. Both give the bits of the first time: random numbers are functions of the step, not of a
generator's state. The second pass of a part gets `step.recompute()`, so that it records no statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def remade(output: Tensor, remake: Callable[[], Tensor]) -> Iterator[None]:
    """Inside, whoever saves `output` for backward keeps `remake` instead, which must give the same values.

    Not inside a part that is `recomputed`: it would keep all that is saved inside, against that part's purpose.
    """
    address, size = output.data_ptr(), output.numel()  # not `output`: the graph would keep it with `pack`

    def pack(tensor: Tensor) -> Tensor | None:
        return None if (tensor.data_ptr(), tensor.numel()) == (address, size) else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: remake() if kept is None else kept):
        yield
