"""SwiGLU and its gradient fused with the quantization of their results.

fc1's output is [T, 2f]: gate columns, then up columns. Forward: y = silu(gate) * up, the input of fc2. Backward, from
dy and fc1's output: d(fc1 output) in both orientations (fc1's dgrad and wgrad), and y once more, colwise, for fc2's
wgrad, so that forward need not keep it. Results are rounded to the compute dtype before they are quantized, so the
bytes are the quantizer's bytes of the rounded values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .quantize import BLOCK, Stored, allocate, pointers, quantize, scale_ld, spec_arguments, tile_epsilon
from .quantize_configs import SWIGLU_BOTH, SWIGLU_COLUMNS, SWIGLU_GRAD, SWIGLU_GRAD_HIGH_PRECISION, SWIGLU_ROWS
from .quantize_device import (
    emit_colwise,
    emit_rowwise,
    load_f32,
    nonfinite_to_nan,
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
def exp2_fast(x):
    """2^x for x <= 0 by the special-function unit; results below 2^-126 are zero."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@jit
def reciprocal_fast(x):
    """1 / x for x between 1 and 2, within an ulp of FP32."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@jit
def sigmoid_parts(gate):
    """(e, r) with e^2 = exp(-|gate|), r = 1 / (1 + e^2): sigmoid is r for gate >= 0, else e^2 * r.

    `exp(-|gate|)` underflows in FP32 past 87 although BF16 results do not: its square root does not.
    """
    e = exp2_fast(gl.abs(gate) * -0.7213475204444817)  # log2(e) / 2
    return e, reciprocal_fast(e * e + 1.0)


@jit
def swiglu(gate, up):
    e, r = sigmoid_parts(gate)
    root = gl.where(gate >= 0, 1.0, e)
    return (gate * root * r) * (up * root)


@jit
def swiglu_grad(dy, gate, up):
    """(d gate, d up, y) of y = silu(gate) * up."""
    e, r = sigmoid_parts(gate)
    root = gl.where(gate >= 0, 1.0, e)
    other = gl.where(gate >= 0, e, 1.0)
    silu = (gate * root * r) * root
    y = (gate * root * r) * (up * root)
    d_gate = (dy * root) * (up * root) * (r * (1.0 + gate * (other * other * r)))
    return d_gate, dy * silu, y


@jit
def swiglu_kernel(x_ptr, y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, T, F, stride_t, row_scale_ld,
                  col_scale_ld, epsilon, FMAX: gl.constexpr, B: gl.constexpr, SCALE: gl.constexpr, EVEN: gl.constexpr,
                  BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    t0, f0 = tile_origin(gl.program_id(0), F, BLOCK_M, BLOCK_K)
    rows = t0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    cols = f0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    mask = tile_mask(rows, cols, T, F)
    ptrs = x_ptr + tile_offsets(rows, cols, stride_t, 1)
    y = swiglu(load_f32(ptrs, mask, EVEN), load_f32(ptrs + F, mask, EVEN))
    if y_ptr is not None:
        gl.store(y_ptr + tile_offsets(rows, cols, F, 1), to_compute_dtype(y, x_ptr.dtype.element_ty), mask=mask)
    y = round_through(y, x_ptr.dtype.element_ty)
    if col_ptr is not None:
        emit_colwise(y, t0, f0, col_ptr, col_scale_ptr, None, col_scale_ld, t0 // B, epsilon, T, T, F, FMAX, B, SCALE,
                     EVEN, BLOCK_M, BLOCK_K, R, C, W)
    if row_ptr is not None:
        emit_rowwise(y, rows, t0, cols, f0, row_ptr, row_scale_ptr, None, row_scale_ld, epsilon, T, F, FMAX, B, SCALE,
                     EVEN, BLOCK_M, BLOCK_K)


@jit
def emit_half(d, rows, t0, cols, f0, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, T, F2, row_scale_ld, col_scale_ld,
              epsilon, FMAX: gl.constexpr, B: gl.constexpr, SCALE: gl.constexpr, EVEN: gl.constexpr,
              BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """One half (gate or up) of d(fc1 output), whose columns in [T, 2f] are `cols`.

    Its tiles are tiles of the whole [T, 2f] only if f is a multiple of 128; otherwise the host asks for dx alone.
    """
    d = nonfinite_to_nan(d.to(gl.float32))
    if col_ptr is not None:
        emit_colwise(d, t0, f0, col_ptr, col_scale_ptr, None, col_scale_ld, t0 // B, epsilon, T, T, F2, FMAX, B, SCALE,
                     EVEN, BLOCK_M, BLOCK_K, R, C, W)
    if row_ptr is not None:
        emit_rowwise(d, rows, t0, cols, f0, row_ptr, row_scale_ptr, None, row_scale_ld, epsilon, T, F2, FMAX, B, SCALE,
                     EVEN, BLOCK_M, BLOCK_K)


@jit
def swiglu_grad_kernel(dy_ptr, x_ptr, dx_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, y_col_ptr,
                       y_col_scale_ptr, T, F, stride_dy, stride_x, row_scale_ld, col_scale_ld, y_scale_ld, epsilon,
                       y_epsilon, FMAX: gl.constexpr, B: gl.constexpr, SCALE: gl.constexpr, Y_FMAX: gl.constexpr,
                       Y_B: gl.constexpr, Y_SCALE: gl.constexpr, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                       BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Three results of one tile are quantized one after the other; those that wait do so in shared memory.

    In registers they would leave room for only one program a multiprocessor.
    """
    dtype: gl.constexpr = dy_ptr.dtype.element_ty
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    WAITING: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    t0, f0 = tile_origin(gl.program_id(0), F, BLOCK_M, BLOCK_K)
    rows = t0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    cols = f0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    mask = tile_mask(rows, cols, T, F)
    x_ptrs = x_ptr + tile_offsets(rows, cols, stride_x, 1)
    dy = load_f32(dy_ptr + tile_offsets(rows, cols, stride_dy, 1), mask, EVEN)
    d_gate, d_up, y = swiglu_grad(dy, load_f32(x_ptrs, mask, EVEN), load_f32(x_ptrs + F, mask, EVEN))
    d_gate = to_compute_dtype(d_gate, dtype)
    d_up = to_compute_dtype(d_up, dtype)
    if dx_ptr is not None:
        gl.store(dx_ptr + tile_offsets(rows, cols, 2 * F, 1), d_gate, mask=mask)
        gl.store(dx_ptr + tile_offsets(rows, cols + F, 2 * F, 1), d_up, mask=mask)
    d_gate = gl.allocate_shared_memory(dtype, (BLOCK_M, BLOCK_K), WAITING, d_gate)
    d_up = gl.allocate_shared_memory(dtype, (BLOCK_M, BLOCK_K), WAITING, d_up)
    if y_col_ptr is not None:
        emit_colwise(round_through(y, dtype), t0, f0, y_col_ptr, y_col_scale_ptr, None, y_scale_ld, t0 // Y_B,
                     y_epsilon, T, T, F, Y_FMAX, Y_B, Y_SCALE, EVEN, BLOCK_M, BLOCK_K, R, C, W)
    emit_half(d_gate.load(L), rows, t0, cols, f0, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, T, 2 * F,
              row_scale_ld, col_scale_ld, epsilon, FMAX, B, SCALE, EVEN, BLOCK_M, BLOCK_K, R, C, W)
    emit_half(d_up.load(L), rows, t0, cols + F, f0 + F, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, T, 2 * F,
              row_scale_ld, col_scale_ld, epsilon, FMAX, B, SCALE, EVEN, BLOCK_M, BLOCK_K, R, C, W)


class SwigluQuantized(NamedTuple):
    """rowwise, colwise: (data, scale_inv) of y [T, f], or None; y: compute dtype [T, f], or None."""

    rowwise: Stored | None
    colwise: Stored | None
    y: Tensor | None


class SwigluGradQuantized(NamedTuple):
    """rowwise, colwise: d(fc1 output) [T, 2f]; y_colwise: (data [f, T], scale_inv); dx: compute dtype [T, 2f]."""

    rowwise: Stored | None
    colwise: Stored | None
    y_colwise: Stored | None
    dx: Tensor | None


def swiglu_quantize(x: Tensor, spec: Spec, *, rowwise: bool = True, colwise: bool = False,
                    high_precision: bool = False) -> SwigluQuantized:
    """silu(gate) * up of `x [T, 2f]` (BF16 or FP16, contiguous rows), quantized under 1D tiles.

    high_precision: also return y. Raises ValueError for other tiles, dtypes or strides.
    """
    _check("swiglu_quantize", x, spec)
    T, F = x.shape[0], x.shape[1] // 2
    y = torch.empty(T, F, dtype=x.dtype, device=x.device) if high_precision else None
    row = allocate(T, F, spec, x.device) if rowwise else None
    col = allocate(F, T, spec, x.device) if colwise else None
    config = SWIGLU_ROWS if not colwise else SWIGLU_BOTH if rowwise else SWIGLU_COLUMNS
    if T and F:
        swiglu_kernel[config.grid(T, F, x.device)](
            x, y, *pointers(row), *pointers(col), T, F, x.stride(0), scale_ld(row), scale_ld(col),
            tile_epsilon(spec), EVEN=config.even(T, F), **spec_arguments(spec),
            **config.options())
    return SwigluQuantized(row, col, y)


def swiglu_grad_quantize(dy: Tensor, x: Tensor, spec: Spec, *, rowwise: bool = True, colwise: bool = True,
                         y_spec: Spec | None = None, high_precision: bool = False) -> SwigluGradQuantized:
    """Gradient of SwiGLU: `dy [T, f]`, fc1's output `x [T, 2f]` -> d(fc1 output) quantized by `spec` (1D tiles).

    y_spec: also return SwiGLU's recomputed output, quantized colwise by it (fc2's input role; 1D tiles).
    high_precision: also return d(fc1 output) in the compute dtype. Raises ValueError for other tiles or dtypes.
    """
    _check("swiglu_grad_quantize", x, spec)
    T, F = x.shape[0], x.shape[1] // 2
    if dy.shape != (T, F) or dy.dtype != x.dtype or dy.stride(1) != 1:
        raise ValueError(f"swiglu_grad_quantize: dy must be {x.dtype} [{T}, {F}] with contiguous rows, "
                         f"got {dy.dtype} {tuple(dy.shape)} of strides {dy.stride()}")
    fused = F % BLOCK == 0  # otherwise register tiles of [T, 2f] straddle gate and up
    dx = torch.empty(T, 2 * F, dtype=x.dtype, device=x.device) if high_precision or not fused else None
    row = allocate(T, 2 * F, spec, x.device) if rowwise and fused else None
    col = allocate(2 * F, T, spec, x.device) if colwise and fused else None
    y_col = allocate(F, T, y_spec, x.device) if y_spec is not None else None
    y_args = {"Y_" + name: value for name, value in spec_arguments(y_spec or spec).items()}
    config = SWIGLU_GRAD if dx is None else SWIGLU_GRAD_HIGH_PRECISION
    if T and F:
        swiglu_grad_kernel[config.grid(T, F, x.device)](
            dy, x, dx, *pointers(row), *pointers(col), *pointers(y_col), T, F, dy.stride(0),
            x.stride(0), scale_ld(row), scale_ld(col), scale_ld(y_col), tile_epsilon(spec),
            tile_epsilon(y_spec or spec), EVEN=config.even(T, F), **spec_arguments(spec),
            **y_args, **config.options())
    if not fused:
        row, col = quantize(dx, spec, rowwise, colwise)
    return SwigluGradQuantized(row, col, y_col, dx if high_precision else None)


def _check(name: str, x: Tensor, spec: Spec) -> None:
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1 or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{name}: x must be BF16 or FP16 [T, 2f] with contiguous rows, "
                         f"got {x.dtype} {tuple(x.shape)} of strides {x.stride()}")
    if spec.tile.kind != "1d" or BLOCK % spec.tile.block:
        raise ValueError(f"{name}: needs 1D tiles of a size that divides {BLOCK}, got {spec.tile}; "
                         "keep the result in high precision, then call quantize")
