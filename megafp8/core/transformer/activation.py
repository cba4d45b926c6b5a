"""The MLP's activations, FP32 inside, which keep nothing but fc1's output.

    SwiGLU       silu(gate) * up, fc1's output being [gate; up] along its features
    GELU         x * Phi(x), or its tanh form
    squared ReLU max(x, 0)^2

Autograd's own formulas would keep FP32 copies; here backward computes them anew from fc1's output in the compute
dtype. Before an fc2 in FP8 the activation is the linear's producer (`fp8.producer`): on GPUs SwiGLU and its gradient
are one kernel each, which writes quantized results only, fc2's input for wgrad included.

With `store_fp8` what is kept of fc1's output is FP8, rowwise 1 x 128 tiles: half the bytes, and backward works on
values that differ from forward's by their rounding (Megatron-LM's `--activation-func-fp8-input-store`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.config.model import ModelConfig
from megafp8.fp8.formats import E4M3, OperandSpec, Scale, Tile
from megafp8.fp8.producer import Gradients, Tensors, Want, differentiate, fused_kernels, fuses
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import Quantized, QuantizedStorage

if TYPE_CHECKING:
    from megafp8.kernels.swiglu_quantize import SwigluQuantized

STORE = Quantizer(OperandSpec(E4M3, Tile("1d", 128), Scale.POW2))
"""How fc1's output is kept in FP8, whatever the recipe of the linears."""


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
    """formula: of an FP32 tensor; gated: fc1's output is twice as wide as fc2's input; store_fp8: how it is kept.

    As a producer: x is fc1's output [T, ffn, or 2 ffn when gated], tensors are () or (weights,): FP32 [T], what each
    row is multiplied by before it is rounded.
    """

    formula: Callable[[Tensor], Tensor]
    gated: bool = False
    store_fp8: bool = False

    def __call__(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """x: fc1's output [..., ffn, or 2 ffn when gated]; returns [..., ffn] in x's dtype.

        weights: FP32 [...], what each row is multiplied by, before it is rounded.
        """
        return _Apply.apply(x, self, *(() if weights is None else (weights,)))

    def compute(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """The activation without autograd, rounded to x's dtype."""
        with torch.no_grad():
            return self._make(x, () if weights is None else (weights,), None, x.dtype)

    def keep(self, x: Tensor) -> Tensors:
        """What backward keeps of fc1's output."""
        if not self.store_fp8:
            return (x,)
        stored = STORE.quantize(x.reshape(-1, x.shape[-1])).rowwise
        return stored.data.view(x.shape), stored.scale_inv

    def restore(self, kept: Tensors, dtype: torch.dtype) -> Tensor:
        """fc1's output from what was kept, in `dtype`."""
        if not self.store_fp8:
            return kept[0]
        data, scale_inv = kept
        stored = QuantizedStorage(data.view(-1, data.shape[-1]), scale_inv, STORE.spec.tile, Scale.POW2, "rowwise")
        return stored.dequantize(dtype).view(data.shape)

    def produce(self, x: Tensor, tensors: Tensors, want: Want | None) -> tuple[Tensor | Quantized, Tensors]:
        if self.store_fp8 and want is not None and self._fused(x, x.dtype, want):
            made = self._run(x, tensors, want, x.dtype, x_spec=STORE.spec)  # one pass makes value and bytes
            kept = STORE.store(made.x_rowwise, "rowwise")
            return want.store(made.rowwise, made.colwise), (kept.data, kept.scale_inv)
        return self._make(x, tensors, want, x.dtype), self.keep(x)

    def remake(self, kept: Tensors, tensors: Tensors, want: Want | None, dtype: torch.dtype) -> Tensor | Quantized:
        return self._make(self._source(kept, dtype), tensors, want, dtype)

    def gradient(
        self,
        grad: Tensor,
        kept: Tensors,
        tensors: Tensors,
        want: Want | None,
        remake: Want | bool,
        beside: Tensor | None = None,
    ) -> Gradients:
        assert beside is None, "fc1's output goes nowhere else"
        x, again = self._source(kept, grad.dtype), remake if isinstance(remake, Want) else None
        # One pass makes both only if experts' rows have scales of their own in both, or in none.
        alike = again is None or (again.groups is None) == (want is None or want.groups is None)
        if alike and self._fused(x, grad.dtype, want, again) and not (again and again.rowwise):
            return self._fused_gradient(grad, x, tensors, want, remake)
        value = self._make(x, tensors, again, grad.dtype) if remake else None
        if not alike and self._fused(x, grad.dtype, want):
            return self._fused_gradient(grad, x, tensors, want, False)._replace(value=value)
        if want is not None and want.groups is not None and self._fused(x, grad.dtype):
            made = self._fused_gradient(grad, x, tensors, None, False)  # experts of an odd width
            return Gradients(want.quantize(made.x), made.tensors, value)
        x = x if isinstance(x, Tensor) else self.restore(x, grad.dtype)
        dx, of_tensors = differentiate(self._weighted, x.float(), tensors, grad.float())
        dx = dx.to(grad.dtype)
        return Gradients(dx if want is None else want.quantize(dx), of_tensors, value)

    def _source(self, kept: Tensors, dtype: torch.dtype) -> Tensor | Tensors:
        """fc1's output from what was kept; its bytes where the kernels read them."""
        as_bytes = self.store_fp8 and self._fused(kept, dtype)
        return kept if as_bytes else self.restore(kept, dtype)

    def _make(self, x: Tensor | Tensors, tensors: Tensors, want: Want | None, dtype: torch.dtype) -> Tensor | Quantized:
        if self._fused(x, dtype, want):
            made = self._run(x, tensors, want, dtype)
            return made.y if want is None else want.store(made.rowwise, made.colwise)
        if want is not None and want.groups is not None and self._fused(x, dtype):
            return want.quantize(self._make(x, tensors, None, dtype))  # experts of an odd width
        x = x if isinstance(x, Tensor) else self.restore(x, dtype)
        value = self._weighted(x.float(), *tensors).to(dtype)
        return value if want is None else want.quantize(value)

    @staticmethod
    def _run(
        x: Tensor | Tensors, tensors: Tensors, want: Want | None, dtype: torch.dtype, **options: object
    ) -> SwigluQuantized:
        """SwiGLU's kernel, where it is the formula."""
        _, kernels, _ = fused_kernels()
        options |= {"weights": tensors[0] if tensors else None, "dtype": dtype}
        if want is None:
            return kernels.swiglu_quantize(x, STORE.spec, rowwise=False, high_precision=True, **options)
        options |= {"rowwise": want.rowwise, "colwise": want.colwise, **want.scaling}
        return kernels.swiglu_quantize(x, want.spec, **options)

    def _fused_gradient(
        self, grad: Tensor, x: Tensor | Tensors, tensors: Tensors, want: Want | None, remake: Want | bool
    ) -> Gradients:
        _, kernels, _ = fused_kernels()
        again = remake if isinstance(remake, Want) else None
        options = {"weights": tensors[0] if tensors else None, "high_precision": want is None}
        if want is not None:
            options |= {"rowwise": want.rowwise, "colwise": want.colwise, **want.scaling}
        else:
            options |= {"rowwise": False, "colwise": False}
        if again is not None:
            options |= {"y_spec": again.spec, "y_amax": again.amax, "y_scale": again.scale}
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        made = kernels.swiglu_grad_quantize(grad, x, (want or Want(STORE)).spec, **options)
        dx = made.dx if want is None else want.store(made.rowwise, made.colwise)
        value = None
        if remake:
            value = again.store(None, made.y_colwise) if again else self._make(x, tensors, None, grad.dtype)
        return Gradients(dx, (made.dweights,) if tensors else (), value)

    def _fused(self, x: Tensor | Tensors, dtype: torch.dtype, *wants: Want | None) -> bool:
        """Whether kernels do it. x: fc1's output, or its bytes and scales."""
        return self.formula is swiglu and fuses(x if isinstance(x, Tensor) else x[0], dtype, *wants)

    def _weighted(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        y = self.formula(x)
        return y if weights is None else y * weights[..., None]


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, activation: Activation, *tensors: Tensor) -> Tensor:
        value, kept = activation.produce(x, tensors, None)
        ctx.activation, ctx.kept = activation, len(kept)
        ctx.save_for_backward(*kept, *tensors)
        return value

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grads = ctx.activation.gradient(grad_output, saved[: ctx.kept], saved[ctx.kept :], None, False)
        return grads.x, None, *grads.tensors


def activation_of(model: ModelConfig, store_fp8: bool = False) -> Activation:
    """The activation that the flags ask for. GELU as Megatron-LM: the tanh form where its fused kernel would add the
    bias of a linear, exact elsewhere."""
    if model.swiglu:
        return Activation(swiglu, gated=True, store_fp8=store_fp8)
    if model.squared_relu:
        return Activation(squared_relu, store_fp8=store_fp8)
    tanh = model.add_bias_linear and model.bias_gelu_fusion
    return Activation(gelu_tanh if tanh else gelu, store_fp8=store_fp8)
