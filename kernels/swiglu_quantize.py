"""SwiGLU and its gradient fused with the quantization of their results.

fc1's output is [T, 2f]: gate columns, then up columns. Forward: y = silu(gate) * up, the input of fc2. Backward, from
dy and fc1's output: d(fc1 output) in both orientations (fc1's dgrad and wgrad), and y once more, colwise, for fc2's
wgrad, so that forward need not keep it. Results are rounded to the compute dtype before they are quantized, so the
bytes are the quantizer's bytes of the rounded values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantize import BLOCK, Stored, allocate, pointers, quantize, scale_ld, spec_arguments, tile_epsilon
from .quantize_configs import SWIGLU_BOTH, SWIGLU_GRAD, SWIGLU_ROWS
from .quantize_device import emit_colwise, emit_rowwise, nonfinite_to_nan, tile_rows
from .quantize_tiles import tile_origin

if TYPE_CHECKING:
    from .quantize import Spec


@triton.jit
def sigmoid_parts(gate):
    """(root, r) with sigmoid(gate) = root^2 * r, sigmoid(-gate) = other^2 * r, where root = 1 for gate >= 0.

    `e = exp(-|gate|)` underflows in FP32 past 87 although BF16 results do not: its square root does not.
    """
    e = tl.exp(tl.abs(gate) * -0.5)
    return e, 1.0 / (1.0 + e * e)


@triton.jit
def swiglu(gate, up):
    e, r = sigmoid_parts(gate)
    root = tl.where(gate >= 0, 1.0, e)
    return (gate * root * r) * (up * root)


@triton.jit
def swiglu_grad(dy, gate, up):
    """(d gate, d up, y) of y = silu(gate) * up."""
    e, r = sigmoid_parts(gate)
    root = tl.where(gate >= 0, 1.0, e)
    other = tl.where(gate >= 0, e, 1.0)
    silu = (gate * root * r) * root
    y = (gate * root * r) * (up * root)
    d_gate = (dy * root) * (up * root) * (r * (1.0 + gate * (other * other * r)))
    return d_gate, dy * silu, y


@triton.jit
def swiglu_kernel(x_ptr, y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, T, F, stride_t, row_scale_ld,
                  col_scale_ld, epsilon, FMAX: tl.constexpr, B: tl.constexpr, SCALE: tl.constexpr, EVEN: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr):
    tiles = tl.cdiv(T, BLOCK_M) * tl.cdiv(F, BLOCK_K)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        t0, f0 = tile_origin(t, F, BLOCK_M, BLOCK_K)
        rows = tile_rows(t0, BLOCK_M, J)
        cols = f0 + tl.arange(0, BLOCK_K)
        mask = (rows[:, None] < T) & (cols[None, :] < F)
        ptrs = x_ptr + rows[:, None] * stride_t + cols[None, :]
        if EVEN:
            gate = tl.load(ptrs).to(tl.float32)
            up = tl.load(ptrs + F).to(tl.float32)
        else:
            gate = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(ptrs + F, mask=mask, other=0.0).to(tl.float32)
        y = swiglu(gate, up).to(x_ptr.dtype.element_ty)
        if y_ptr is not None:
            tl.store(y_ptr + rows[:, None] * F + cols[None, :], y, mask=mask)
        y = nonfinite_to_nan(y.to(tl.float32))
        if row_ptr is not None:
            emit_rowwise(y, rows, t0, cols, f0, row_ptr, row_scale_ptr, None, row_scale_ld, epsilon, T, F, FMAX, B,
                         SCALE, EVEN, BLOCK_M, BLOCK_K, J)
        if col_ptr is not None:
            emit_colwise(y, t0, cols, col_ptr, col_scale_ptr, None, col_scale_ld, t0 // B, epsilon, T, T, F, FMAX, B,
                         SCALE, EVEN, BLOCK_M, BLOCK_K, J)


@triton.jit
def emit_half(d, dtype: tl.constexpr, mask, rows, t0, cols, f0, dx_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
              T, F2, row_scale_ld, col_scale_ld, epsilon, FMAX: tl.constexpr, B: tl.constexpr, SCALE: tl.constexpr,
              EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, J: tl.constexpr):
    """One half (gate or up) of d(fc1 output), whose columns in [T, 2f] are `cols`.

    Its tiles are tiles of the whole [T, 2f] only if f is a multiple of 128; otherwise the host asks for dx alone.
    """
    d = d.to(dtype)
    if dx_ptr is not None:
        tl.store(dx_ptr + rows[:, None] * F2 + cols[None, :], d, mask=mask)
    d = nonfinite_to_nan(d.to(tl.float32))
    if row_ptr is not None:
        emit_rowwise(d, rows, t0, cols, f0, row_ptr, row_scale_ptr, None, row_scale_ld, epsilon, T, F2, FMAX, B, SCALE,
                     EVEN, BLOCK_M, BLOCK_K, J)
    if col_ptr is not None:
        emit_colwise(d, t0, cols, col_ptr, col_scale_ptr, None, col_scale_ld, t0 // B, epsilon, T, T, F2, FMAX, B,
                     SCALE, EVEN, BLOCK_M, BLOCK_K, J)


@triton.jit
def swiglu_grad_kernel(dy_ptr, x_ptr, dx_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, y_col_ptr,
                       y_col_scale_ptr, T, F, stride_dy, stride_x, row_scale_ld, col_scale_ld, y_scale_ld, epsilon,
                       y_epsilon, FMAX: tl.constexpr, B: tl.constexpr, SCALE: tl.constexpr, Y_FMAX: tl.constexpr,
                       Y_B: tl.constexpr, Y_SCALE: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_K: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr):
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    tiles = tl.cdiv(T, BLOCK_M) * tl.cdiv(F, BLOCK_K)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        t0, f0 = tile_origin(t, F, BLOCK_M, BLOCK_K)
        rows = tile_rows(t0, BLOCK_M, J)
        cols = f0 + tl.arange(0, BLOCK_K)
        mask = (rows[:, None] < T) & (cols[None, :] < F)
        dy_ptrs = dy_ptr + rows[:, None] * stride_dy + cols[None, :]
        x_ptrs = x_ptr + rows[:, None] * stride_x + cols[None, :]
        if EVEN:
            dy = tl.load(dy_ptrs).to(tl.float32)
            gate = tl.load(x_ptrs).to(tl.float32)
            up = tl.load(x_ptrs + F).to(tl.float32)
        else:
            dy = tl.load(dy_ptrs, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(x_ptrs + F, mask=mask, other=0.0).to(tl.float32)
        d_gate, d_up, y = swiglu_grad(dy, gate, up)
        if y_col_ptr is not None:
            y = nonfinite_to_nan(y.to(dtype).to(tl.float32))
            emit_colwise(y, t0, cols, y_col_ptr, y_col_scale_ptr, None, y_scale_ld, t0 // Y_B, y_epsilon, T, T, F,
                         Y_FMAX, Y_B, Y_SCALE, EVEN, BLOCK_M, BLOCK_K, J)
        emit_half(d_gate, dtype, mask, rows, t0, cols, f0, dx_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, T,
                  2 * F, row_scale_ld, col_scale_ld, epsilon, FMAX, B, SCALE, EVEN, BLOCK_M, BLOCK_K, J)
        emit_half(d_up, dtype, mask, rows, t0, cols + F, f0 + F, dx_ptr, row_ptr, row_scale_ptr, col_ptr,
                  col_scale_ptr, T, 2 * F, row_scale_ld, col_scale_ld, epsilon, FMAX, B, SCALE, EVEN, BLOCK_M, BLOCK_K,
                  J)


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
    config = SWIGLU_BOTH if colwise else SWIGLU_ROWS
    if T and F:
        swiglu_kernel[config.grid(T, F, x.device)](
            x, y, *pointers(row), *pointers(col), T, F, x.stride(0), scale_ld(row), scale_ld(col),
            tile_epsilon(spec), EVEN=config.even(T, F), **config.constants(), **spec_arguments(spec),
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
    config = SWIGLU_GRAD
    if T and F:
        swiglu_grad_kernel[config.grid(T, F, x.device)](
            dy, x, dx, *pointers(row), *pointers(col), *pointers(y_col), T, F, dy.stride(0),
            x.stride(0), scale_ld(row), scale_ld(col), scale_ld(y_col), tile_epsilon(spec),
            tile_epsilon(y_spec or spec), EVEN=config.even(T, F), **config.constants(), **spec_arguments(spec),
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
