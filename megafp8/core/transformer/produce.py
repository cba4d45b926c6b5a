"""A norm, then the only linear that reads its output; and the residual stream that goes on beside them."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from megafp8.core.transformer.norm import Norm
from megafp8.core.transformer.recompute import remade
from megafp8.fp8 import Linear
from megafp8.step import StepContext


def linear_after(norm: Norm | None, linear: Linear, x: Tensor, step: StepContext, *, remake: bool = False) -> Tensor:
    """`linear(norm(x))`, as one where the linear quantizes its input. x: [T, size]; without a norm, the linear alone.

    remake: backward makes the norm's output anew, rather than keeping it, or its FP8 copy. (Not in a part that is
    recomputed as a whole.)
    """
    if norm is None:
        return linear(x, step)
    if norm.produces and linear.takes_producer:
        return linear(x, step, producer=norm, tensors=(norm.weight,))
    h = norm(x)
    with remade(h, lambda: norm.compute(x)) if remake else nullcontext():
        return linear(h, step)


def branch_after(
    norm: Norm, linear: Linear, x: Tensor, step: StepContext, *, remake: bool = False
) -> tuple[Tensor, Tensor]:
    """`linear_after`, and `x` for the sum that follows: taken from here, its gradient is added inside the norm's."""
    if norm.produces and linear.takes_producer:
        return linear(x, step, producer=norm, tensors=(norm.weight,), passes_on=True)
    return linear_after(norm, linear, x, step, remake=remake), x
