"""Gradients of parameters on their way to a gradient sink, or to `.grad`: now, or when the step's queue runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.step import StepContext


@dataclass(frozen=True)
class Wgrad:
    """dW, FP32, once it is `run`; until then it holds operands of `held_bytes`."""

    run: Callable[[], Tensor]
    held_bytes: int


def sum_rows(dy: Tensor) -> Callable[[], Tensor]:
    return lambda: dy.sum(0, dtype=torch.float32)


def deliver_wgrad(param: Tensor, wgrad: Wgrad, step: StepContext | None) -> Tensor | None:
    """Delivers dW now, or leaves that to `step.wgrads`."""
    if step is None or step.grads is None or step.wgrads is None:
        return deliver(param, wgrad.run, step)
    grads = step.grads

    def run() -> None:
        grads.buffer(param).add_(wgrad.run())
        grads.ready(param)

    step.wgrads.submit(run, wgrad.held_bytes)
    return None


def deliver(param: Tensor, make: Callable[[], Tensor], step: StepContext | None) -> Tensor | None:
    """Adds an FP32 gradient into the sink's buffer, or returns it for `.grad` in the parameter's dtype."""
    if step is None or step.grads is None:
        return make().to(param.dtype)
    step.grads.buffer(param).add_(make())
    step.grads.ready(param)
    return None
