"""The kernels of `swiglu_quantize`: one register tile a program."""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .quantize_device import (
    decode_scale,
    dequantize_tile,
    load_f32,
    load_or_zero,
    load_row_scales,
    nonfinite_to_nan,
    round_through,
    tile_indices,
    tile_layout,
    tile_mask,
    tile_offsets,
    tile_origin,
    to_compute_dtype,
    to_f32,
)
from .quantize_emit import emit


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
def sigmoid(x):
    """1 / (1 + exp(-x)), relatively exact to an ulp or two, for very negative x too.

    The special-function unit flushes `exp(-|x|)` to zero past 87, although BF16 results there are not zero: the square
    of `exp(-|x| / 2)` is a subnormal number instead.
    """
    half = exp2_fast(gl.abs(x) * -0.7213475204444817)  # log2(e) / 2
    e = half * half
    return gl.where(x >= 0, 1.0, e) * reciprocal_fast(e + 1.0)


@jit
def swiglu(gate, up):
    return (gate * sigmoid(gate)) * up


@jit
def swiglu_grad(dy, gate, up):
    """(d gate, d up, y) of y = silu(gate) * up."""
    s = sigmoid(gate)
    ds = dy * s
    return ds * (up * (1.0 + gate * (1.0 - s))), ds * gate, (gate * s) * up


@jit
def load_half(x_ptr, scale_ptr, rows, cols, valid, k0, T, F, stride_t, scale_stride_t, scale_stride_b,
              X_BLOCK: gl.constexpr, X_ALIGNED: gl.constexpr, dtype: gl.constexpr, EVEN: gl.constexpr):
    """Gate or up columns `cols` of fc1's output [T, 2f] as FP32; FP8 bytes as their values in the compute dtype."""
    mask = valid & (rows < T)[:, None]
    ptrs = x_ptr + tile_offsets(rows, cols, stride_t, 1)
    if X_BLOCK == 0:
        x = load_f32(ptrs, mask, EVEN)
    elif X_ALIGNED:
        q = load_or_zero(ptrs, mask, EVEN)
        scale = load_row_scales(scale_ptr, q, rows, rows < T, k0, 2 * F, scale_stride_t, scale_stride_b, X_BLOCK)
        x = to_f32(to_compute_dtype(dequantize_tile(q, scale, X_BLOCK), dtype))
    else:
        scale = gl.load(scale_ptr + tile_offsets(rows, cols // X_BLOCK, scale_stride_t, scale_stride_b), mask=mask,
                        other=0)
        x = load_or_zero(ptrs, mask, EVEN).to(gl.float32) * decode_scale(scale)
        x = to_f32(to_compute_dtype(x, dtype))
    return x


@jit
def swiglu_kernel(x_ptr, x_scale_ptr, stride_t, x_scale_stride_t, x_scale_stride_b, weights_ptr, y_ptr, row_ptr,
                  row_scale_ptr, col_ptr, col_scale_ptr, scale_ptr, amax_ptr, record_ptr, T, F, row_scale_ld,
                  col_scale_ld, epsilon, X_BLOCK: gl.constexpr, X_ALIGNED: gl.constexpr, DTYPE: gl.constexpr,
                  SPEC: gl.constexpr, EVEN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
                  R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    dtype: gl.constexpr = gl.bfloat16 if DTYPE == "bf16" else gl.float16
    t0, f0 = tile_origin(gl.program_id(0), F, BLOCK_M, BLOCK_K)
    rows, cols = tile_indices(t0, f0, BLOCK_M, BLOCK_K, tile_layout(BLOCK_M, BLOCK_K, R, C, W))
    valid = (cols < F)[None, :]
    gate = load_half(x_ptr, x_scale_ptr, rows, cols, valid, f0, T, F, stride_t, x_scale_stride_t, x_scale_stride_b,
                     X_BLOCK, X_ALIGNED, dtype, EVEN)
    up = load_half(x_ptr, x_scale_ptr, rows, cols + F, valid, f0 + F, T, F, stride_t, x_scale_stride_t,
                   x_scale_stride_b, X_BLOCK, X_ALIGNED, dtype, EVEN)
    y = swiglu(gate, up)
    if weights_ptr is not None:
        y *= load_or_zero(weights_ptr + rows, rows < T, EVEN)[:, None]
    if y_ptr is not None:
        gl.store(y_ptr + tile_offsets(rows, cols, F, 1), to_compute_dtype(y, dtype), mask=tile_mask(rows, cols, T, F))
    emit(round_through(y, dtype), t0, f0, (row_ptr, row_scale_ptr, None, row_scale_ld),
         (col_ptr, col_scale_ptr, None, col_scale_ld), (scale_ptr, amax_ptr, record_ptr), epsilon, T, F, SPEC, EVEN)


@jit
def waited(memory, LAYOUT: gl.constexpr):
    """A rounded result back from shared memory, as `emit` takes it."""
    x = memory.load(LAYOUT)
    return nonfinite_to_nan(x if x.dtype == gl.bfloat16 else x.to(gl.float32))


@jit
def swiglu_grad_kernel(dy_ptr, x_ptr, x_scale_ptr, stride_t, x_scale_stride_t, x_scale_stride_b, weights_ptr,
                       partial_ptr, dx_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, scale_ptr, amax_ptr,
                       record_ptr, y_col_ptr, y_col_scale_ptr, y_scale_ptr, y_amax_ptr, T, F, stride_dy, row_scale_ld,
                       col_scale_ld, y_scale_ld, epsilon, y_epsilon, X_BLOCK: gl.constexpr, X_ALIGNED: gl.constexpr,
                       DTYPE: gl.constexpr, SPEC: gl.constexpr, Y_SPEC: gl.constexpr, EVEN: gl.constexpr,
                       BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
                       W: gl.constexpr):
    """Three results of one tile are quantized one after the other; those that wait do so in shared memory.

    In registers they would leave room for only one program a multiprocessor. A tile of one half is a tile of the whole
    [T, 2f] only if f is a multiple of the tile's width; otherwise the host asks for dx alone.
    """
    dtype: gl.constexpr = gl.bfloat16 if DTYPE == "bf16" else gl.float16
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    WAITING: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    t0, f0 = tile_origin(gl.program_id(0), F, BLOCK_M, BLOCK_K)
    rows, cols = tile_indices(t0, f0, BLOCK_M, BLOCK_K, L)
    mask = tile_mask(rows, cols, T, F)
    valid = (cols < F)[None, :]
    dy = load_f32(dy_ptr + tile_offsets(rows, cols, stride_dy, 1), mask, EVEN)
    gate = load_half(x_ptr, x_scale_ptr, rows, cols, valid, f0, T, F, stride_t, x_scale_stride_t, x_scale_stride_b,
                     X_BLOCK, X_ALIGNED, dtype, EVEN)
    up = load_half(x_ptr, x_scale_ptr, rows, cols + F, valid, f0 + F, T, F, stride_t, x_scale_stride_t,
                   x_scale_stride_b, X_BLOCK, X_ALIGNED, dtype, EVEN)
    if weights_ptr is not None:
        weights = load_or_zero(weights_ptr + rows, rows < T, EVEN)[:, None]
        d_gate, d_up, y = swiglu_grad(dy * weights, gate, up)
        if partial_ptr is not None:
            gl.store(partial_ptr + (f0 // BLOCK_K) * T + rows, gl.sum(dy * y, axis=1), mask=rows < T)
        y *= weights
    else:
        d_gate, d_up, y = swiglu_grad(dy, gate, up)
    d_gate = to_compute_dtype(d_gate, dtype)
    d_up = to_compute_dtype(d_up, dtype)
    if dx_ptr is not None:
        gl.store(dx_ptr + tile_offsets(rows, cols, 2 * F, 1), d_gate, mask=mask)
        gl.store(dx_ptr + tile_offsets(rows, cols + F, 2 * F, 1), d_up, mask=mask)
    d_gate = gl.allocate_shared_memory(dtype, (BLOCK_M, BLOCK_K), WAITING, d_gate)
    d_up = gl.allocate_shared_memory(dtype, (BLOCK_M, BLOCK_K), WAITING, d_up)
    if y_col_ptr is not None:
        emit(round_through(y, dtype), t0, f0, (None, None, None, 0), (y_col_ptr, y_col_scale_ptr, None, y_scale_ld),
             (y_scale_ptr, y_amax_ptr, None), y_epsilon, T, F, Y_SPEC, EVEN)
    row = (row_ptr, row_scale_ptr, None, row_scale_ld)
    col = (col_ptr, col_scale_ptr, None, col_scale_ld)
    tensor = (scale_ptr, amax_ptr, record_ptr)
    emit(waited(d_gate, L), t0, f0, row, col, tensor, epsilon, T, 2 * F, SPEC, EVEN)
    emit(waited(d_up, L), t0, f0 + F, row, col, tensor, epsilon, T, 2 * F, SPEC, EVEN)
