"""Rows of tokens on the GPU, copied by index and summed by index: `core/moe/permutation.py`'s `spread` and `sums`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_COLUMNS = 2048


@triton.jit
def spread_kernel(x, index, out, K, stride, out_stride, COLUMNS: tl.constexpr):
    """out[row] = x[index[row]], zeros where the index is negative."""
    pieces = tl.cdiv(K, COLUMNS)
    row = tl.program_id(0).to(tl.int64) // pieces
    cols = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(index + row)
    values = tl.load(x + source * stride + cols, mask=(cols < K) & (source >= 0), other=0.0)
    tl.store(out + row * out_stride + cols, values, mask=cols < K)


@triton.jit
def sums_kernel(y, rows, kept, out, K, stride, out_stride, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """out[token] = sum of y[rows[token, c]] over the choices c that are kept, FP32, in their order."""
    pieces = tl.cdiv(K, COLUMNS)
    token = tl.program_id(0).to(tl.int64) // pieces
    cols = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for choice in tl.static_range(COUNT):
        row = tl.load(rows + token * COUNT + choice)
        mask = cols < K
        if kept is not None:
            mask = mask & (tl.load(kept + token * COUNT + choice) != 0)
        total += tl.load(y + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + cols, total.to(out.dtype.element_ty), mask=cols < K)


@triton.jit
def take_kernel(x, index, kept, out, N, stride, out_stride, BLOCK: tl.constexpr):
    """out[i] = x[index[i]] of one number a row, zero where the index is negative or the choice is not kept."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + i, mask=i < N, other=-1)
    there = source >= 0
    if kept is not None:
        there = there & (tl.load(kept + i, mask=i < N, other=0) != 0)
    values = tl.load(x + source * stride, mask=there, other=0.0)
    tl.store(out + i.to(tl.int64) * out_stride, values, mask=i < N)


def supports(x: Tensor) -> bool:
    """Whether the functions take rows `[R, K]` of this tensor; `spread` takes bytes too."""
    known = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
    return x.is_cuda and x.dtype in known and x.stride(1) == 1


def spread(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows `index` (int64 [R]) of `x` [T, K]; zeros where it is negative. out: receives them; its rows may lie
    apart."""
    rows = len(index)
    out = torch.empty(rows, x.shape[1], dtype=x.dtype, device=x.device) if out is None else out
    if x.shape[1] == 1:
        return _take(x, index, None, out)
    if out.numel():
        source, target = _as_words(x), _as_words(out)
        if source is None or target is None:
            source, target = x, out
        width, strides = source.shape[1], (source.stride(0), target.stride(0))
        grid = rows * triton.cdiv(width, _COLUMNS), 1, 1
        launch(spread_kernel, (width, strides), (source, index, target), lambda: (
            grid,
            (source, index, target, width, *strides),
            {"COLUMNS": _COLUMNS, "num_warps": 4},
        ), grid=grid)  # fmt: skip
    return out


def _take(x: Tensor, index: Tensor, kept: Tensor | None, out: Tensor) -> Tensor:
    """Rows of one number, such as the weights of tokens: many a program."""
    if out.numel():
        rows, strides = len(out), (x.stride(0), out.stride(0))
        grid = triton.cdiv(rows, _COLUMNS), 1, 1
        launch(take_kernel, strides, (x, index, kept, out), lambda: (
            grid,
            (x, index, kept, out, rows, *strides),
            {"BLOCK": _COLUMNS, "num_warps": 8},
        ), grid=grid, numbers=((4, rows),))  # fmt: skip
    return out


def _as_words(x: Tensor) -> Tensor | None:
    """Bytes as 32-bit words, which are copied in fewer instructions; None where rows are no whole words."""
    if x.dtype != torch.uint8 or x.shape[1] % 4 or x.stride(0) % 4 or x.data_ptr() % 4:
        return None
    return x.view(torch.int32)


def sums(y: Tensor, rows: Tensor, kept: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Sums of rows of `y` [R, K]: `rows` int64 [T, k], contiguous; kept: bool [T, k], None for all. Rounded once. out:
    receives them, its rows may lie apart."""
    (tokens, count), width = rows.shape, y.shape[1]
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device) if out is None else out
    flags = None if kept is None else kept.contiguous().view(torch.uint8)
    if width == count == 1:
        return _take(y, rows, flags, out)
    if out.numel():
        grid, strides = (tokens * triton.cdiv(width, _COLUMNS), 1, 1), (y.stride(0), out.stride(0))
        launch(sums_kernel, (count, width, strides), (y, rows, flags, out), lambda: (
            grid,
            (y, rows, flags, out, width, *strides),
            {"COUNT": count, "COLUMNS": _COLUMNS, "num_warps": 4},
        ), grid=grid)  # fmt: skip
    return out
