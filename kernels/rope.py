"""The fused qkv projection's output taken apart into queries, keys and values, and rotated, in one pass; and back.

qkv [T, groups * (n + 2) * d]: for each key/value group its n query heads, its key head, its value head. Channels i and
i + d/2 of a query or key turn by an angle given as FP32 cosine and sine [T, d/2]; values stay. Computed in FP32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_HEADS = 16
"""Heads a program moves."""


@triton.jit
def _move(here, there, mask, sign, cos_ptr, sin_ptr, TURNS: tl.constexpr, HALF: tl.constexpr, JOIN: tl.constexpr):
    """Both halves of some heads [heads, d/2], turned by the token's angles; from there to here with JOIN."""
    source, target = (there, here) if JOIN else (here, there)
    a = tl.load(source, mask=mask, other=0.0)
    b = tl.load(source + HALF, mask=mask, other=0.0)
    if TURNS:
        channel = tl.arange(0, HALF)
        cos = tl.load(cos_ptr + channel)[None, :]
        sin = tl.load(sin_ptr + channel)[None, :] * sign
        x, y = a.to(tl.float32), b.to(tl.float32)
        a = (x * cos - y * sin).to(a.dtype)
        b = (y * cos + x * sin).to(b.dtype)
    tl.store(target, a, mask=mask)
    tl.store(target + HALF, b, mask=mask)


@triton.jit
def heads_kernel(qkv, q, k, v, cos_ptr, sin_ptr, groups, qkv_stride, q_stride, k_stride, v_stride, q_head, k_head,
                 v_head, N: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, JOIN: tl.constexpr):  # fmt: skip
    """Some heads of one token: first come programs for queries, then keys, then values. JOIN: from q, k, v to qkv, back
    by the same angles."""
    q_blocks, blocks = tl.cdiv(groups * N, HEADS), tl.cdiv(groups, HEADS)
    t = (tl.program_id(0) // (q_blocks + 2 * blocks)).to(tl.int64)
    block = tl.program_id(0) % (q_blocks + 2 * blocks)
    cos_ptr += t * HALF
    sin_ptr += t * HALF
    sign = -1.0 if JOIN else 1.0
    channel = tl.arange(0, HALF)[None, :]
    packed = qkv + t * qkv_stride + channel
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        here = packed + (head // N * (N + 2) + head % N)[:, None] * (2 * HALF)
        there = q + t * q_stride + head[:, None] * q_head + channel
        mask = (head < groups * N)[:, None]
        _move(here, there, mask, sign, cos_ptr, sin_ptr, True, HALF, JOIN)
    elif block < q_blocks + blocks:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        here = packed + (head * (N + 2) + N)[:, None] * (2 * HALF)
        there = k + t * k_stride + head[:, None] * k_head + channel
        mask = (head < groups)[:, None]
        _move(here, there, mask, sign, cos_ptr, sin_ptr, True, HALF, JOIN)
    else:
        head = (block - q_blocks - blocks) * HEADS + tl.arange(0, HEADS)
        here = packed + (head * (N + 2) + N + 1)[:, None] * (2 * HALF)
        there = v + t * v_stride + head[:, None] * v_head + channel
        mask = (head < groups)[:, None]
        _move(here, there, mask, sign, cos_ptr, sin_ptr, False, HALF, JOIN)


def _launch(qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, join: bool) -> None:
    (tokens, heads, _), groups = q.shape, k.shape[1]
    if not tokens:
        return
    strides = q.stride(0), k.stride(0), v.stride(0), q.stride(1), k.stride(1), v.stride(1)
    facts = tokens, heads, groups, cos.shape[1], qkv.stride(0), strides, join

    def work_out() -> tuple:
        blocks = triton.cdiv(heads, _HEADS) + 2 * triton.cdiv(groups, _HEADS)
        named = {"N": heads // groups, "HALF": cos.shape[1], "HEADS": _HEADS, "JOIN": join, "num_warps": 4}
        return (tokens * blocks,), (qkv, q, k, v, cos, sin, groups, qkv.stride(0), *strides), named

    launch(heads_kernel, facts, (qkv, q, k, v, cos, sin), work_out)


def split_heads(qkv: Tensor, cos: Tensor, sin: Tensor, queries_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, heads, d], k and v [T, groups, d], contiguous. cos, sin: contiguous FP32 [T, d/2], d/2 a power of two."""
    n, half = queries_per_group, cos.shape[1]
    tokens, groups = qkv.shape[0], qkv.shape[1] // ((n + 2) * 2 * half)
    q, k, v = (torch.empty(tokens, heads, 2 * half, dtype=qkv.dtype, device=qkv.device)
               for heads in (groups * n, groups, groups))  # fmt: skip
    _launch(qkv, q, k, v, cos, sin, join=False)
    return q, k, v


def join_heads(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv, `[T, groups * (n + 2) * d]`. dq, dk, dv: contiguous channels."""
    (tokens, heads, channels), groups = dq.shape, dk.shape[1]
    out = torch.empty(tokens, (heads + 2 * groups) * channels, dtype=dq.dtype, device=dq.device)
    _launch(out, dq, dk, dv, cos, sin, join=True)
    return out
