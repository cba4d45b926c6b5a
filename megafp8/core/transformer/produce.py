"""A norm, then the only linear that reads its output; and the residual stream that goes on beside them. Or several
linears, for which the norm's output is quantized once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from megafp8.core.transformer.norm import Norm
from megafp8.core.transformer.recompute import remade
from megafp8.fp8 import Linear, QuantizedTensor
from megafp8.fp8.producer import Want
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


def normalized_for(linears: Sequence[Linear], norm: Norm, x: Tensor, step: StepContext) -> Tensor:
    """`norm(x)` for linears that all read it: quantized once, where they want the same bytes."""
    recipe, specs = linears[0].recipe, [linear.input_spec() for linear in linears]
    alike = all(linear.recipe == recipe and not spec.requantizes for linear, spec in zip(linears, specs, strict=True))
    local = all(spec.comm.cut("input") is None and spec.comm.grid is None for spec in specs)
    quantized = recipe is not None and not recipe.uses_history and all(spec.quantizer is not None for spec in specs)
    if not (norm.produces and alike and local and quantized) or step.observer is not None:
        return norm(x)
    colwise = torch.is_grad_enabled() and any(spec.colwise for spec in specs)
    return _Shared.apply(x, norm.weight, norm, Want(specs[0].quantizer, True, colwise))


class _Shared(torch.autograd.Function):
    """A norm's output as bytes; the gradients of all that read it meet here, in the compute dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, norm: Norm, want: Want) -> Tensor:
        value, made = norm.produce(x, (weight,), want)
        ctx.norm = norm
        ctx.save_for_backward(weight, *made)
        return QuantizedTensor(value, x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        weight, *made = ctx.saved_tensors
        grads = ctx.norm.gradient(grad, tuple(made), (weight,), None, False)
        return grads.x, grads.tensors[0](None, False), None, None
