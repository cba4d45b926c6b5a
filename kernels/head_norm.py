"""Queries and keys normalized by head and rotated, straight from the fused qkv projection's output; and the gradients.

    y = x * rstd * (w + offset), rounded;    out = y turned by the token's angles, rounded        for queries and keys

qkv lies as in `rope`. FP32 inside; y is rounded in between, so that it makes no difference whether the two happen in
one kernel or in two. Backward reads qkv again and keeps nothing but it: rstd costs a sum over values that are there
anyway. Each program sums the gradients of the two weights over its tokens; `norm_grad.sum_parts` adds these sums
in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .norm_grad import sum_parts
from .quantize_configs import multiprocessors

_HEADS = 16
"""Heads a program moves at a time."""
_PROGRAMS = 8
"""Programs of the gradient's kernel a multiprocessor."""


@triton.jit
def _normal(here, mask, eps, HALF: tl.constexpr):
    """(x * rstd of both halves of some heads [heads, d/2], rstd [heads, 1]), FP32."""
    a = tl.load(here, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(a * a + b * b, 1)[:, None] * (1.0 / (2 * HALF))
    rstd = tl.div_rn(mean * 0.0 + 1.0, tl.sqrt_rn(mean + eps))
    return a * rstd, b * rstd, rstd


@triton.jit
def _forward(here, there, mask, weight, cos, sin, eps, OFFSET: tl.constexpr, HALF: tl.constexpr):
    dtype: tl.constexpr = there.dtype.element_ty
    channel = tl.arange(0, HALF)
    x, y, _ = _normal(here, mask, eps, HALF)
    x = (x * (tl.load(weight + channel).to(tl.float32) + OFFSET)[None, :]).to(dtype).to(tl.float32)
    y = (y * (tl.load(weight + HALF + channel).to(tl.float32) + OFFSET)[None, :]).to(dtype).to(tl.float32)
    tl.store(there, (x * cos - y * sin).to(dtype), mask=mask)
    tl.store(there + HALF, (y * cos + x * sin).to(dtype), mask=mask)


@triton.jit
def _backward(here, there, dx, mask, weight, cos, sin, eps, sum_a, sum_b, OFFSET: tl.constexpr, HALF: tl.constexpr):
    """The gradient of some heads of one token, from `there` to `dx`; adds the weight's gradient to sums by head."""
    dtype: tl.constexpr = dx.dtype.element_ty
    channel = tl.arange(0, HALF)
    x, y, rstd = _normal(here, mask, eps, HALF)
    u = tl.load(there, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(there + HALF, mask=mask, other=0.0).to(tl.float32)
    da = (u * cos + v * sin).to(dtype).to(tl.float32)
    db = (v * cos - u * sin).to(dtype).to(tl.float32)
    sum_a += da * x
    sum_b += db * y
    da *= (tl.load(weight + channel).to(tl.float32) + OFFSET)[None, :]
    db *= (tl.load(weight + HALF + channel).to(tl.float32) + OFFSET)[None, :]
    mean = tl.sum(da * x + db * y, 1)[:, None] * (1.0 / (2 * HALF))
    tl.store(dx, ((da - x * mean) * rstd).to(dtype), mask=mask)
    tl.store(dx + HALF, ((db - y * mean) * rstd).to(dtype), mask=mask)
    return sum_a, sum_b


@triton.jit
def norm_heads_kernel(qkv, q, k, v, q_weight, k_weight, cos_ptr, sin_ptr, groups, qkv_stride, eps, N: tl.constexpr,
                      HALF: tl.constexpr, HEADS: tl.constexpr, OFFSET: tl.constexpr):  # fmt: skip
    """Some heads of one token: first come programs for queries, then keys, then values. q, k and v are contiguous."""
    q_blocks, blocks = tl.cdiv(groups * N, HEADS), tl.cdiv(groups, HEADS)
    t = (tl.program_id(0) // (q_blocks + 2 * blocks)).to(tl.int64)
    block = tl.program_id(0) % (q_blocks + 2 * blocks)
    channel = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + t * HALF + channel)
    sin = tl.load(sin_ptr + t * HALF + channel)
    packed = qkv + t * qkv_stride + channel
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        here = packed + (head // N * (N + 2) + head % N)[:, None] * (2 * HALF)
        there = q + (t * groups * N + head)[:, None] * (2 * HALF) + channel
        _forward(here, there, (head < groups * N)[:, None], q_weight, cos, sin, eps, OFFSET, HALF)
    elif block < q_blocks + blocks:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        here = packed + (head * (N + 2) + N)[:, None] * (2 * HALF)
        there = k + (t * groups + head)[:, None] * (2 * HALF) + channel
        _forward(here, there, (head < groups)[:, None], k_weight, cos, sin, eps, OFFSET, HALF)
    else:
        head = (block - q_blocks - blocks) * HEADS + tl.arange(0, HEADS)
        here = packed + (head * (N + 2) + N + 1)[:, None] * (2 * HALF)
        there = v + (t * groups + head)[:, None] * (2 * HALF) + channel
        mask = (head < groups)[:, None]
        tl.store(there, tl.load(here, mask=mask), mask=mask)
        tl.store(there + HALF, tl.load(here + HALF, mask=mask), mask=mask)


@triton.jit
def norm_heads_grad_kernel(qkv, dq, dk, dv, q_weight, k_weight, cos_ptr, sin_ptr, dqkv, dw, T, groups, qkv_stride,
                           q_stride, k_stride, v_stride, q_head, k_head, v_head, eps, N: tl.constexpr,
                           HALF: tl.constexpr, HEADS: tl.constexpr, OFFSET: tl.constexpr):  # fmt: skip
    """Every so many tokens, all their heads. dw: [programs, 4, d/2], halves of the queries' weight, then the keys'."""
    channel = tl.arange(0, HALF)[None, :]
    q_a = tl.zeros([HEADS, HALF], tl.float32)
    q_b = tl.zeros([HEADS, HALF], tl.float32)
    k_a = tl.zeros([HEADS, HALF], tl.float32)
    k_b = tl.zeros([HEADS, HALF], tl.float32)
    for token in range(tl.program_id(0), T, tl.num_programs(0)):
        t = token.to(tl.int64)
        cos = tl.load(cos_ptr + t * HALF + channel)
        sin = tl.load(sin_ptr + t * HALF + channel)
        packed = t * qkv_stride + channel
        joined = t * (groups * (N + 2) * 2 * HALF) + channel
        for first in range(0, groups * N, HEADS):
            head = first + tl.arange(0, HEADS)
            place = (head // N * (N + 2) + head % N)[:, None] * (2 * HALF)
            there = dq + t * q_stride + head[:, None] * q_head + channel
            q_a, q_b = _backward(qkv + packed + place, there, dqkv + joined + place, (head < groups * N)[:, None],
                                 q_weight, cos, sin, eps, q_a, q_b, OFFSET, HALF)  # fmt: skip
        for first in range(0, groups, HEADS):
            head = first + tl.arange(0, HEADS)
            mask = (head < groups)[:, None]
            place = (head * (N + 2) + N)[:, None] * (2 * HALF)
            there = dk + t * k_stride + head[:, None] * k_head + channel
            k_a, k_b = _backward(qkv + packed + place, there, dqkv + joined + place, mask, k_weight, cos, sin, eps,
                                 k_a, k_b, OFFSET, HALF)  # fmt: skip
            out = dqkv + joined + place + 2 * HALF
            there = dv + t * v_stride + head[:, None] * v_head + channel
            tl.store(out, tl.load(there, mask=mask), mask=mask)
            tl.store(out + HALF, tl.load(there + HALF, mask=mask), mask=mask)
    sums = dw + tl.program_id(0).to(tl.int64) * (4 * HALF) + tl.arange(0, HALF)
    tl.store(sums, tl.sum(q_a, 0))
    tl.store(sums + HALF, tl.sum(q_b, 0))
    tl.store(sums + 2 * HALF, tl.sum(k_a, 0))
    tl.store(sums + 3 * HALF, tl.sum(k_b, 0))


def norm_heads(
    qkv: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, queries_per_group: int, *, eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalized and rotated q [T, heads, d] and k [T, groups, d], and v [T, groups, d], contiguous.

    qkv: [T, groups * (n + 2) * d], contiguous channels. weights: of queries and keys, [d] each; `offset` is added to
    them. cos, sin: contiguous FP32 [T, d/2], d/2 a power of two.
    """
    n, half = queries_per_group, cos.shape[1]
    tokens, groups = qkv.shape[0], qkv.shape[1] // ((n + 2) * 2 * half)
    q, k, v = (torch.empty(tokens, heads, 2 * half, dtype=qkv.dtype, device=qkv.device)
               for heads in (groups * n, groups, groups))  # fmt: skip
    if tokens:
        blocks = triton.cdiv(groups * n, _HEADS) + 2 * triton.cdiv(groups, _HEADS)
        facts, tensors = (tokens, groups, n, half, qkv.stride(0), eps, offset), (qkv, q, k, v, *weights, cos, sin)
        launch(norm_heads_kernel, facts, tensors, lambda: (
            (tokens * blocks,),
            (*tensors, groups, qkv.stride(0), eps),
            {"N": n, "HALF": half, "HEADS": _HEADS, "OFFSET": offset, "num_warps": 4},
        ))  # fmt: skip
    return q, k, v


def norm_heads_grad(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, *,
    eps: float, offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(gradient of qkv, as it lies and contiguous; of the queries' weight; of the keys'). dq, dk, dv: contiguous
    channels, any other strides; the rest as given to `norm_heads`."""
    (tokens, heads, channels), groups = dq.shape, dk.shape[1]
    out = torch.empty(tokens, (heads + 2 * groups) * channels, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return out, *(torch.zeros_like(weight) for weight in weights)
    programs = min(tokens, _PROGRAMS * multiprocessors(qkv.device))
    partial = torch.empty(programs, 2 * channels, dtype=torch.float32, device=qkv.device)
    strides = dq.stride(0), dk.stride(0), dv.stride(0), dq.stride(1), dk.stride(1), dv.stride(1)
    facts = programs, tokens, heads, groups, channels, qkv.stride(0), strides, eps, offset
    tensors = qkv, dq, dk, dv, *weights, cos, sin, out, partial
    launch(norm_heads_grad_kernel, facts, tensors, lambda: (
        (programs,),
        (*tensors, tokens, groups, qkv.stride(0), *strides, eps),
        {"N": heads // groups, "HALF": channels // 2, "HEADS": _HEADS, "OFFSET": offset, "num_warps": 4},
    ))  # fmt: skip
    dw = sum_parts(partial, weights[0].dtype)
    return out, dw[:channels], dw[channels:]
