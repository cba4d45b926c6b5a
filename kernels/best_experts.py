"""The numbers of each row's largest scores, best first, of equal ones the lowest: `core/moe/routing.py`'s `best`.

Scores become integers in the same order, NaN above all, with the number behind them: so one maximum finds both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

MOST_SCORES = 512
_TILE = 2048  # scores a program


@triton.jit
def best_kernel(scores, out, rows, columns, stride, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[row, i] = the number of the row's i-th largest score."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(scores + row[:, None] * stride + column[None, :], mask=mask, other=0.0) + 0.0  # -0 becomes 0
    bits = x.to(tl.int32, bitcast=True)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits = tl.where(nan, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    key = (bits.to(tl.int64) << 32) | (COLUMNS - 1 - column)[None, :].to(tl.int64)
    least = tl.full([ROWS, COLUMNS], -0x8000000000000000, tl.int64)
    key = tl.where(mask, key, least)
    for i in range(count):
        best = tl.max(key, axis=1)
        tl.store(out + row * count + i, COLUMNS - 1 - (best & (COLUMNS - 1)), mask=row < rows)
        key = tl.where(key == best[:, None], least, key)


def supports(scores: Tensor) -> bool:
    """Whether `best` takes these: FP32 [T, E], contiguous rows."""
    rows_fit = scores.dim() == 2 and scores.shape[1] <= MOST_SCORES and scores.stride(1) == 1
    return scores.is_cuda and scores.dtype == torch.float32 and rows_fit


def best(scores: Tensor, count: int) -> Tensor:
    """int64 [T, count]."""
    rows, columns = scores.shape
    out = torch.empty(rows, count, dtype=torch.int64, device=scores.device)
    if out.numel():
        width = triton.next_power_of_2(columns)
        height = max(1, _TILE // width)
        launch(best_kernel, (rows, columns, scores.stride(0), count), (scores, out), lambda: (
            (triton.cdiv(rows, height),),
            (scores, out, rows, columns, scores.stride(0), count),
            {"ROWS": height, "COLUMNS": width, "num_warps": 4},
        ))  # fmt: skip
    return out
