"""FP8 back to high precision on the GPU: `fp8/reference.py`'s `dequantize`, one pass, without intermediate results."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_ROWS, _COLUMNS = 32, 128


@triton.jit
def _decoded(scale):
    """FP32 of stored scales: themselves, or E8M0 codes (0 is 2^-127, 255 is NaN)."""
    if scale.dtype == tl.uint8:
        code = scale.to(tl.int32)
        bits = tl.where(code == 255, 0x7FC00000, tl.where(code == 0, 0x00400000, code << 23))
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = scale
    return value


@triton.jit
def dequantize_kernel(data, scale, out, M, K, stride_g, stride_m, scale_stride_g, scale_stride_r, scale_stride_c,
                      TILE_R: tl.constexpr, TILE_C: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_K: tl.constexpr):  # fmt: skip
    """RN32(data * scale_inv), rounded to out's dtype; tiles of TILE_R x TILE_C, TILE_C = 0: one scale for all.

    Of a stack of matrices [G, M, K] one after the other. TRANSPOSED: out is [G, K, M].
    """
    columns = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * columns
    g = (tl.program_id(0) // tiles).to(tl.int64)
    pid = (tl.program_id(0) % tiles).to(tl.int64)
    rows = pid // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid % columns * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    values = tl.load(data + g * stride_g + rows[:, None] * stride_m + cols[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    scale += g * scale_stride_g
    if TILE_C == 0:
        values *= tl.load(scale)
    elif TILE_C % BLOCK_K == 0:
        column = pid % columns * BLOCK_K // TILE_C
        places = rows // TILE_R * scale_stride_r + column * scale_stride_c
        values *= _decoded(tl.load(scale + places, mask=rows < M, other=0))[:, None]
    elif BLOCK_K % TILE_C == 0:  # each scale is read once, not once an element
        G: tl.constexpr = BLOCK_K // TILE_C
        tile = pid % columns * G + tl.arange(0, G)
        there = (rows < M)[:, None] & (tile * TILE_C < K)[None, :]
        places = (rows // TILE_R)[:, None] * scale_stride_r + tile[None, :] * scale_stride_c
        factor = _decoded(tl.load(scale + places, mask=there, other=0))
        values = tl.reshape(tl.reshape(values, [BLOCK_M, G, TILE_C]) * factor[:, :, None], [BLOCK_M, BLOCK_K])
    else:
        places = (rows // TILE_R)[:, None] * scale_stride_r + (cols // TILE_C)[None, :] * scale_stride_c
        values *= _decoded(tl.load(scale + places, mask=mask, other=0))
    values = values.to(out.dtype.element_ty)
    out += g * M * K
    if TRANSPOSED:
        inside = (cols < K)[:, None] & (rows < M)[None, :]
        tl.store(out + cols[:, None] * M + rows[None, :], tl.trans(values), mask=inside)
    else:
        tl.store(out + rows[:, None] * K + cols[None, :], values, mask=mask)


def supports(data: Tensor, scale_inv: Tensor) -> bool:
    """Whether `dequantize` takes them: contiguous rows."""
    return data.is_cuda and data.stride(-1) == 1


def dequantize(data: Tensor, scale_inv: Tensor, tile: Any, dtype: torch.dtype = torch.float32, *,
               transposed: bool = False) -> Tensor:  # fmt: skip
    """Values of a stored `[M, K]` operand in its stored orientation, or of a stack of them, `[G, M, K]` with scales
    `[G, ...]`. tile: kind ("tensor", "1d", "2d") and block. transposed: as `[K, M]`, or `[G, K, M]`."""
    *groups, M, K = data.shape
    shape = (*groups, K, M) if transposed else (*groups, M, K)
    out = torch.empty(shape, dtype=dtype, device=data.device)
    height = 2 * _ROWS if transposed else _ROWS
    strides = (0, 0) if tile.kind == "tensor" else scale_inv.stride()[-2:]
    of_groups = (data.stride(0), scale_inv.stride(0)) if groups else (0, 0)
    scale_inv = scale_inv if scale_inv.dtype == torch.float32 else scale_inv.view(torch.uint8)
    if data.numel():
        facts = (data.shape, data.stride()[:-1], strides, of_groups, tile.kind, tile.block, transposed)
        launch(dequantize_kernel, facts, (data, scale_inv, out), lambda: (
            (triton.cdiv(M, height) * triton.cdiv(K, _COLUMNS) * math.prod(groups),),
            (data, scale_inv, out, M, K, of_groups[0], data.stride(-2), of_groups[1], *strides),
            {"TILE_R": tile.block if tile.kind == "2d" else 1, "TILE_C": 0 if tile.kind == "tensor" else tile.block,
             "TRANSPOSED": transposed, "BLOCK_M": height, "BLOCK_K": _COLUMNS, "num_warps": 8 if transposed else 4},
        ))  # fmt: skip
    return out
