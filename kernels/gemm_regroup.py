"""Moves each group's tokens of a colwise operand to an aligned column, for GEMMs grouped over K.

TMA reads only from 16-byte aligned columns, while groups of any size follow each other without gaps. A quantizer that
leaves gaps (`padding` a multiple of 16) saves this pass over both operands.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_ROWS, _WORDS = 8, 256


def regroup(x: Tensor, ends: Tensor, padding: int, new_padding: int) -> Tensor:
    """`[R, T]` of one-byte elements whose groups begin at multiples of `padding`, with groups at multiples of another.

    x: rows contiguous, their stride and the base multiples of 4 bytes. ends: int32 `[G]`, one past each group's last
    token (tokens counted without gaps). new_padding: a multiple of 4. The result is `[R, W]`, W = T + G * new_padding
    rounded up to 16 bytes; between groups it holds anything, past the last one it is not written.
    """
    assert new_padding % 4 == x.stride(0) % 4 == x.data_ptr() % 4 == 0
    rows, tokens = x.shape
    width = -(-(tokens + ends.numel() * new_padding) // 16) * 16
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    facts = rows, x.stride(0), ends.numel(), width, padding, new_padding
    launch(regroup_kernel, facts, (x, out, ends), lambda: (
        (triton.cdiv(width // 4, _WORDS), triton.cdiv(rows, _ROWS)),
        (x.view(torch.uint8), out.view(torch.uint8), ends, ends.numel(), rows, x.stride(0) // 4, width // 4, padding,
         new_padding),
        {"ROWS": _ROWS, "WORDS": _WORDS},
    ))  # fmt: skip
    return out


@triton.jit(do_not_specialize=["groups", "rows", "x_ld", "out_ld", "padding", "new_padding"])
def regroup_kernel(x, out, ends, groups, rows, x_ld, out_ld, padding, new_padding, ROWS: tl.constexpr,
                   WORDS: tl.constexpr):  # fmt: skip
    """A program writes ROWS x WORDS words of four bytes, each from the two words that hold its bytes."""
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    column = word * 4
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    source = tl.full([WORDS], -1, tl.int32)
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
    inside = (row < rows)[:, None] & (source >= 0)[None, :]
    first = (source // 4)[None, :]
    words = x.to(tl.pointer_type(tl.uint32)) + row[:, None] * x_ld + first
    low = tl.load(words, mask=inside, other=0)
    high = tl.load(words + 1, mask=inside & (first + 1 < x_ld), other=0)
    shift = (source % 4 * 8).to(tl.uint32)[None, :]
    shifted = (high.to(tl.uint64) << 32 | low.to(tl.uint64)) >> shift.to(tl.uint64)
    target = out.to(tl.pointer_type(tl.uint32)) + row[:, None] * out_ld + word[None, :]
    tl.store(target, shifted.to(tl.uint32), mask=inside)
