"""Gradients of parameters on their way to a gradient sink, or to `.grad`: now, or when the step's queue runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.step import StepContext

Run = Callable[[Tensor | None, bool], Tensor]
"""Computes a gradient: by itself (None, ...), or in the FP32 tensor that it is given, added to what is there (True) or
written over it (False)."""


class Wgrad(NamedTuple):
    """run: dW, FP32, by itself (None, ...), or in the FP32 tensor that it is given, added to what is there (True) or
    written over it (False). Until then it holds operands of `held_bytes`."""

    run: Run
    held_bytes: int


def put(value: Tensor, out: Tensor | None, adds: bool) -> Tensor:
    """`value` by itself, added into `out`, or written over it."""
    if out is None:
        return value
    return out.add_(value) if adds else out.copy_(value)


def sum_rows(dy: Tensor) -> Run:
    """The gradient of a bias."""
    return lambda out, adds: put(dy.sum(0, dtype=torch.float32), out, adds)


def multiply_wgrad(dy: Tensor, x: Tensor, out: Tensor | None, adds: bool = True) -> Tensor:
    """`dY.T @ X` of high-precision dY [M, N] and X [M, K]: FP32 [N, K], by itself or in `out`, as `put` does."""
    if out is not None and torch.compiler.is_compiling():
        _multiply_into(out, dy, x, adds)
        return out
    if not x.is_cuda or x.dtype == torch.float32:
        return put(dy.t().float() @ x.float(), out, adds)
    if out is None:
        return torch.mm(dy.t(), x, out_dtype=torch.float32)
    if not adds:
        return torch.mm(dy.t(), x, out_dtype=torch.float32, out=out)
    return torch.addmm(out, dy.t(), x, out_dtype=torch.float32, out=out)


@torch.library.custom_op(
    "megafp8::multiply_wgrad_into",
    mutates_args=("out",),
    schema="(Tensor(a!) out, Tensor dy, Tensor x, bool adds) -> ()",
)
def _multiply_into(out: Tensor, dy: Tensor, x: Tensor, adds: bool) -> None:
    """For `torch.compile`, whose own form of an `addmm` with an output dtype fails (torch 2.11)."""
    multiply_wgrad(dy, x, out, adds)


@_multiply_into.register_fake
def _(out: Tensor, dy: Tensor, x: Tensor, adds: bool) -> None:
    pass


def deliver_wgrad(param: Tensor, wgrad: Wgrad, step: StepContext | None) -> Tensor | None:
    """Delivers dW now, or leaves that to `step.wgrads`."""
    if step is None or step.grads is None or step.wgrads is None:
        return deliver(param, wgrad.run, step)
    grads = step.grads

    def run() -> None:
        wgrad.run(*grads.target(param))
        grads.ready(param)

    step.wgrads.submit(run, wgrad.held_bytes)
    return None


def deliver(param: Tensor, run: Run, step: StepContext | None) -> Tensor | None:
    """Leaves an FP32 gradient in the sink's buffer, or returns it for `.grad` in the parameter's dtype."""
    if step is None or step.grads is None:
        return run(None, False).to(param.dtype)
    run(*step.grads.target(param))
    step.grads.ready(param)
    return None
