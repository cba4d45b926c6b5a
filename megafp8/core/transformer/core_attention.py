"""Causal attention over sequences, or over packed documents that don't see each other.

Tokens are `[T, heads, channels]` with T = batch * length, batch-major. Query heads share key/value heads in order:
head h reads group h // (heads / groups). No mask is ever built: documents go through variable-length attention on
CUDA, and one by one where there is none (CPU, FP32, attention dropout).
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from megafp8.core.tensor_parallel.random import seeded
from megafp8.core.transformer.rope import Rotation
from megafp8.step import StepContext

# cuDNN is the fastest on Hopper, but its backward is not deterministic. FP32 falls through to the plain formula.
FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
DETERMINISTIC = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
# PyTorch 2.11 shares heads unasked; later versions want to be told.
_VARLEN_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Sequences:
    """How the T tokens of a microbatch lie: `batch` sequences of `length` tokens.

    rotation: rotary cosines and sines of each token, None without rotary positions.
    cu_seqlens: int32 [documents + 1] on the tokens' device, where each document starts and the last one ends in
        [0, T]; None when each sequence is one document.
    """

    batch: int
    length: int
    rotation: Rotation | None = None
    cu_seqlens: Tensor | None = None


@dataclass(frozen=True)
class CoreAttention:
    """softmax(q k^T / sqrt(channels)) v, causal, with dropout on the attention weights in training.

    name: global name, the place of its random numbers. deterministic: only kernels with a deterministic backward.
    """

    name: str
    dropout: float = 0.0
    deterministic: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """q: [T, heads, d], k and v: [T, groups, d]; returns [T, heads * d], the tensor that backward keeps."""
        p = self.dropout if step.training else 0.0
        with seeded(step.random_seed(self.name), q.device) if p else nullcontext():
            if sequences.cu_seqlens is None:
                shape = sequences.batch, sequences.length
                out = self._dense(*(x.view(*shape, *x.shape[1:]) for x in (q, k, v)), p)
            elif q.is_cuda and q.dtype == torch.bfloat16 and not p:
                out = _packed(q, k, v, sequences)
            else:
                bounds = sequences.cu_seqlens.tolist()
                documents = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]
                out = torch.cat([self._dense(*(x[d][None] for x in (q, k, v)), p)[0] for d in documents])
        return out.reshape(q.shape[0], -1)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        """q: [b, s, heads, d]; returns the same shape."""
        backends = DETERMINISTIC if self.deterministic else FASTEST
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backends, set_priority=True) if q.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(
                q, k, v, dropout_p=p, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)


def _packed(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
    # A document lies within one sequence, so the sequence length bounds it: no need to ask the device.
    bounds, longest = sequences.cu_seqlens, sequences.length
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0), **_VARLEN_GQA)
