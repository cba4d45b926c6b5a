"""FP8 back to high precision on the GPU: `fp8/reference.py`'s `dequantize`, one pass, without intermediate results."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_ROWS, _COLUMNS = 32, 128


@triton.jit
def dequantize_kernel(data, scale, out, M, K, scale_stride_r, scale_stride_c, TILE_R: tl.constexpr,
                      TILE_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """RN32(data * scale_inv), rounded to out's dtype; tiles of TILE_R x TILE_C, TILE_C = 0: one scale for all."""
    columns = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0).to(tl.int64)
    rows = pid // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid % columns * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    offsets = rows[:, None] * K + cols[None, :]
    values = tl.load(data + offsets, mask=mask, other=0.0).to(tl.float32)
    if TILE_C == 0:
        values *= tl.load(scale)
    elif TILE_C % BLOCK_K == 0:
        column = pid % columns * BLOCK_K // TILE_C
        places = rows // TILE_R * scale_stride_r + column * scale_stride_c
        values *= tl.load(scale + places, mask=rows < M, other=0.0)[:, None]
    else:
        places = (rows // TILE_R)[:, None] * scale_stride_r + (cols // TILE_C)[None, :] * scale_stride_c
        values *= tl.load(scale + places, mask=mask, other=0.0)
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=mask)


def supports(data: Tensor, scale_inv: Tensor) -> bool:
    """Whether `dequantize` takes them: contiguous bytes, FP32 scales."""
    return data.is_cuda and data.is_contiguous() and scale_inv.dtype == torch.float32


def dequantize(data: Tensor, scale_inv: Tensor, tile: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of a stored `[M, K]` operand in its stored orientation. tile: kind ("tensor", "1d", "2d") and block."""
    M, K = data.shape
    out = torch.empty(M, K, dtype=dtype, device=data.device)
    strides = (0, 0) if tile.kind == "tensor" else scale_inv.stride()
    if data.numel():
        launch(dequantize_kernel, (M, K, strides, tile.kind, tile.block), (data, scale_inv, out), lambda: (
            (triton.cdiv(M, _ROWS) * triton.cdiv(K, _COLUMNS),),
            (data, scale_inv, out, M, K, *strides),
            {"TILE_R": tile.block if tile.kind == "2d" else 1, "TILE_C": 0 if tile.kind == "tensor" else tile.block,
             "BLOCK_M": _ROWS, "BLOCK_K": _COLUMNS, "num_warps": 4},
        ))  # fmt: skip
    return out
