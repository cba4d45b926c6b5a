"""Causal attention over sequences, or over packed documents that don't see each other.

Tokens are `[T, heads, channels]` with T = batch * length, batch-major. Query heads share key/value heads in order:
head h reads group h // (heads / groups). Documents and sliding windows go through variable-length attention on CUDA.
Where there is none (CPU, FP32, attention dropout), documents go one by one, and a window is a mask.
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
    """softmax(scale * q k^T) v, causal, with dropout on the attention weights in training.

    name: global name, the place of its random numbers. deterministic: only kernels with a deterministic backward.
    scale: by default 1 / sqrt(channels). window: how many keys before its own a token sees; None: all.
    """

    name: str
    dropout: float = 0.0
    deterministic: bool = False
    scale: float | None = None
    window: int | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """q: [T, heads, d], k: [T, groups, d], v: [T, groups, c]; returns [T, heads * c], which backward keeps."""
        p = self.dropout if step.training else 0.0
        with seeded(step.random_seed(self.name), q.device) if p else nullcontext():
            documents = sequences.cu_seqlens
            if (documents is not None or self._window(sequences.length)) and _packable(q, p):
                out = self._packed(q, k, v, sequences)
            elif documents is None:
                shape = sequences.batch, sequences.length
                out = self._dense(*(x.view(*shape, *x.shape[1:]) for x in (q, k, v)), p)
            else:
                bounds = documents.tolist()
                parts = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]
                out = torch.cat([self._dense(*(x[part][None] for x in (q, k, v)), p)[0] for part in parts])
        return out.reshape(q.shape[0], -1)

    def _window(self, length: int) -> int | None:
        """The window, where it hides anything from a sequence of `length` tokens."""
        return self.window if self.window is not None and self.window < length - 1 else None

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        """q: [b, s, heads, d]; returns [b, s, heads, c]."""
        backends = DETERMINISTIC if self.deterministic else FASTEST
        channels, window = v.shape[-1], self._window(q.shape[1])
        if q.is_cuda and self.deterministic:
            v = _widened(v, q.shape[-1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backends, set_priority=True) if q.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if window is None else _band(q.shape[2], window, q.device),
                dropout_p=p,
                is_causal=window is None,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out.transpose(1, 2)[..., :channels]

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
        bounds, longest = sequences.cu_seqlens, sequences.length
        if bounds is None:
            bounds = torch.arange(0, q.shape[0] + 1, longest, dtype=torch.int32, device=q.device)
        # A document lies within one sequence, so the sequence length bounds it: no need to ask the device.
        window = self._window(longest)
        out = varlen_attn(
            q,
            k,
            _widened(v, q.shape[-1]),
            bounds,
            bounds,
            longest,
            longest,
            scale=self.scale,
            window_size=(-1 if window is None else window, 0),
            **_VARLEN_GQA,
        )
        return out[..., : v.shape[-1]]


def _packable(q: Tensor, p: float) -> bool:
    """Whether there is a variable-length kernel for it."""
    return q.is_cuda and q.dtype == torch.bfloat16 and not p


def _widened(v: Tensor, channels: int) -> Tensor:
    """`v` with zeros up to `channels`: flash attention wants queries, keys and values equally wide."""
    return v if v.shape[-1] == channels else F.pad(v, (0, channels - v.shape[-1]))


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """bool [length, length]: a query (row) reads itself and `window` keys before."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(-window)
