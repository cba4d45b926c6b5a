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
    round_through,
    tile_layout,
    tile_mask,
    tile_offsets,
    tile_origin,
)

if TYPE_CHECKING:
    from .quantize import Spec


@jit
def norm_rows_kernel(x_ptr, weight_ptr, rstd_ptr, y_ptr, row_ptr, row_scale_ptr, T, H, stride_t, row_scale_ld, eps,
                     epsilon, WEIGHT_OFFSET: gl.constexpr, FMAX: gl.constexpr, B: gl.constexpr, SCALE: gl.constexpr,
                     BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    t0 = gl.program_id(0).to(gl.int64) * BLOCK_M
    rows = t0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    cols = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L)).to(gl.int64)
    mask = tile_mask(rows, cols, T, H)
    x = gl.load(x_ptr + tile_offsets(rows, cols, stride_t, 1), mask=mask, other=0.0).to(gl.float32)
    weight = load_weight(weight_ptr, cols, H, WEIGHT_OFFSET)
    mean_square = gl.sum(x * x, axis=1) / H
    rstd = gl.div_rn(mean_square * 0.0 + 1.0, gl.sqrt_rn(mean_square + eps))
    gl.store(rstd_ptr + rows, rstd, mask=rows < T)
    y = (x * rstd[:, None]) * weight[None, :]
    if y_ptr is not None:
        gl.store(y_ptr + tile_offsets(rows, cols, H, 1), y.to(x_ptr.dtype.element_ty), mask=mask)
    if row_ptr is not None:
        emit_rowwise(round_through(y, x_ptr.dtype.element_ty), rows, t0, cols, 0, row_ptr, row_scale_ptr, None,
                     row_scale_ld, epsilon, T, H, FMAX, B, SCALE, False, BLOCK_M, BLOCK_K)


@jit
def load_weight(ptr, cols, H, WEIGHT_OFFSET: gl.constexpr):
    weight = gl.load(ptr + cols, mask=cols < H, other=0.0).to(gl.float32)
    if WEIGHT_OFFSET != 0:
        weight += WEIGHT_OFFSET
    return weight


@jit
def norm_columns_kernel(x_ptr, weight_ptr, rstd_ptr, col_ptr, col_scale_ptr, T, H, stride_t, col_scale_ld,
                        epsilon, WEIGHT_OFFSET: gl.constexpr, FMAX: gl.constexpr, B: gl.constexpr, SCALE: gl.constexpr,
                        EVEN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr,
                        C: gl.constexpr, W: gl.constexpr):
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    t0, h0 = tile_origin(gl.num_programs(0) - 1 - gl.program_id(0), H, BLOCK_M, BLOCK_K)
    rows = t0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    cols = h0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    ptrs = x_ptr + tile_offsets(rows, cols, stride_t, 1)
    if EVEN:
        x = gl.load(ptrs).to(gl.float32)
    else:
        x = gl.load(ptrs, mask=tile_mask(rows, cols, T, H), other=0.0).to(gl.float32)
    weight = load_weight(weight_ptr, cols, H, WEIGHT_OFFSET)
    rstd = gl.load(rstd_ptr + rows, mask=rows < T, other=0.0)
    y = (x * rstd[:, None]) * weight[None, :]
    emit_colwise(round_through(y, x_ptr.dtype.element_ty), t0, h0, col_ptr, col_scale_ptr, None, col_scale_ld, t0 // B,
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
        norm_rows_kernel[config.grid(T, H, x.device)](
            x, weight, rstd, y, *pointers(row), T, H, x.stride(0), scale_ld(row), eps,
            tile_epsilon(spec), WEIGHT_OFFSET=weight_offset, **spec_arguments(spec), **config.options())
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
            x, weight, rstd, *pointers(col), T, H, x.stride(0), scale_ld(col), tile_epsilon(spec),
            WEIGHT_OFFSET=weight_offset, EVEN=config.even(T, H), **spec_arguments(spec), **config.options())
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
