"""Context parallelism: each rank has a part of the tokens of every sequence, an early and a late one.

A sequence of s tokens is cut into 2 n chunks for n ranks; rank r has the chunks r and 2 n - 1 - r. Causal attention
costs a late token more than an early one, and so every rank has as much to do (as in Megatron-LM and Llama 3).
Everything but attention works on a rank's own tokens alone. Gradients of parameters are parts, summed with those of
data parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.parallel import Axis


def own_chunks(cp: Axis) -> tuple[int, int]:
    """The two chunks of rank `cp.rank`."""
    return cp.rank, 2 * cp.size - 1 - cp.rank


def own_tokens(x: Tensor, cp: Axis) -> Tensor:
    """This rank's tokens [b, s / n, ...] of whole sequences [b, s, ...]; 2 n must divide s."""
    if cp.size == 1:
        return x
    chunks = x.unflatten(1, (2 * cp.size, -1))
    return torch.cat([chunks[:, chunk] for chunk in own_chunks(cp)], 1)


def own_places(length: int, cp: Axis, device: torch.device | str = "cpu") -> Tensor:
    """int64 [s / n]: where this rank's tokens stand in a sequence of `length` tokens."""
    return own_tokens(torch.arange(length, device=device)[None], cp)[0]


class _Gather(torch.autograd.Function):
    """In the dtype of the tensors, BF16 under --bf16: half the bytes of FP32, forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor, cp: Axis) -> Tensor:
        ctx.cp = cp
        return cp.gather(x.contiguous())

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.cp.scatter_sum(grad_output.contiguous()), None


def gather_sequences(x: Tensor, batch: int, cp: Axis) -> Tensor:
    """All tokens, in order, [b, s, ...], from each rank's [b * s / n, ...]."""
    n = cp.size
    ranks = _Gather.apply(x, cp).unflatten(0, (n, batch, 2, -1))
    order = [(chunk, 0) if chunk < n else (2 * n - 1 - chunk, 1) for chunk in range(2 * n)]
    return torch.cat([ranks[rank, :, half] for rank, half in order], 1)


def query_bounds(bounds: Tensor, length: int, start: int, stop: int) -> Tensor:
    """Document bounds of whole sequences, as bounds of the tokens `start:stop` of each, packed: int32 [documents + 1].

    bounds: int32, of the b * s tokens, sequence bounds included.
    """
    sequence, place = bounds // length, bounds % length
    return (sequence * (stop - start) + (place - start).clamp(0, stop - start)).int()
