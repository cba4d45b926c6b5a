"""RMSNorm's gradient in one pass over its inputs; the gradient that reaches x on another way is added on the fly.

    y = x * rstd * (w + offset)
    dx = rstd * (dy * w - x * rstd * mean(dy * w * x * rstd)) + beside        dw = sum over rows of dy * x * rstd

FP32 inside. dx is rounded before `beside` is added, so that it makes no difference whether that happens here or later.
Each program sums dw over its rows; a second kernel adds these sums in one order, so that the result does not depend on
timing. It rounds them to the weight's dtype, and may add that to a gradient in FP32: as if autograd had handed it over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .quantize_configs import multiprocessors

_PROGRAMS = 4
"""Programs a multiprocessor."""
WIDEST = 16384
"""Widest row that fits into a program's registers."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def norm_grad_kernel(dy, x, weight, rstd, beside, dx, dw, T, stride_dy, stride_x, stride_beside, H: tl.constexpr,
                     WEIGHT_OFFSET: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    mask = cols < H
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32) + WEIGHT_OFFSET
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        t = row.to(tl.int64)
        r = tl.load(rstd + t)
        normal = tl.load(x + t * stride_x + cols, mask=mask, other=0.0).to(tl.float32) * r
        grad = tl.load(dy + t * stride_dy + cols, mask=mask, other=0.0).to(tl.float32)
        total += grad * normal
        grad *= w
        mean = tl.sum(grad * normal, 0) / H
        out = ((grad - normal * mean) * r).to(dx.dtype.element_ty)
        if beside is not None:
            other = tl.load(beside + t * stride_beside + cols, mask=mask, other=0.0)
            out = (out.to(tl.float32) + other.to(tl.float32)).to(dx.dtype.element_ty)
        tl.store(dx + t * H + cols, out, mask=mask)
    tl.store(dw + tl.program_id(0).to(tl.int64) * H + cols, total, mask=mask)


@triton.jit
def sum_rows_kernel(partial, out, ROWS, H, DTYPE: tl.constexpr, ADDS: tl.constexpr, BLOCK_R: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """out[h] (+)= sum over rows of partial [ROWS, H], rounded to DTYPE."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_R, BLOCK], tl.float32)
    for first in range(0, ROWS, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        mask = (rows < ROWS)[:, None] & (cols < H)[None, :]
        total += tl.load(partial + rows[:, None] * H + cols[None, :], mask=mask, other=0.0)
    value = tl.sum(total, 0).to(DTYPE).to(out.dtype.element_ty)
    if ADDS:
        value += tl.load(out + cols, mask=cols < H, other=0.0)
    tl.store(out + cols, value, mask=cols < H)


def rms_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, weight_offset: float = 0.0, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx [T, h] in x's dtype, parts of dw: FP32 [programs, h], see `sum_parts`) of RMSNorm.

    dy, x, beside: [T, h], contiguous rows. rstd: FP32 [T], from forward. beside: added to the rounded dx, and rounded
    again. Raises ValueError for rows wider than 16384.
    """
    T, H = x.shape
    if H > WIDEST:
        raise ValueError(f"rms_norm_grad: rows of {H} elements; at most {WIDEST}")
    dx = torch.empty(T, H, dtype=x.dtype, device=x.device)
    programs = max(1, min(T, _PROGRAMS * multiprocessors(x.device)))
    parts = torch.empty(programs, H, dtype=torch.float32, device=x.device)
    facts = programs, T, H, dy.stride(0), x.stride(0), beside.stride(0) if beside is not None else 0, weight_offset
    launch(norm_grad_kernel, facts, (dy, x, weight, rstd, beside, dx, parts), lambda: _grad_arguments(
        dy, x, weight, rstd, beside, dx, parts, weight_offset
    ))  # fmt: skip
    return dx, parts


def sum_parts(parts: Tensor, dtype: torch.dtype, out: Tensor | None = None, adds: bool = False) -> Tensor:
    """The sum of FP32 parts [programs, h], rounded to `dtype`: by itself, or in `out` (FP32 [h]), added to what is
    there or written over it."""
    programs, H = parts.shape
    out = torch.empty(H, dtype=dtype, device=parts.device) if out is None else out
    launch(sum_rows_kernel, (programs, H, dtype, adds), (parts, out), lambda: (
        (triton.cdiv(H, 32),),
        (parts, out, programs, H),
        {"DTYPE": _TYPES[dtype], "ADDS": adds, "BLOCK_R": 64, "BLOCK": 32, "num_warps": 4},
    ))  # fmt: skip
    return out


def _grad_arguments(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, beside: Tensor | None, dx: Tensor, partial: Tensor,
    weight_offset: float,
) -> tuple:  # fmt: skip
    (T, H), block = x.shape, triton.next_power_of_2(x.shape[1])
    beside_stride = beside.stride(0) if beside is not None else 0
    return (
        (partial.shape[0],),
        (dy, x, weight, rstd, beside, dx, partial, T, dy.stride(0), x.stride(0), beside_stride),
        {"H": H, "WEIGHT_OFFSET": weight_offset, "BLOCK": block, "num_warps": max(1, min(16, block // 512))},
    )
