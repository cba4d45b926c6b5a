"""FP32 numbers as three BF16 ones, whose sum they are, in one launch: `core/moe/logits.py`'s `three_parts`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_BLOCK = 1024


@triton.jit
def three_parts_kernel(x, out, N, columns, BLOCK: tl.constexpr):
    """out[row] = [first 8 bits | next 8 | last 8] of each number of x[row]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < N, other=0.0)
    first = value.to(tl.bfloat16)
    rest = value - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    place = out + i // columns * (3 * columns) + i % columns
    tl.store(place, first, mask=i < N)
    tl.store(place + columns, second, mask=i < N)
    tl.store(place + 2 * columns, third, mask=i < N)


def three_parts(x: Tensor) -> Tensor:
    """BF16 [T, 3 E] from FP32 `x` [T, E]."""
    x, (rows, columns) = x.contiguous(), x.shape
    out = torch.empty(rows, 3 * columns, dtype=torch.bfloat16, device=x.device)
    if out.numel():
        launch(three_parts_kernel, (rows, columns), (x, out), lambda: (
            (triton.cdiv(x.numel(), _BLOCK),),
            (x, out, x.numel(), columns),
            {"BLOCK": _BLOCK, "num_warps": 4},
        ))  # fmt: skip
    return out
