"""RMSNorm fused with the quantization of its output.

y = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps), rounded to x's dtype and only then
quantized, so that the bytes are the quantizer's bytes of that rounded value.

A norm needs whole rows, a colwise tile 128 of them: both do not fit into one multiprocessor. So rows alone take one
kernel, while both orientations take two: `norm_stats_kernel` for rstd, then `norm_tiles_kernel`, which reads x again,
last rows first, while they are still in L2. rstd is made by one function in one layout and y by one expression, so y
has the same bits whichever copies are asked for: recomputation changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .quantize import BLOCK, Stored, allocate, pointers, scale_ld, spec_arguments, tile_epsilon
from .quantize_configs import NORM_BOTH, NORM_COLUMNS, norm_rows_config
from .quantize_device import (
    emit_colwise,
    emit_rowwise,
    layout_of,
    load_f32,
    round_through,
    tile_layout,
    tile_mask,
    tile_offsets,
    tile_origin,
    to_compute_dtype,
)

if TYPE_CHECKING:
    from .quantize import Spec


@jit
def row_rstd(x_ptr, H: gl.constexpr, eps, BLOCK_K: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of the row at x_ptr, shape [1]; the same order of additions wherever it is called."""
    L: gl.constexpr = tile_layout(1, BLOCK_K, 1, C, W)
    cols = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    squares = gl.zeros((1, BLOCK_K), gl.float32, layout=L)
    for k0 in gl.static_range(0, H, BLOCK_K):
        x = load_f32((x_ptr + k0 + cols)[None, :], (k0 + cols < H)[None, :], k0 + BLOCK_K <= H)
        squares += x * x
    mean = gl.sum(squares, axis=1) / H
    return gl.div_rn(mean * 0.0 + 1.0, gl.sqrt_rn(mean + eps))


@jit
def normalize(x, rstd, weight_ptr, cols, H, WEIGHT_OFFSET: gl.constexpr):
    weight = gl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(gl.float32)
    if WEIGHT_OFFSET != 0:
        weight += WEIGHT_OFFSET
    return (x * rstd[:, None]) * weight[None, :]


@jit
def norm_stats_kernel(x_ptr, rstd_ptr, stride_t, eps, H: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
                      R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    t = gl.program_id(0).to(gl.int64)
    rstd = row_rstd(x_ptr + t * stride_t, H, eps, BLOCK_K, C, W)
    gl.store(rstd_ptr + t + gl.arange(0, 1, layout=layout_of(rstd)), rstd)


@jit
def norm_rows_kernel(x_ptr, weight_ptr, rstd_ptr, y_ptr, row_ptr, row_scale_ptr, T, stride_t, row_scale_ld, eps,
                     epsilon, H: gl.constexpr, WEIGHT_OFFSET: gl.constexpr, FMAX: gl.constexpr, B: gl.constexpr,
                     SCALE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr,
                     C: gl.constexpr, W: gl.constexpr):
    """One row a program, BLOCK_K elements at a time. The second reading comes from L1: registers stay free, so that
    many rows are under way at once."""
    t = gl.program_id(0).to(gl.int64)
    x_ptr += t * stride_t
    rstd = row_rstd(x_ptr, H, eps, BLOCK_K, C, W)
    L: gl.constexpr = tile_layout(1, BLOCK_K, 1, C, W)
    rows = t + gl.arange(0, 1, layout=gl.SliceLayout(1, L))
    gl.store(rstd_ptr + rows, rstd)
    for k0 in gl.static_range(0, H, BLOCK_K):
        cols = k0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
        x = load_f32((x_ptr + cols)[None, :], (cols < H)[None, :], k0 + BLOCK_K <= H)
        y = normalize(x, rstd, weight_ptr, cols, H, WEIGHT_OFFSET)
        if y_ptr is not None:
            gl.store(y_ptr + tile_offsets(rows, cols, H, 1), to_compute_dtype(y, x_ptr.dtype.element_ty),
                     mask=(cols < H)[None, :])
        if row_ptr is not None:
            emit_rowwise(round_through(y, x_ptr.dtype.element_ty), rows, t, cols, k0, row_ptr, row_scale_ptr, None,
                         row_scale_ld, epsilon, T, H, FMAX, B, SCALE, k0 + BLOCK_K <= H, 1, BLOCK_K)


@jit
def norm_tiles_kernel(x_ptr, weight_ptr, rstd_ptr, y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, T, stride_t,
                      row_scale_ld, col_scale_ld, epsilon, H: gl.constexpr, WEIGHT_OFFSET: gl.constexpr,
                      FMAX: gl.constexpr, B: gl.constexpr, SCALE: gl.constexpr, EVEN: gl.constexpr,
                      BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    t0, h0 = tile_origin(gl.num_programs(0) - 1 - gl.program_id(0), H, BLOCK_M, BLOCK_K)
    rows = t0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    cols = h0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    mask = tile_mask(rows, cols, T, H)
    x = load_f32(x_ptr + tile_offsets(rows, cols, stride_t, 1), mask, EVEN)
    rstd = gl.load(rstd_ptr + rows, mask=rows < T, other=0.0)
    y = normalize(x, rstd, weight_ptr, cols, H, WEIGHT_OFFSET)
    if y_ptr is not None:
        gl.store(y_ptr + tile_offsets(rows, cols, H, 1), to_compute_dtype(y, x_ptr.dtype.element_ty), mask=mask)
    y = round_through(y, x_ptr.dtype.element_ty)
    emit_colwise(y, t0, h0, col_ptr, col_scale_ptr, None, col_scale_ld, t0 // B, epsilon, T, T, H, FMAX, B, SCALE,
                 EVEN, BLOCK_M, BLOCK_K, R, C, W)
    if row_ptr is not None:
        emit_rowwise(y, rows, t0, cols, h0, row_ptr, row_scale_ptr, None, row_scale_ld, epsilon, T, H, FMAX, B, SCALE,
                     EVEN, BLOCK_M, BLOCK_K)


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
    col = allocate(H, T, spec, x.device) if colwise else None
    options = norm_rows_config(H).options()
    if T and colwise:
        norm_stats_kernel[(T,)](x, rstd, x.stride(0), eps, H=H, **options)
        _norm_tiles(x, weight, rstd, y, row, col, spec, weight_offset)
    elif T:
        norm_rows_kernel[(T,)](
            x, weight, rstd, y, *pointers(row), T, x.stride(0), scale_ld(row), eps, tile_epsilon(spec), H=H,
            WEIGHT_OFFSET=weight_offset, **spec_arguments(spec), **options)
    return NormQuantized(row, col, rstd, y)


def norm_columns_quantize(x: Tensor, weight: Tensor, rstd: Tensor, spec: Spec, *, weight_offset: float = 0.0) -> Stored:
    """Colwise copy of RMSNorm's output from its input and saved rstd, in backward; the same bytes as in forward."""
    _check(x, weight, spec)
    col = allocate(x.shape[1], x.shape[0], spec, x.device)
    if x.shape[0]:
        _norm_tiles(x, weight, rstd, None, None, col, spec, weight_offset)
    return col


def _norm_tiles(x: Tensor, weight: Tensor, rstd: Tensor, y: Tensor | None, row: Stored | None, col: Stored, spec: Spec,
                weight_offset: float) -> None:
    T, H = x.shape
    config = NORM_BOTH if row else NORM_COLUMNS
    norm_tiles_kernel[config.grid(T, H, x.device)](
        x, weight, rstd, y, *pointers(row), *pointers(col), T, x.stride(0), scale_ld(row), scale_ld(col),
        tile_epsilon(spec), H=H, WEIGHT_OFFSET=weight_offset, EVEN=config.even(T, H), **spec_arguments(spec),
        **config.options())


def _check(x: Tensor, weight: Tensor, spec: Spec) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"rms_norm_quantize: x must be BF16 or FP16 [T, h] with contiguous rows, "
                         f"got {x.dtype} {tuple(x.shape)} of strides {x.stride()}")
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"rms_norm_quantize: weight must be contiguous [{x.shape[1]}], got {tuple(weight.shape)}")
    if spec.tile.kind != "1d" or BLOCK % spec.tile.block:
        raise ValueError(f"rms_norm_quantize: needs 1D tiles of a size that divides {BLOCK}, got {spec.tile}; "
                         "normalize first, then call quantize")
