"""Causal attention over sequences, or over packed documents that don't see each other.

Tokens are `[T, heads, channels]` with T = batch * length, batch-major. Query heads share key/value heads in order:
head h reads group h // (heads / groups). Documents and sliding windows go through variable-length attention on CUDA.
Where there is none (CPU, FP32, attention dropout), documents go one by one, and a window is a mask.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from megafp8.core.context_parallel import gather_sequences, own_chunks, query_bounds
from megafp8.core.tensor_parallel.random import seeded
from megafp8.core.transformer.ring_attention import Visibility, ring_attention
from megafp8.core.transformer.rope import Rotation
from megafp8.parallel import Axis
from megafp8.step import StepContext

# cuDNN is the fastest on Hopper, but its backward is not deterministic. FP32 falls through to the plain formula.
FASTEST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
DETERMINISTIC = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
# PyTorch 2.11 shares heads unasked; later versions want to be told.
_VARLEN_GQA = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Sequences:
    """How the T tokens of a microbatch lie: `batch` sequences of `length` tokens; under context parallelism `length` is
    this rank's share of a sequence.

    rotation: rotary cosines and sines of each token, None without rotary positions.
    cu_seqlens: int32 [documents + 1] on the tokens' device, where each document of the whole sequences starts and
        the last one ends; None when each sequence is one document.
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
    cp: the ranks that share each sequence; ring: they pass keys and values on instead of gathering them.
    """

    name: str
    dropout: float = 0.0
    deterministic: bool = False
    scale: float | None = None
    window: int | None = None
    cp: Axis = Axis()
    ring: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """q: [T, heads, d], k: [T, groups, d], v: [T, groups, c]; returns [T, heads * c], which backward keeps."""
        p = self.dropout if step.training else 0.0
        with seeded(step.random_seed(self.name), q.device) if p else nullcontext():
            if self.cp.size > 1:
                out = self._shared(q, k, v, sequences, p)
            elif sequences.cu_seqlens is None and not (self._window(sequences.length) and _packable(q, p)):
                shape = sequences.batch, sequences.length
                out = self._dense(*(x.view(*shape, *x.shape[1:]) for x in (q, k, v)), p)
            else:
                bounds = self._bounds(sequences.cu_seqlens, sequences.batch, sequences.length, q.device)
                out = self._packed(q, k, v, bounds, bounds, sequences.length, sequences.length, p)
        return out.reshape(q.shape[0], -1)

    def _shared(self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, p: float) -> Tensor:
        """Of sequences that ranks share. Returns [b, tokens, heads, c]."""
        batch, length = sequences.batch, sequences.length * self.cp.size
        q = q.unflatten(0, (batch, -1))
        if self.ring:
            assert not p, "the configuration refuses it"
            k, v = (x.unflatten(0, (batch, -1)) for x in (k, v))
            seen = Visibility(length, sequences.cu_seqlens, self._window(length))
            return ring_attention(q, k, v, self.scale or q.shape[-1] ** -0.5, self.cp, seen)
        k, v = (gather_sequences(x, batch, self.cp) for x in (k, v))
        parts = zip(own_chunks(self.cp), q.chunk(2, dim=1), strict=True)
        return torch.cat([self._chunk(part, k, v, chunk, sequences.cu_seqlens, p) for chunk, part in parts], 1)

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, chunk: int, documents: Tensor | None, p: float) -> Tensor:
        """One chunk of queries [b, tokens, heads, d] and all keys and values [b, s, groups, d]: those up to its end."""
        batch, count, length = q.shape[0], q.shape[1], k.shape[1]
        start, stop = chunk * count, (chunk + 1) * count
        k, v = k[:, :stop], v[:, :stop]
        if documents is None and not _packable(q, p):
            return self._dense(q, k, v, p)
        bounds = self._bounds(documents, batch, length, q.device)
        of_queries, of_keys = query_bounds(bounds, length, start, stop), query_bounds(bounds, length, 0, stop)
        flat = (x.flatten(0, 1).contiguous() for x in (q, k, v))
        return self._packed(*flat, of_queries, of_keys, count, stop, p).unflatten(0, (batch, -1))

    @staticmethod
    def _bounds(documents: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
        if documents is not None:
            return documents
        return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)

    def _window(self, length: int) -> int | None:
        """The window, where it hides anything from a sequence of `length` tokens."""
        return self.window if self.window is not None and self.window < length - 1 else None

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
        """q: [b, queries, heads, d]; k, v: [b, keys, groups, ...]; the last query sees all keys. Returns
        [b, queries, heads, c]."""
        backends = DETERMINISTIC if self.deterministic else FASTEST
        channels, window = v.shape[-1], self._window(k.shape[1])
        if q.is_cuda and self.deterministic:
            v = _widened(v, q.shape[-1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        plain = window is None and q.shape[2] == k.shape[2]
        with sdpa_kernel(backends, set_priority=True) if q.is_cuda else nullcontext():
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if plain else _band(q.shape[2], k.shape[2], window, q.device),
                dropout_p=p,
                is_causal=plain,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        out = out.transpose(1, 2)
        return out if out.shape[-1] == channels else out[..., :channels]

    def _packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        of_queries: Tensor,
        of_keys: Tensor,
        longest_queries: int,
        longest_keys: int,
        p: float,
    ) -> Tensor:
        """Documents one after the other: q [T, heads, d], k, v [keys, groups, ...]; the last query of a document sees
        all its keys. of_queries, of_keys: int32, each document's bounds. Returns [T, heads, c].

        A document lies within one sequence, so the sequence's length bounds it: no need to ask the device.
        """
        if not _packable(q, p):
            queries, keys = ([slice(a, b) for a, b in pairwise(x.tolist())] for x in (of_queries, of_keys))
            parts = [(a, b) for a, b in zip(queries, keys, strict=True) if a.start < a.stop]
            return torch.cat([self._dense(q[a][None], k[b][None], v[b][None], p)[0] for a, b in parts])
        window = self._window(longest_keys)
        out = varlen_attn(
            q,
            k,
            _widened(v, q.shape[-1]),
            of_queries,
            of_keys,
            longest_queries,
            longest_keys,
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


def _band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys]: a query (row) reads its own key and `window` keys before; the last query's is the last."""
    band = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return band if window is None else band.triu(keys - queries - window)
