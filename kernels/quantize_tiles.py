"""Blockwise and MXFP8 quantization kernels: one pass over the input writes every copy that is asked for.

`quantize_1d_kernel` (activations, gradients): 1 x B tiles rowwise, B x 1 tiles colwise (stored transposed), or both.
`quantize_2d_kernel` (weights): B x B tiles, one set of bytes stored as it is and transposed.
`tile_amax_kernel`: only the amaxes, for tiles that several ranks share.
B is 128 (blockwise) or 32 (MXFP8). One program walks over BLOCK_M x BLOCK_K register tiles, along K first.
"""

import triton
import triton.language as tl

from .quantize_device import emit_2d, emit_colwise, emit_rowwise, load_tile, tile_rows


@triton.jit
def active_tiles(M, K, noop_ptr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Number of register tiles, 0 when the device flag says that there is nothing to do."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(K, BLOCK_K)
    if noop_ptr is not None:
        tiles = tl.where(tl.load(noop_ptr) != 0, 0, tiles)
    return tiles


@triton.jit
def tile_origin(t, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    tiles_k = tl.cdiv(K, BLOCK_K)
    return (t // tiles_k).to(tl.int64) * BLOCK_M, (t % tiles_k).to(tl.int64) * BLOCK_K


@triton.jit
def quantize_1d_kernel(x_ptr, row_ptr, row_scale_ptr, row_amax_ptr, col_ptr, col_scale_ptr, col_amax_ptr, noop_ptr,
                       M, K, stride_m, stride_k, row_scale_ld, col_scale_ld, epsilon, FMAX: tl.constexpr,
                       B: tl.constexpr, SCALE: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_K: tl.constexpr, J: tl.constexpr, STAGES: tl.constexpr):
    tiles = active_tiles(M, K, noop_ptr, BLOCK_M, BLOCK_K)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        m0, k0 = tile_origin(t, K, BLOCK_M, BLOCK_K)
        rows = tile_rows(m0, BLOCK_M, J)
        cols = k0 + tl.arange(0, BLOCK_K)
        x = load_tile(x_ptr, rows, cols, M, K, stride_m, stride_k, EVEN)
        if row_ptr is not None:
            emit_rowwise(x, rows, m0, cols, k0, row_ptr, row_scale_ptr, row_amax_ptr, row_scale_ld, epsilon, M, K,
                         FMAX, B, SCALE, EVEN, BLOCK_M, BLOCK_K, J)
        if col_ptr is not None:
            emit_colwise(x, m0, cols, col_ptr, col_scale_ptr, col_amax_ptr, col_scale_ld, m0 // B, epsilon, M, M, K,
                         FMAX, B, SCALE, EVEN, BLOCK_M, BLOCK_K, J)


@triton.jit
def quantize_2d_kernel(x_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, noop_ptr, M, K, stride_m,
                       stride_k, row_scale_ld, col_scale_ld, epsilon, FMAX: tl.constexpr, B: tl.constexpr,
                       SCALE: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
                       J: tl.constexpr, STAGES: tl.constexpr):
    tiles = active_tiles(M, K, noop_ptr, BLOCK_M, BLOCK_K)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        m0, k0 = tile_origin(t, K, BLOCK_M, BLOCK_K)
        rows = tile_rows(m0, BLOCK_M, J)
        cols = k0 + tl.arange(0, BLOCK_K)
        x = load_tile(x_ptr, rows, cols, M, K, stride_m, stride_k, EVEN)
        emit_2d(x, rows, m0, cols, k0, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, row_scale_ld,
                col_scale_ld, epsilon, M, K, FMAX, B, SCALE, EVEN, BLOCK_M, BLOCK_K, J)


@triton.jit
def tile_amax_kernel(x_ptr, row_ptr, col_ptr, square_ptr, M, K, stride_m, stride_k, B: tl.constexpr,
                     BLOCK: tl.constexpr):
    """FP32 amaxes of 1 x B tiles [ceil(K/B), M], B x 1 tiles [ceil(M/B), K], B x B tiles [ceil(M/B), ceil(K/B)]."""
    G: tl.constexpr = BLOCK // B
    m0, k0 = tile_origin(tl.program_id(0), K, BLOCK, BLOCK)
    rows = m0 + tl.arange(0, BLOCK)
    cols = k0 + tl.arange(0, BLOCK)
    x = tl.abs(load_tile(x_ptr, rows, cols, M, K, stride_m, stride_k, False))
    bm = m0 // B + tl.arange(0, G)
    bk = k0 // B + tl.arange(0, G)
    # maximum with 0: a tile without finite elements is NaN up to here
    row_amax = tl.maximum(tl.max(tl.reshape(x, (BLOCK, G, B)), axis=2), 0.0)
    if row_ptr is not None:
        tl.store(row_ptr + bk[None, :] * M + rows[:, None], row_amax,
                 mask=(rows[:, None] < M) & (bk[None, :] < tl.cdiv(K, B)))
    if col_ptr is not None:
        amax = tl.maximum(tl.max(tl.reshape(x, (G, B, BLOCK)), axis=1), 0.0)
        tl.store(col_ptr + bm[:, None] * K + cols[None, :], amax,
                 mask=(bm[:, None] < tl.cdiv(M, B)) & (cols[None, :] < K))
    if square_ptr is not None:
        amax = tl.max(tl.reshape(row_amax, (G, B, G)), axis=1)
        tl.store(square_ptr + bm[:, None] * tl.cdiv(K, B) + bk[None, :], amax,
                 mask=(bm[:, None] < tl.cdiv(M, B)) & (bk[None, :] < tl.cdiv(K, B)))
