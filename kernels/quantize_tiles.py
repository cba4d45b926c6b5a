"""Blockwise and MXFP8 quantization kernels: one pass over the input writes every copy that is asked for.

`quantize_1d_kernel` (activations, gradients): 1 x B tiles rowwise, B x 1 tiles colwise (stored transposed), or both.
`quantize_2d_kernel` (weights): B x B tiles, one set of bytes stored as it is and transposed.
`tile_amax_kernel`: only the amaxes, for tiles that several ranks share.
B is 128 (blockwise) or 32 (MXFP8). One program handles one register tile of BLOCK_M x BLOCK_K.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .quantize_device import (
    amax_of_columns,
    amax_of_rows,
    layout_of,
    load_tile,
    tile_indices,
    tile_layout,
    tile_mask,
    tile_offsets,
    tile_origin,
    to_f32,
    waiting_layout,
)
from .quantize_emit import emit_1d, emit_2d, emit_columns, emit_rowwise


@jit
def quantize_1d_kernel(x_ptr, row_ptr, row_scale_ptr, row_amax_ptr, col_ptr, col_scale_ptr, col_amax_ptr, noop_ptr,
                       M, K, stride_m, stride_k, row_scale_ld, col_scale_ld, epsilon, SPEC: gl.constexpr,
                       EVEN: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
                       R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    if noop_ptr is not None:  # noqa: SIM102 (the first `if` is decided at compile time)
        if gl.load(noop_ptr) != 0:
            return
    m0, k0 = tile_origin(gl.program_id(0), K, BLOCK_M, BLOCK_K)
    row = (row_ptr, row_scale_ptr, row_amax_ptr, row_scale_ld)
    col = (col_ptr, col_scale_ptr, col_amax_ptr, col_scale_ld)
    if ROWS == 0:
        rows, cols = tile_indices(m0, k0, BLOCK_M, BLOCK_K, tile_layout(BLOCK_M, BLOCK_K, R, C, W))
        x = load_tile(x_ptr, rows, cols, M, K, stride_m, stride_k, EVEN)
        emit_1d(x, m0, k0, row, col, m0 // SPEC[1], epsilon, M, M, K, SPEC, EVEN)
    else:
        PART: gl.constexpr = tile_layout(ROWS, BLOCK_K, R, C, W)
        parts = ()
        for i in gl.static_range(0, BLOCK_M, ROWS):
            rows, cols = tile_indices(m0 + i, k0, ROWS, BLOCK_K, PART)
            parts = parts + (load_tile(x_ptr, rows, cols, M, K, stride_m, stride_k, EVEN),)  # noqa: RUF005
        memory = gl.allocate_shared_memory(parts[0].dtype, (BLOCK_M, BLOCK_K), waiting_layout(BLOCK_M, BLOCK_K))
        for i in gl.static_range(len(parts)):
            if row_ptr is not None:
                emit_rowwise(parts[i], m0 + i * ROWS, k0, row, epsilon, M, K, SPEC, EVEN)
            memory.slice(i * ROWS, ROWS).store(parts[i])
        emit_columns(memory, m0, k0, col, m0 // SPEC[1], epsilon, M, M, K, SPEC, EVEN)


@jit
def quantize_2d_kernel(x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, noop_ptr, M, K, stride_m,
                       stride_k, row_scale_ld, col_scale_ld, epsilon, SPEC: gl.constexpr, EVEN: gl.constexpr,
                       BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
                       W: gl.constexpr):
    if noop_ptr is not None:  # noqa: SIM102 (the first `if` is decided at compile time)
        if gl.load(noop_ptr) != 0:
            return
    m0, k0 = tile_origin(gl.program_id(0), K, BLOCK_M, BLOCK_K)
    rows, cols = tile_indices(m0, k0, BLOCK_M, BLOCK_K, tile_layout(BLOCK_M, BLOCK_K, R, C, W))
    x = load_tile(x_ptr, rows, cols, M, K, stride_m, stride_k, EVEN)
    emit_2d(x, m0, k0, (row_ptr, row_scale_ptr, amax_ptr, row_scale_ld),
            (col_ptr, col_scale_ptr, amax_ptr, col_scale_ld), epsilon, M, K, SPEC, EVEN)


@jit
def tile_amax_kernel(x_ptr, row_ptr, col_ptr, square_ptr, M, K, stride_m, stride_k, B: gl.constexpr,
                     BLOCK: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """FP32 amaxes of 1 x B tiles [ceil(K/B), M], B x 1 tiles [ceil(M/B), K], B x B tiles [ceil(M/B), ceil(K/B)]."""
    G: gl.constexpr = BLOCK // B
    m0, k0 = tile_origin(gl.program_id(0), K, BLOCK, BLOCK)
    rows, cols = tile_indices(m0, k0, BLOCK, BLOCK, tile_layout(BLOCK, BLOCK, R, C, W))
    x = load_tile(x_ptr, rows, cols, M, K, stride_m, stride_k, False)
    if col_ptr is not None:
        amax = to_f32(amax_of_rows(x, R))
        amax = gl.max(gl.reshape(amax, (G, B // R, BLOCK)), axis=1)
        store_amax(col_ptr, amax, m0 // B, k0, gl.cdiv(M, B), K, K, 1)
    else:
        amax = amax_of_columns(x, B)
        if row_ptr is not None:
            store_amax(row_ptr, amax, m0, k0 // B, M, gl.cdiv(K, B), 1, M)
        if square_ptr is not None:
            amax = gl.max(gl.reshape(amax, (G, B, G)), axis=1)
            store_amax(square_ptr, amax, m0 // B, k0 // B, gl.cdiv(M, B), gl.cdiv(K, B), gl.cdiv(K, B), 1)


@jit
def store_amax(ptr, amax, first_row, first_col, rows, columns, stride_r, stride_c):
    r = first_row + gl.arange(0, amax.shape[0], layout=gl.SliceLayout(1, layout_of(amax)))
    c = first_col + gl.arange(0, amax.shape[1], layout=gl.SliceLayout(0, layout_of(amax)))
    amax = gl.maximum(amax, 0.0)  # a tile without finite elements is NaN up to here
    gl.store(ptr + tile_offsets(r, c, stride_r, stride_c), amax, mask=tile_mask(r, c, rows, columns))
