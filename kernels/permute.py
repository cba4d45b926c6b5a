"""Rows of tokens on the GPU, copied by index and summed by index: `core/moe/permutation.py`'s `spread` and `sums`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_COLUMNS = 2048


@triton.jit
def spread_kernel(x, index, out, K, stride, COLUMNS: tl.constexpr):
    """out[row] = x[index[row]], zeros where the index is negative."""
    pieces = tl.cdiv(K, COLUMNS)
    row = tl.program_id(0).to(tl.int64) // pieces
    cols = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(index + row)
    values = tl.load(x + source * stride + cols, mask=(cols < K) & (source >= 0), other=0.0)
    tl.store(out + row * K + cols, values, mask=cols < K)


@triton.jit
def sums_kernel(y, rows, kept, out, K, stride, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
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
    tl.store(out + token * K + cols, total.to(out.dtype.element_ty), mask=cols < K)


@triton.jit
def take_kernel(x, index, kept, out, N, stride, BLOCK: tl.constexpr):
    """out[i] = x[index[i]] of one number a row, zero where the index is negative or the choice is not kept."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + i, mask=i < N, other=-1)
    there = source >= 0
    if kept is not None:
        there = there & (tl.load(kept + i, mask=i < N, other=0) != 0)
    tl.store(out + i, tl.load(x + source * stride, mask=there, other=0.0), mask=i < N)


def supports(x: Tensor) -> bool:
    """Whether the functions take rows `[R, K]` of this tensor; `spread` takes bytes too."""
    known = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
    return x.is_cuda and x.dtype in known and x.stride(1) == 1


def spread(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` (int64 [R]) of `x` [T, K]; zeros where it is negative."""
    out = torch.empty(len(index), x.shape[1], dtype=x.dtype, device=x.device)
    if x.shape[1] == 1:
        return _take(x, index, None, out)
    if out.numel():
        source, target = _as_words(x), _as_words(out)
        if source is None or target is None:
            source, target = x, out
        rows, width, stride = len(index), source.shape[1], source.stride(0)
        launch(spread_kernel, (rows, width, stride), (source, index, target), lambda: (
            (rows * triton.cdiv(width, _COLUMNS),),
            (source, index, target, width, stride),
            {"COLUMNS": _COLUMNS, "num_warps": 4},
        ))  # fmt: skip
    return out


def _take(x: Tensor, index: Tensor, kept: Tensor | None, out: Tensor) -> Tensor:
    """Rows of one number, such as the weights of tokens: many a program."""
    if out.numel():
        rows, stride = len(out), x.stride(0)
        launch(take_kernel, (rows, stride), (x, index, kept, out), lambda: (
            (triton.cdiv(rows, _COLUMNS),),
            (x, index, kept, out, rows, stride),
            {"BLOCK": _COLUMNS, "num_warps": 8},
        ))  # fmt: skip
    return out


def _as_words(x: Tensor) -> Tensor | None:
    """Bytes as 32-bit words, which are copied in fewer instructions; None where rows are no whole words."""
    if x.dtype != torch.uint8 or x.shape[1] % 4 or x.stride(0) % 4 or x.data_ptr() % 4:
        return None
    return x.view(torch.int32)


def sums(y: Tensor, rows: Tensor, kept: Tensor | None) -> Tensor:
    """Sums of rows of `y` [R, K]: `rows` int64 [T, k], contiguous; kept: bool [T, k], None for all. Rounded once."""
    out = torch.empty(len(rows), y.shape[1], dtype=y.dtype, device=y.device)
    flags = None if kept is None else kept.contiguous().view(torch.uint8)
    if out.shape[1] == rows.shape[1] == 1:
        return _take(y, rows, flags, out)
    if out.numel():
        (tokens, count), width, stride = rows.shape, y.shape[1], y.stride(0)
        launch(sums_kernel, (tokens, count, width, stride), (y, rows, flags, out), lambda: (
            (tokens * triton.cdiv(width, _COLUMNS),),
            (y, rows, flags, out, width, stride),
            {"COUNT": count, "COLUMNS": _COLUMNS, "num_warps": 4},
        ))  # fmt: skip
    return out
