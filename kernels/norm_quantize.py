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
from torch import Tensor

from .language import gl, jit
from .quantize import BLOCK, Stored, allocate, pointers, scale_ld, spec_arguments, tile_epsilon
from .quantize_configs import NORM_COLUMNS, norm_rows_config
from .quantize_device import (
    emit_colwise,
    emit_rowwise,
    nonfinite_to_nan,
    tile_layout,
    tile_mask,
    tile_offsets,
    tile_origin,
)

if TYPE_CHECKING:
    from .quantize import Spec


@jit
def norm_rows_kernel(x_ptr, weight_ptr, rstd_ptr, y_ptr, row_ptr, row_scale_ptr, T, H, stride_t, row_scale_ld, eps,
                     weight_offset, epsilon, FMAX: gl.constexpr, B: gl.constexpr, SCALE: gl.constexpr,
                     BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Walks over rows, the weight in registers; the next row is on its way while this one is worked on."""
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L)).to(gl.int64)
    cols = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L)).to(gl.int64)
    weight = gl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(gl.float32) + weight_offset
    first = gl.program_id(0).to(gl.int64) * BLOCK_M
    step = gl.num_programs(0).to(gl.int64) * BLOCK_M
    ptrs = x_ptr + tile_offsets(rows + first, cols, stride_t, 1)
    x_next = gl.load(ptrs, mask=tile_mask(rows + first, cols, T, H), other=0.0)
    for t0 in range(first, T, step):
        x = x_next.to(gl.float32)
        t = rows + t0
        ptrs += step * stride_t
        x_next = gl.load(ptrs, mask=tile_mask(t + step, cols, T, H), other=0.0)
        mean_square = gl.sum(x * x, axis=1) / H
        rstd = gl.div_rn(mean_square * 0.0 + 1.0, gl.sqrt_rn(mean_square + eps))
        gl.store(rstd_ptr + t, rstd, mask=t < T)
        y = ((x * rstd[:, None]) * weight[None, :]).to(x_ptr.dtype.element_ty)
        if y_ptr is not None:
            gl.store(y_ptr + tile_offsets(t, cols, H, 1), y, mask=tile_mask(t, cols, T, H))
        if row_ptr is not None:
            emit_rowwise(nonfinite_to_nan(y.to(gl.float32)), t, t0, cols, 0, row_ptr, row_scale_ptr, None,
                         row_scale_ld, epsilon, T, H, FMAX, B, SCALE, False, BLOCK_M, BLOCK_K)


@jit
def norm_columns_kernel(x_ptr, weight_ptr, rstd_ptr, col_ptr, col_scale_ptr, T, H, stride_t, col_scale_ld,
                        weight_offset, epsilon, FMAX: gl.constexpr, B: gl.constexpr, SCALE: gl.constexpr,
                        EVEN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr,
                        C: gl.constexpr, W: gl.constexpr):
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    t0, h0 = tile_origin(gl.num_programs(0) - 1 - gl.program_id(0), H, BLOCK_M, BLOCK_K)
    rows = t0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    cols = h0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    ptrs = x_ptr + tile_offsets(rows, cols, stride_t, 1)
    if EVEN:
        x = gl.load(ptrs).to(gl.float32)
        weight = gl.load(weight_ptr + cols).to(gl.float32) + weight_offset
        rstd = gl.load(rstd_ptr + rows)
    else:
        x = gl.load(ptrs, mask=tile_mask(rows, cols, T, H), other=0.0).to(gl.float32)
        weight = gl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(gl.float32) + weight_offset
        rstd = gl.load(rstd_ptr + rows, mask=rows < T, other=0.0)
    y = ((x * rstd[:, None]) * weight[None, :]).to(x_ptr.dtype.element_ty)
    emit_colwise(nonfinite_to_nan(y.to(gl.float32)), t0, h0, col_ptr, col_scale_ptr, None, col_scale_ld, t0 // B,
                 epsilon, T, T, H, FMAX, B, SCALE, EVEN, BLOCK_M, BLOCK_K, R, C, W)


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
    rstd = torch.empty(T, dtype=torch.float32, device=x.device)
    y = torch.empty(T, H, dtype=x.dtype, device=x.device) if high_precision else None
    row = allocate(T, H, spec, x.device) if rowwise else None
    col = None
    if T:
        config = norm_rows_config(H)
        norm_rows_kernel[config.grid(T, 1, x.device)](
            x, weight, rstd, y, *pointers(row), T, H, x.stride(0), scale_ld(row), eps, weight_offset,
            tile_epsilon(spec), **spec_arguments(spec), **config.options())
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
            EVEN=config.even(T, H), **spec_arguments(spec), **config.options())
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
