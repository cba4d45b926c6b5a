"""What makes a linear's input inside of that linear's autograd function: a norm before qkv, SwiGLU before fc2.

    y = producer(x) @ W.T

Inside, because then the input is quantized where it is made and never written in high precision, and because backward
can make it anew from what the producer keeps anyway, in the same pass that computes the producer's gradient.

A producer is pure. It lives in `core`; here is what a linear asks of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megafp8.fp8 import backend, expert_scales
from megafp8.fp8.expert_scales import Groups
from megafp8.fp8.formats import OperandSpec
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import Quantized
from megafp8.fp8.wgrad import Run

Tensors = tuple[Tensor, ...]


@dataclass(eq=False, slots=True)
class Want:
    """How a consumer wants a value: quantized by `quantizer`, in these orientations. It is not changed once it is
    built.

    Tensor tiles only, each FP32 [1]: amax, instead of the value's own; scale, instead of one from an amax; amax_out,
    which is raised to the value's. record: what the consumer does with that. share: where ranks hold parts of the
    tensor, overwrites the amax of this rank's part with that of all (`Axis.max_`); called once, between the pass that
    measures and the one that quantizes, whatever the rows here, as the other ranks wait for it. groups: where experts'
    rows lie, each of which has a tensor tile of its own; then all of these are [G].
    """

    quantizer: Quantizer
    rowwise: bool = True
    colwise: bool = False
    amax: Tensor | None = None
    scale: Tensor | None = None
    amax_out: Tensor | None = None
    record: Callable[[Tensor], None] | None = None
    groups: Groups | None = None
    share: Callable[[Tensor], object] | None = None

    def of_experts(self, groups: Groups) -> Want:
        """The same, of rows that lie there."""
        assert self.share is None, "experts that ranks have parts of run one by one"
        scaling = (self.amax, self.scale, self.amax_out, self.record)
        return Want(self.quantizer, self.rowwise, self.colwise, *scaling, groups)

    @property
    def spec(self) -> OperandSpec:
        return self.quantizer.spec

    @property
    def scaling(self) -> dict[str, object]:
        """Arguments of fused kernels."""
        scaling = {"amax": self.amax, "scale": self.scale, "amax_out": self.amax_out, "share": self.share}
        return scaling if self.groups is None else scaling | {"ends": self.groups.ends}

    @property
    def keeps_amax(self) -> bool:
        """Whether the value can be quantized again as now only with its amax."""
        return self.spec.tile.kind == "tensor" and self.amax is None and self.scale is None

    def measuring(self, device: torch.device) -> Want:
        """The same, with a place for the value's amax if somebody needs it."""
        if not self.keeps_amax and self.record is None:
            return self
        place = backend.zero(device, 1 if self.groups is None else self.groups.count)
        scaling = (self.amax, self.scale, place, self.record)
        return Want(self.quantizer, self.rowwise, self.colwise, *scaling, self.groups, self.share)

    def measured(self) -> None:
        """Call it when the value has been made: records its amax."""
        if self.record is not None and self.amax_out is not None:
            self.record(self.amax_out)

    def quantize(self, value: Tensor, index: Tensor | None = None) -> Quantized:
        """index: with `groups`, which rows of `value` they are (int64, -1: zeros); None: all, as they lie."""
        amax = self.amax
        if self.groups is not None:
            options = {"scale": self.scale, "amax_out": self.amax_out, "index": index}
            orientations = self.rowwise, self.colwise
            return expert_scales.quantize(self.quantizer, value, self.groups, *orientations, amax, **options)
        if self.share is not None:
            options = {"amax_out": self.amax_out, "share": self.share}
            return self.quantizer.quantize(value, self.rowwise, self.colwise, **options)
        if self.amax_out is not None:
            torch.maximum(self.amax_out, self.quantizer.amax(value), out=self.amax_out)
            amax = self.amax_out if self.scale is None else None
        return self.quantizer.quantize(value, self.rowwise, self.colwise, amax=amax, scale=self.scale)

    def store(self, rowwise: tuple[Tensor, Tensor] | None, colwise: tuple[Tensor, Tensor] | None) -> Quantized:
        """What a fused kernel gave: (data, scale_inv) of each orientation."""
        return self.quantizer.store_pair(rowwise, colwise)


class Gradients(NamedTuple):
    """x: dX, quantized where that was wanted; tensors: of the producer's other tensors, None where there is none, those
    of parameters still to be computed, where they belong; value: the producer's value once more, if it was asked for,
    quantized where that was wanted."""

    x: Tensor | Quantized
    tensors: tuple[Tensor | Run | None, ...]
    value: Tensor | Quantized | None


class Producer(Protocol):
    """value = f(x, *tensors), `[M, K]` in the compute dtype, rounded to it before it is quantized.

    Methods return a plain tensor where they have no fused way to what is wanted, or nothing is.
    """

    def produce(self, x: Tensor, tensors: Tensors, want: Want | None) -> tuple[Tensor | Quantized, Tensors]:
        """The value, and what to keep for backward besides `tensors`."""
        ...

    def remake(self, kept: Tensors, tensors: Tensors, want: Want | None, dtype: torch.dtype) -> Tensor | Quantized:
        """The value again, from what was kept; dtype: the compute dtype."""
        ...

    def gradient(
        self,
        grad: Tensor,
        kept: Tensors,
        tensors: Tensors,
        want: Want | None,
        remake: Want | bool,
        beside: Tensor | None = None,
    ) -> Gradients:
        """From the gradient of the value. want: how dX is wanted. remake: whether, and how, the value is wanted too.
        beside: a gradient that reaches x on another way, to be added to dX."""
        ...


def differentiate(
    formula: Callable[..., Tensor], x: Tensor, tensors: Tensors, grad: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gradients of `formula(x, *tensors)` by autograd: the reference of fused gradients. In the inputs' dtypes."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (x, *tensors)]
        value = formula(*inputs)
    dx, *others = torch.autograd.grad(value, inputs, grad.to(value.dtype))
    return dx, tuple(others)


@cache
def fused_kernels() -> tuple[ModuleType, ModuleType, ModuleType] | None:
    """(norm_quantize, swiglu_quantize, norm_grad); None where Triton is not installed."""
    try:
        from megafp8.kernels import norm_grad, norm_quantize, swiglu_quantize
    except ImportError:
        return None
    return norm_quantize, swiglu_quantize, norm_grad


def fuses(x: Tensor, dtype: torch.dtype, *wants: Want | None) -> bool:
    """Whether the fused kernels take `x`, of the compute dtype or bytes of it, and these wishes."""
    if not x.is_cuda or dtype not in (torch.bfloat16, torch.float16) or x.dim() != 2 or x.stride(1) != 1:
        return False
    for want in wants:
        if want is not None:
            tile = want.quantizer.spec.tile
            if want.groups is not None and (want.groups.block % expert_scales.ALIGNMENT or x.shape[1] % 256):
                return False
            if tile.kind != "tensor" and (tile.kind != "1d" or 128 % tile.block):
                return False
    return fused_kernels() is not None
