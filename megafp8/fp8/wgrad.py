"""Gradients of parameters on their way to a gradient sink, or to `.grad`: now, or when the step's queue runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.step import StepContext


@dataclass(frozen=True)
class Wgrad:
    """run: dW, FP32, added into the tensor that it is given (FP32), or by itself. Until then it holds operands of
    `held_bytes`."""

    run: Callable[[Tensor | None], Tensor]
    held_bytes: int


def sum_rows(dy: Tensor) -> Callable[[Tensor | None], Tensor]:
    """The gradient of a bias."""

    def run(out: Tensor | None) -> Tensor:
        total = dy.sum(0, dtype=torch.float32)
        return total if out is None else out.add_(total)

    return run


def multiply_wgrad(dy: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    """`dY.T @ X` of high-precision dY [M, N] and X [M, K]: FP32 [N, K], added into `out` where one is given."""
    if not x.is_cuda or x.dtype == torch.float32:
        product = dy.t().float() @ x.float()
        return product if out is None else out.add_(product)
    if out is None:
        return torch.mm(dy.t(), x, out_dtype=torch.float32)
    return torch.addmm(out, dy.t(), x, out_dtype=torch.float32, out=out)


def deliver_wgrad(param: Tensor, wgrad: Wgrad, step: StepContext | None) -> Tensor | None:
    """Delivers dW now, or leaves that to `step.wgrads`."""
    if step is None or step.grads is None or step.wgrads is None:
        return deliver(param, wgrad.run, step)
    grads = step.grads

    def run() -> None:
        wgrad.run(grads.buffer(param))
        grads.ready(param)

    step.wgrads.submit(run, wgrad.held_bytes)
    return None


def deliver(param: Tensor, run: Callable[[Tensor | None], Tensor], step: StepContext | None) -> Tensor | None:
    """Adds an FP32 gradient into the sink's buffer, or returns it for `.grad` in the parameter's dtype."""
    if step is None or step.grads is None:
        return run(None).to(param.dtype)
    run(step.grads.buffer(param))
    step.grads.ready(param)
    return None
