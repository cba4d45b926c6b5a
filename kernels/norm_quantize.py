"""RMSNorm fused with the quantization of its output.

y = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps), rounded to x's dtype and only then
quantized, so that the bytes are the quantizer's bytes of that rounded value.

A row's program needs the whole row (`norm_rows_kernel`), a colwise tile needs 128 rows: both do not fit into one
multiprocessor. So the colwise copy comes from a second kernel (`norm_columns_kernel`) that reads x and rstd again,
last rows first, while they are still in L2. It repeats the row kernel's products exactly, hence the same y; and the
row kernel is the same whether or not a colwise copy is asked for, so recomputation changes no bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantize import BLOCK, Stored, allocate, pointers, scale_ld, spec_arguments, tile_epsilon
from .quantize_configs import NORM_COLUMNS, norm_rows_config
from .quantize_device import emit_colwise, emit_rowwise, nonfinite_to_nan, tile_rows
from .quantize_tiles import tile_origin

if TYPE_CHECKING:
    from .quantize import Spec


@triton.jit
def normalize(x, rstd, weight, weight_offset, dtype: tl.constexpr):
    return ((x * rstd[:, None]) * (weight + weight_offset)[None, :]).to(dtype)


@triton.jit
def norm_rows_kernel(x_ptr, weight_ptr, rstd_ptr, y_ptr, row_ptr, row_scale_ptr, T, H, stride_t, row_scale_ld, eps,
                     weight_offset, epsilon, FMAX: tl.constexpr, B: tl.constexpr, SCALE: tl.constexpr,
                     BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    t0 = tl.program_id(0).to(tl.int64) * BLOCK_T
    rows = t0 + tl.arange(0, BLOCK_T)
    cols = tl.arange(0, BLOCK_H).to(tl.int64)
    mask = (rows[:, None] < T) & (cols[None, :] < H)
    x = tl.load(x_ptr + rows[:, None] * stride_t + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / H
    rstd = tl.div_rn(tl.zeros_like(mean_square) + 1.0, tl.sqrt_rn(mean_square + eps))
    tl.store(rstd_ptr + rows, rstd, mask=rows < T)
    y = normalize(x, rstd, weight, weight_offset, x_ptr.dtype.element_ty)
    if y_ptr is not None:
        tl.store(y_ptr + rows[:, None] * H + cols[None, :], y, mask=mask)
    if row_ptr is not None:
        emit_rowwise(nonfinite_to_nan(y.to(tl.float32)), rows, t0, cols, 0, row_ptr, row_scale_ptr, None,
                     row_scale_ld, epsilon, T, H, FMAX, B, SCALE, False, BLOCK_T, BLOCK_H, 1)


@triton.jit
def norm_columns_kernel(x_ptr, weight_ptr, rstd_ptr, col_ptr, col_scale_ptr, T, H, stride_t, col_scale_ld,
                        weight_offset, epsilon, FMAX: tl.constexpr, B: tl.constexpr, SCALE: tl.constexpr,
                        EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, J: tl.constexpr,
                        STAGES: tl.constexpr):
    tiles = tl.cdiv(T, BLOCK_M) * tl.cdiv(H, BLOCK_K)
    for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        t0, h0 = tile_origin(tiles - 1 - i, H, BLOCK_M, BLOCK_K)
        rows = tile_rows(t0, BLOCK_M, J)
        cols = h0 + tl.arange(0, BLOCK_K)
        ptrs = x_ptr + rows[:, None] * stride_t + cols[None, :]
        if EVEN:
            x = tl.load(ptrs).to(tl.float32)
            weight = tl.load(weight_ptr + cols).to(tl.float32)
            rstd = tl.load(rstd_ptr + rows)
        else:
            x = tl.load(ptrs, mask=(rows[:, None] < T) & (cols[None, :] < H), other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + rows, mask=rows < T, other=0.0)
        y = normalize(x, rstd, weight, weight_offset, x_ptr.dtype.element_ty)
        emit_colwise(nonfinite_to_nan(y.to(tl.float32)), t0, cols, col_ptr, col_scale_ptr, None, col_scale_ld, t0 // B,
                     epsilon, T, T, H, FMAX, B, SCALE, EVEN, BLOCK_M, BLOCK_K, J)


class NormQuantized(NamedTuple):
    """rowwise, colwise: (data, scale_inv) or None; rstd: FP32 [T]; y: x's dtype [T, h] or None."""

    rowwise: Stored | None
    colwise: Stored | None
    rstd: Tensor
    y: Tensor | None


def rms_norm_quantize(x: Tensor, weight: Tensor, spec: Spec, *, eps: float = 1e-5, weight_offset: float = 0.0,
                      rowwise: bool = True, colwise: bool = False, high_precision: bool = False) -> NormQuantized:
    """RMSNorm of `x [T, h]` (BF16 or FP16, last dimension contiguous) with weight [h], quantized under 1D tiles.

    weight_offset: 1.0 for zero-centred weights (`--apply-layernorm-1p`). high_precision: also return y.
    Bytes are those that `quantize(y, spec)` gives. Raises ValueError for other tiles or shapes.
    """
    _check(x, weight, spec)
    T, H = x.shape
    args = spec_arguments(spec)
    rstd = torch.empty(T, dtype=torch.float32, device=x.device)
    y = torch.empty(T, H, dtype=x.dtype, device=x.device) if high_precision else None
    row = allocate(T, H, spec, x.device) if rowwise else None
    col = None
    if T:
        config = norm_rows_config(H)
        norm_rows_kernel[(triton.cdiv(T, config.block_m),)](
            x, weight, rstd, y, *pointers(row), T, H, x.stride(0), scale_ld(row), eps, weight_offset,
            tile_epsilon(spec), BLOCK_T=config.block_m, BLOCK_H=config.block_k, num_warps=config.num_warps,
            **args)
    if colwise:
        col = norm_columns_quantize(x, weight, rstd, spec, weight_offset=weight_offset)
    return NormQuantized(row, col, rstd, y)


def norm_columns_quantize(x: Tensor, weight: Tensor, rstd: Tensor, spec: Spec, *, weight_offset: float = 0.0) -> Stored:
    """Colwise copy of RMSNorm's output from its input and saved rstd: in forward, or again in backward."""
    _check(x, weight, spec)
    T, H = x.shape
    col = allocate(H, T, spec, x.device)
    if T:
        config = NORM_COLUMNS
        norm_columns_kernel[config.grid(T, H, x.device)](
            x, weight, rstd, *pointers(col), T, H, x.stride(0), scale_ld(col), weight_offset, tile_epsilon(spec),
            EVEN=config.even(T, H), **config.constants(), **spec_arguments(spec),
            **config.options())
    return col


def _check(x: Tensor, weight: Tensor, spec: Spec) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"rms_norm_quantize: x must be BF16 or FP16 [T, h] with contiguous rows, "
                         f"got {x.dtype} {tuple(x.shape)} of strides {x.stride()}")
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"rms_norm_quantize: weight must be contiguous [{x.shape[1]}], got {tuple(weight.shape)}")
    if spec.tile.kind != "1d" or BLOCK % spec.tile.block:
        raise ValueError(f"rms_norm_quantize: needs 1D tiles of a size that divides {BLOCK}, got {spec.tile}; "
                         "normalize first, then call quantize")
