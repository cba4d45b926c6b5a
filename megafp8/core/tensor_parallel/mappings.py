"""Collectives that autograd goes through, outside of linears: partial sums become whole hidden states.

A tensor that every rank holds whole has the same gradient on every rank, so the backward of a sum is the identity, and
that of a sum scattered over the tokens is a gather. Where ranks go on with parts of what each holds whole, gradients
are partial and must be summed.
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


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.sum_(grad_output.clone(memory_format=torch.contiguous_format)), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.gather(x.contiguous())

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return _own(grad_output, ctx.axis), None


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _own(x, axis)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.gather(grad_output.contiguous()), None


def _own(x: Tensor, axis: Axis) -> Tensor:
    start, stop = axis.split(x.shape[0])
    return x[start:stop].clone()


def sum_gradient(x: Tensor, axis: Axis) -> Tensor:
    """`x`, which all ranks hold alike and use for parts of the work: its gradient is the sum of theirs."""
    return x if axis.size == 1 else _SumGradient.apply(x, axis)


def gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """All ranks' tokens [size * T, h], for work that every rank does on all of them alike."""
    return x if axis.size == 1 else _Gather.apply(x, axis)


def keep_tokens(x: Tensor, axis: Axis) -> Tensor:
    """This rank's tokens [T, h] of `x` [size * T, h], which all ranks hold alike: the reverse of `gather_tokens`."""
    return x if axis.size == 1 else _Keep.apply(x, axis)
