"""RMSNorm and LayerNorm: computed in FP32, handed over in the compute dtype.

PyTorch's own kernels do both (they upcast inside). The result is what the consumer's quantizer reads, so a fused
norm+quantize kernel must give the bytes of quantizing exactly this rounded value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.specs import ONES, ZEROS, replicated
from megafp8.params import attach_spec


class Norm(nn.Module):
    """Normalizes the last dimension: RMSNorm `x / rms(x) * w`, or LayerNorm `(x - mean) / std * w + b`.

    kind: "RMSNorm" or "LayerNorm" (Megatron-LM's `--normalization`).
    zero_centered: the weight is stored minus one (`--apply-layernorm-1p`), so that decay would pull it to one.
    gradient_is_part: each tensor-parallel rank's gradient covers only its tokens (sequence parallelism) or heads.
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
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.kind, self.eps, self.zero_centered = kind, eps, zero_centered

        def parameter(field: str, init) -> nn.Parameter:
            spec = replicated(f"{name}.{field}", (size,), init, gradient_is_part=gradient_is_part)
            return attach_spec(nn.Parameter(torch.empty(size, dtype=dtype, device=device)), spec)

        self.weight = parameter("weight", ZEROS if zero_centered else ONES)
        self.bias = parameter("bias", ZEROS) if kind == "LayerNorm" else None

    def compute(self, x: Tensor) -> Tensor:
        """The norm without autograd: the same bits as `forward`."""
        with torch.no_grad():
            return self(x)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] in the parameters' dtype; returns the same shape and dtype."""
        if self.zero_centered:  # `w + 1` must not round to BF16
            bias = None if self.bias is None else self.bias.float()
            return self._normalize(x.float(), self.weight.float() + 1, bias).to(x.dtype)
        return self._normalize(x, self.weight, self.bias)

    def _normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.kind == "RMSNorm":
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def hidden_norm(name: str, build: BuildContext) -> Norm:
    """The norm of a layer's input or of the model's output, over the hidden size."""
    return _norm(name, build.model.hidden_size, build.model.norm_epsilon, build, build.sequence_parallel)


def head_norm(name: str, build: BuildContext) -> Norm:
    """The norm of each head's queries or keys, over the head's channels. It sees all tokens, but only this rank's
    heads: its gradient is a part as well."""
    return _norm(name, build.model.kv_channels, build.model.norm_epsilon, build, build.tp.size > 1)


def latent_norm(name: str, size: int, build: BuildContext) -> Norm:
    """The norm of a latent of `size` channels, which every rank has whole, of all tokens."""
    return _norm(name, size, build.model.latent_norm_epsilon, build, False)


def _norm(name: str, size: int, eps: float, build: BuildContext, gradient_is_part: bool) -> Norm:
    return Norm(
        name,
        size,
        kind=build.model.normalization,
        eps=eps,
        zero_centered=build.model.apply_layernorm_1p,
        gradient_is_part=gradient_is_part,
        dtype=build.dtype,
        device=build.device,
    )
