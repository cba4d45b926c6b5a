"""Collectives that autograd goes through, outside of linears: partial sums become whole hidden states.

A tensor that every rank holds whole has the same gradient on every rank, so the backward of a sum is the identity, and
that of a sum scattered over the tokens is a gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.parallel import Axis


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        return axis.sum_(x.clone())

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.scatter_sum(x.contiguous())

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.gather(grad_output.contiguous()), None


def sum_over(x: Tensor, axis: Axis, *, scatter: bool) -> Tensor:
    """The sum of the ranks' `x` [T, h]; with `scatter` this rank's tokens of it, [T / size, h]."""
    if axis.size == 1:
        return x
    return (_ScatterSum if scatter else _Sum).apply(x, axis)
