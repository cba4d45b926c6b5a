"""Moves each group's tokens of a colwise operand to an aligned column, for GEMMs grouped over K.

TMA reads only from 16-byte aligned columns, while groups of any size follow each other without gaps. Quantizers that
leave gaps (`padding` a multiple of 16) save this pass over both operands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 16, 256


def regroup(x: Tensor, ends: Tensor, padding: int, new_padding: int) -> Tensor:
    """`[R, T]` of one-byte elements whose groups begin at multiples of `padding`, with groups at multiples of another.

    ends: int32 `[G]`, one past each group's last token (tokens counted without gaps). The result is `[R, W]`, W = T +
    G * new_padding rounded up to 16 bytes; zeros between groups, past the last one nothing is written.
    """
    rows, tokens = x.shape
    width = -(-(tokens + ends.numel() * new_padding) // 16) * 16
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS))
    regroup_kernel[grid](x.view(torch.uint8), out.view(torch.uint8), ends, ends.numel(), rows, x.stride(0), width,
                         padding, new_padding, ROWS=_ROWS, COLUMNS=_COLUMNS)  # fmt: skip
    return out


@triton.jit
def regroup_kernel(x, out, ends, groups, rows, x_ld, out_ld, padding, new_padding, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr):  # fmt: skip
    """A program copies ROWS x COLUMNS of the result."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    source = tl.full([COLUMNS], -1, tl.int32)
    start = 0
    old = 0
    new = 0
    for g in range(groups):
        end = tl.load(ends + g)
        size = end - start
        source = tl.where((column >= new) & (column < new + size), column - new + old, source)
        old += tl.cdiv(size, padding) * padding
        new += tl.cdiv(size, new_padding) * new_padding
        start = end
    inside = (row < rows)[:, None]
    bytes_ = tl.load(x + row[:, None] * x_ld + source[None, :], mask=inside & (source >= 0)[None, :], other=0)
    tl.store(out + row[:, None] * out_ld + column[None, :], bytes_, mask=inside & (column < new)[None, :])
