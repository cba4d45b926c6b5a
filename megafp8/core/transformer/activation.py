"""The MLP's activations, FP32 inside, which keep nothing but fc1's output.

    SwiGLU       silu(gate) * up, fc1's output being [gate; up] along its features
    GELU         x * Phi(x), or its tanh form
    squared ReLU max(x, 0)^2

Autograd's own formulas would keep FP32 copies; here backward computes them anew from fc1's output in the compute
dtype, and fc2 can have its input recomputed the same way (`Activation.forward` is a pure function of fc1's output).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.config.model import ModelConfig


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up; x: [..., 2 ffn], [gate; up]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): Megatron-LM's form for linears with biases."""
    return F.gelu(x, approximate="tanh")


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), exact."""
    return F.gelu(x)


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    return F.relu(x).square()


@dataclass(frozen=True)
class Activation:
    """formula: of an FP32 tensor; gated: fc1's output is twice as wide as fc2's input."""

    formula: Callable[[Tensor], Tensor]
    gated: bool = False

    def compute(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """The activation without autograd, rounded to x's dtype."""
        with torch.no_grad():
            return self._weighted(x.float(), weights).to(x.dtype)

    def __call__(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """x: fc1's output [..., ffn, or 2 ffn when gated]; returns [..., ffn] in x's dtype.

        weights: FP32 [...], what each row is multiplied by, before it is rounded.
        """
        return _Apply.apply(x, weights, self)

    def _weighted(self, x: Tensor, weights: Tensor | None) -> Tensor:
        y = self.formula(x)
        return y if weights is None else y * weights[..., None]


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor | None, activation: Activation) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.activation = activation
        return activation.compute(x, weights)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        with torch.enable_grad():
            x32 = x.detach().float().requires_grad_()
            inputs = [x32] if weights is None else [x32, weights.detach().requires_grad_()]
            y = ctx.activation._weighted(x32, weights if weights is None else inputs[1])
        grad, *of_weights = torch.autograd.grad(y, inputs, grad_output.float())
        return grad.to(x.dtype), of_weights[0] if of_weights else None, None


def activation_of(model: ModelConfig) -> Activation:
    """The activation that the flags ask for. GELU as Megatron-LM: the tanh form where its fused kernel would add the
    bias of a linear, exact elsewhere."""
    if model.swiglu:
        return Activation(swiglu, gated=True)
    if model.squared_relu:
        return Activation(squared_relu)
    return Activation(gelu_tanh if model.add_bias_linear and model.bias_gelu_fusion else gelu)
