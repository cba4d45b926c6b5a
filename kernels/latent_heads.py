"""Queries, keys and values of multi-head latent attention from the up-projections' outputs, each in one pass; and back.

    queries  [T, heads * (P + R)]                    -> q [T, heads, P + R], the last R channels turned
    up       [T, heads * (P + V)], shared [T, R]     -> k [T, heads, P + R], whose last R channels are the turned shared
                                                        key; v [T, heads, V]

Channels 2i and 2i + 1 of the R turn by an angle given as FP32 cosine and sine [T, R / 2], in FP32, and are rounded. The
shared key's gradient is summed over heads in FP32, rounded, and turned back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_HEADS = 16
"""Heads a program moves at a time."""


@triton.jit
def _turned(x, cos, sin):
    """Pairs of neighbours of x [n, R], turned; in x's dtype."""
    n: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    a, b = tl.split(tl.reshape(x.to(tl.float32), (n, R // 2, 2)))
    return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (n, R)).to(x.dtype)


@triton.jit
def turn_tails_kernel(x, out, cos_ptr, sin_ptr, heads, x_stride, x_head, sign, P: tl.constexpr, R: tl.constexpr,
                      HEADS: tl.constexpr):  # fmt: skip
    """All heads of one token; out is contiguous."""
    t = tl.program_id(0).to(tl.int64)
    angle = tl.arange(0, R // 2)[None, :]
    cos = tl.load(cos_ptr + t * (R // 2) + angle)
    sin = tl.load(sin_ptr + t * (R // 2) + angle) * sign
    plain, tail = tl.arange(0, P)[None, :], P + tl.arange(0, R)[None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        mask = (head < heads)[:, None]
        here = x + t * x_stride + head[:, None] * x_head
        there = out + (t * heads + head)[:, None] * (P + R)
        tl.store(there + plain, tl.load(here + plain, mask=mask), mask=mask)
        tl.store(there + tail, _turned(tl.load(here + tail, mask=mask, other=0.0), cos, sin), mask=mask)


@triton.jit
def keys_and_values_kernel(up, shared, k, v, cos_ptr, sin_ptr, heads, up_stride, shared_stride, P: tl.constexpr,
                           R: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """All heads of one token; k and v are contiguous."""
    t = tl.program_id(0).to(tl.int64)
    angle = tl.arange(0, R // 2)[None, :]
    cos = tl.load(cos_ptr + t * (R // 2) + angle)
    sin = tl.load(sin_ptr + t * (R // 2) + angle)
    plain, tail, value = tl.arange(0, P)[None, :], tl.arange(0, R)[None, :], tl.arange(0, V)[None, :]
    turned = _turned(tl.load(shared + t * shared_stride + tail), cos, sin)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        mask = (head < heads)[:, None]
        here = up + t * up_stride + head[:, None] * (P + V)
        key = k + (t * heads + head)[:, None] * (P + R)
        tl.store(key + plain, tl.load(here + plain, mask=mask), mask=mask)
        tl.store(key + P + tail, tl.broadcast_to(turned, (HEADS, R)), mask=mask)
        tl.store(v + (t * heads + head)[:, None] * V + value, tl.load(here + P + value, mask=mask), mask=mask)


@triton.jit
def keys_and_values_grad_kernel(dk, dv, dup, dshared, cos_ptr, sin_ptr, heads, k_stride, k_head, v_stride, v_head,
                                P: tl.constexpr, R: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    """All heads of one token; dup and dshared are contiguous."""
    t = tl.program_id(0).to(tl.int64)
    angle = tl.arange(0, R // 2)[None, :]
    cos = tl.load(cos_ptr + t * (R // 2) + angle)
    sin = tl.load(sin_ptr + t * (R // 2) + angle)
    plain, tail, value = tl.arange(0, P)[None, :], tl.arange(0, R)[None, :], tl.arange(0, V)[None, :]
    total = tl.zeros([HEADS, R], tl.float32)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        mask = (head < heads)[:, None]
        key = dk + t * k_stride + head[:, None] * k_head
        there = dup + (t * heads + head)[:, None] * (P + V)
        tl.store(there + plain, tl.load(key + plain, mask=mask), mask=mask)
        values = tl.load(dv + t * v_stride + head[:, None] * v_head + value, mask=mask)
        tl.store(there + P + value, values, mask=mask)
        total += tl.load(key + P + tail, mask=mask, other=0.0).to(tl.float32)
    summed = tl.sum(total, 0)[None, :].to(dshared.dtype.element_ty)
    tl.store(dshared + t * R + tail, _turned(summed, cos, -sin))


def turn_tails(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """x [T, heads, P + R] with contiguous channels, the last R turned (back); contiguous. cos, sin: contiguous FP32
    [T, R / 2]. P and R are powers of two."""
    tokens, heads, channels = x.shape
    rotated = 2 * cos.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        facts = tokens, heads, channels, rotated, x.stride(0), x.stride(1), back
        launch(turn_tails_kernel, facts, (x, out, cos, sin), lambda: (
            (tokens,),
            (x, out, cos, sin, heads, x.stride(0), x.stride(1), -1.0 if back else 1.0),
            {"P": channels - rotated, "R": rotated, "HEADS": _HEADS, "num_warps": 4},
        ))  # fmt: skip
    return out


def keys_and_values(
    up: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, heads: int, plain: int
) -> tuple[Tensor, Tensor]:
    """k [T, heads, P + R] and v [T, heads, V], contiguous. up: [T, heads * (P + V)] and shared: [T, R], contiguous
    channels; plain: P. cos, sin: contiguous FP32 [T, R / 2]. P, R and V are powers of two."""
    tokens, rotated = shared.shape
    values = up.shape[1] // heads - plain
    k = torch.empty(tokens, heads, plain + rotated, dtype=up.dtype, device=up.device)
    v = torch.empty(tokens, heads, values, dtype=up.dtype, device=up.device)
    if tokens:
        facts = tokens, heads, plain, rotated, values, up.stride(0), shared.stride(0)
        launch(keys_and_values_kernel, facts, (up, shared, k, v, cos, sin), lambda: (
            (tokens,),
            (up, shared, k, v, cos, sin, heads, up.stride(0), shared.stride(0)),
            {"P": plain, "R": rotated, "V": values, "HEADS": _HEADS, "num_warps": 4,
             "maxnreg": 40},  # left to itself, ptxas takes 32 registers and spills two
        ))  # fmt: skip
    return k, v


def keys_and_values_grad(dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of up, of shared), contiguous. dk [T, heads, P + R], dv [T, heads, V]: contiguous channels."""
    (tokens, heads, channels), values = dk.shape, dv.shape[2]
    rotated = 2 * cos.shape[1]
    plain = channels - rotated
    dup = torch.empty(tokens, heads * (plain + values), dtype=dk.dtype, device=dk.device)
    dshared = torch.empty(tokens, rotated, dtype=dk.dtype, device=dk.device)
    if tokens:
        strides = dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1)
        facts = tokens, heads, plain, rotated, values, strides
        launch(keys_and_values_grad_kernel, facts, (dk, dv, dup, dshared, cos, sin), lambda: (
            (tokens,),
            (dk, dv, dup, dshared, cos, sin, heads, *strides),
            {"P": plain, "R": rotated, "V": values, "HEADS": _HEADS, "num_warps": 4},
        ))  # fmt: skip
    return dup, dshared
