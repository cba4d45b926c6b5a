"""RMSNorm and LayerNorm: computed in FP32, handed over in the compute dtype, or quantized as the consumer wishes.

    RMSNorm     x / sqrt(mean(x^2) + eps) * w
    LayerNorm   (x - mean) / sqrt(var + eps) * w + b

PyTorch's own kernels do both (they upcast inside). Before a linear in FP8 an RMSNorm is the linear's producer: on GPUs
one kernel then writes the quantized result and nothing else; its bytes are the quantizer's bytes of the value that it
rounds to the compute dtype on the way.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.specs import ONES, ZEROS, replicated
from megafp8.fp8.producer import Gradients, Tensors, Want, differentiate, fused_kernels, fuses
from megafp8.fp8.storage import Quantized
from megafp8.fp8.wgrad import put
from megafp8.params import attach_spec


class Norm(nn.Module):
    """Normalizes the last dimension, as a module or as the producer of a linear (`fp8.producer`; RMSNorm only).

    kind: "RMSNorm" or "LayerNorm" (Megatron-LM's `--normalization`).
    zero_centered: the weight is stored minus one (`--apply-layernorm-1p`), so that decay would pull it to one.
    gradient_is_part: each tensor-parallel rank's gradient covers only its tokens (sequence parallelism) or heads.
    decay: whether weight decay applies.
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        kind: str,
        eps: float,
        zero_centered: bool = False,
        gradient_is_part: bool = False,
        decay: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.kind, self.eps, self.zero_centered = kind, eps, zero_centered

        def parameter(field: str, init) -> nn.Parameter:
            spec = replicated(f"{name}.{field}", (size,), init, decay=decay, gradient_is_part=gradient_is_part)
            return attach_spec(nn.Parameter(torch.empty(size, dtype=dtype, device=device)), spec)

        self.weight = parameter("weight", ZEROS if zero_centered else ONES)
        self.bias = parameter("bias", ZEROS) if kind == "LayerNorm" else None

    def compute(self, x: Tensor) -> Tensor:
        """The norm without autograd: the same bits as `forward`."""
        with torch.no_grad():
            return self(x)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] in the parameters' dtype; returns the same shape and dtype."""
        return self._formula(x, self.weight, self.bias)

    def _formula(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.zero_centered:  # `w + 1` must not round to BF16
            bias = None if bias is None else bias.float()
            return self._normalize(x.float(), weight.float() + 1, bias).to(x.dtype)
        return self._normalize(x, weight, bias)

    def _normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)

    # As the producer of a linear. Kept: x, and on GPUs the reciprocal root mean squares, FP32 [T].

    @property
    def produces(self) -> bool:
        return self.kind == "RMSNorm"

    def produce(self, x: Tensor, tensors: Tensors, want: Want | None) -> tuple[Tensor | Quantized, Tensors]:
        """x: [T, size]; tensors: the weight."""
        (weight,) = tensors
        if want is not None and fuses(x, x.dtype, want):
            kernels, _, _ = fused_kernels()
            options = {"rowwise": want.rowwise, "colwise": want.colwise, "weight_offset": float(self.zero_centered)}
            made = kernels.rms_norm_quantize(x, weight, want.spec, eps=self.eps, **options, **want.scaling)
            return want.store(made.rowwise, made.colwise), (x, made.rstd)
        if x.is_cuda and not self.zero_centered:
            value, rstd = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, self.eps)
            return _as_wanted(value, want), (x, rstd.view(-1))
        return _as_wanted(self._formula(x, weight), want), (x,)

    def remake(self, kept: Tensors, tensors: Tensors, want: Want | None, dtype: torch.dtype) -> Tensor | Quantized:
        (weight,), x = tensors, kept[0]
        if want is not None and not want.rowwise and fuses(x, x.dtype, want):
            kernels, _, _ = fused_kernels()
            options = {"weight_offset": float(self.zero_centered), "amax": want.amax, "scale": want.scale}
            return want.store(None, kernels.norm_columns_quantize(x, weight, kept[1], want.spec, **options))
        return _as_wanted(self._formula(x, weight), want)

    def gradient(
        self,
        grad: Tensor,
        kept: Tensors,
        tensors: Tensors,
        want: Want | None,
        remake: Want | bool,
        beside: Tensor | None = None,
    ) -> Gradients:
        (weight,), x = tensors, kept[0]
        value = self.remake(kept, tensors, remake if isinstance(remake, Want) else None, x.dtype) if remake else None
        if len(kept) == 2 and fuses(x, x.dtype) and x.shape[1] <= fused_kernels()[2].WIDEST:
            grad, beside = (t if t is None or t.stride(1) == 1 else t.contiguous() for t in (grad, beside))
            options = {"weight_offset": float(self.zero_centered), "beside": beside}
            kernels = fused_kernels()[2]
            dx, parts = kernels.rms_norm_grad(grad, x, weight, kept[1], **options)
            dw = partial(kernels.sum_parts, parts, weight.dtype)
        else:
            dx, (of_weight,) = differentiate(self._formula, x, (weight,), grad)
            dx, dw = dx if beside is None else dx + beside, partial(put, of_weight)
        return Gradients(_as_wanted(dx, want), (dw,), value)


def _as_wanted(value: Tensor, want: Want | None) -> Tensor | Quantized:
    return value if want is None else want.quantize(value)


def hidden_norm(name: str, build: BuildContext) -> Norm:
    """The norm of a layer's input or of the model's output, over the hidden size."""
    return _norm(name, build.model.hidden_size, build.model.norm_epsilon, build, build.sequence_parallel)


def head_norm(name: str, build: BuildContext) -> Norm:
    """The norm of each head's queries or keys, over the head's channels. It sees all tokens, but only this rank's
    heads: its gradient is a part as well."""
    return _norm(
        name, build.model.kv_channels, build.model.norm_epsilon, build, build.tp.size > 1, build.head_norms_decay
    )


def latent_norm(name: str, size: int, build: BuildContext) -> Norm:
    """The norm of a latent of `size` channels, which every rank has whole, of all tokens."""
    return _norm(name, size, build.model.latent_norm_epsilon, build, False, build.head_norms_decay)


def _norm(name: str, size: int, eps: float, build: BuildContext, gradient_is_part: bool, decay: bool = False) -> Norm:
    return Norm(
        name,
        size,
        kind=build.model.normalization,
        eps=eps,
        zero_centered=build.model.apply_layernorm_1p,
        gradient_is_part=gradient_is_part,
        decay=decay,
        dtype=build.dtype,
        device=build.device,
    )
