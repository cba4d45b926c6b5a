"""The router's product: x W^T in FP32 or FP64, whatever x and W are.

Products of two BF16 numbers are exact in FP32, so GPUs' BF16 tensor cores, which add in FP32, compute the FP32 product
of BF16 operands, far faster than FP32 units, and without a copy of x in FP32. The gradient of the logits is FP32; cut
into three BF16 numbers, whose sum it is, it is multiplied in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.fp8 import backend
from megafp8.fp8.wgrad import deliver, put
from megafp8.step import StepContext


class Logits(torch.autograd.Function):
    """x: [T, hidden]; weight: [E, hidden]. Returns [T, E] in `dtype`. Keeps x in its own dtype; the weight's gradient
    goes where a linear's does."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype, step: StepContext) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.dtype, ctx.step = weight, dtype, step
        if _exact_in_bf16(x, weight, dtype):
            return torch.mm(x, weight.t(), out_dtype=dtype)
        return x.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        if _exact_in_bf16(x, weight, ctx.dtype):
            parts = three_parts(grad_output)
            dx = parts @ weight.repeat(3, 1)
            dw = torch.mm(parts.t(), x, out_dtype=ctx.dtype).view(3, *weight.shape).sum(0)
        else:
            dx = (grad_output @ weight.to(ctx.dtype)).to(x.dtype)
            dw = grad_output.t() @ x.to(ctx.dtype)
        return dx, deliver(weight, lambda out, adds: put(dw, out, adds), ctx.step), None, None


def _exact_in_bf16(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and dtype == torch.float32 and x.numel() > 0


def three_parts(x: Tensor) -> Tensor:
    """BF16 [T, 3 E] from FP32 `x` [T, E]: three numbers of 8 bits each, side by side, whose sum is x's of 24."""
    kernels = backend.kernels("three_parts") if x.is_cuda and x.dtype == torch.float32 else None
    if kernels is not None:
        return kernels.three_parts(x)
    first = x.bfloat16()
    rest = x - first
    second = rest.bfloat16()
    return torch.cat([first, second, (rest - second).bfloat16()], 1)
