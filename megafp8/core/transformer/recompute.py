"""Activation recomputation: compute again in backward what would otherwise be kept.

`recomputed` runs a whole part again; `remade` and `all_remade` replace tensors that a consumer would keep, where
running their producer alone is enough. All give the bits of the first time: random numbers are functions of the step,
not of a generator's state. The second pass of a part gets `step.recompute()`, so that it records no statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


@contextmanager
def all_remade(outputs: Sequence[Tensor], remake: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
    """`remade` for several tensors that are made together, and that their consumer may see in another shape.

    remake: gives them all, of the same values and strides; asked once for all that the consumer's backward needs.
    """
    places = {(output.data_ptr(), output.numel()): number for number, output in enumerate(outputs)}
    made: list[Tensor] = []
    waiting = 0

    def pack(tensor: Tensor) -> Tensor | tuple[int, torch.Size, tuple[int, ...]]:
        nonlocal waiting
        number = places.get((tensor.data_ptr(), tensor.numel()))
        if number is None:
            return tensor
        waiting += 1
        return number, tensor.size(), tensor.stride()

    def unpack(kept: Tensor | tuple[int, torch.Size, tuple[int, ...]]) -> Tensor:
        nonlocal waiting
        if isinstance(kept, Tensor):
            return kept
        if not made:
            made.extend(remake())
        number, size, stride = kept
        tensor = made[number].as_strided(size, stride)
        waiting -= 1
        if not waiting:
            made.clear()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
