"""Tensorwise quantization kernels: amax on the device, then a cast that reads the scale there. No host sync.

`amax_kernel` leaves one partial maximum a program; `cast_kernel` reduces the partials itself (a few KB from L2), so
that no third launch stands between them. It walks through the input backwards: what the amax pass read last is
still in L2. With delayed scaling the scale is given, and the amax is recorded on the way by an integer atomic
maximum (bits of non-negative floats are ordered as integers), which is deterministic.
"""

import triton
import triton.language as tl

from .quantize_device import load_tile, scale_from_amax, store_rowwise, store_transposed, tile_rows
from .quantize_tiles import active_tiles, tile_origin


@triton.jit
def amax_kernel(x_ptr, partial_ptr, M, K, stride_m, stride_k, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    tiles = tl.cdiv(M, BLOCK_M).to(tl.int64) * tl.cdiv(K, BLOCK_K)
    for t in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        m0, k0 = tile_origin(t, K, BLOCK_M, BLOCK_K)
        x = load_tile(x_ptr, m0 + tl.arange(0, BLOCK_M), k0 + tl.arange(0, BLOCK_K), M, K, stride_m, stride_k, EVEN)
        acc = tl.maximum(acc, tl.abs(x))
    tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(acc, axis=1), axis=0))


@triton.jit
def reduce_partials(partial_ptr, partials, PARTIALS: tl.constexpr):
    i = tl.arange(0, PARTIALS)
    return tl.max(tl.load(partial_ptr + i, mask=i < partials, other=0.0), axis=0)


@triton.jit
def finish_amax_kernel(partial_ptr, amax_ptr, partials, PARTIALS: tl.constexpr):
    tl.store(amax_ptr, reduce_partials(partial_ptr, partials, PARTIALS))


@triton.jit
def cast_kernel(x_ptr, row_ptr, col_ptr, partial_ptr, given_scale_ptr, scale_inv_ptr, amax_ptr, noop_ptr, M, K,
                stride_m, stride_k, partials, epsilon, FMAX: tl.constexpr, SCALE: tl.constexpr,
                PARTIALS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
                J: tl.constexpr, STAGES: tl.constexpr):
    """Bytes [M, K] and/or [K, M] under one scale: from `partials` maxima, or given (then amax is recorded)."""
    tiles = active_tiles(M, K, noop_ptr, BLOCK_M, BLOCK_K)
    active = True if noop_ptr is None else tl.load(noop_ptr) == 0
    if given_scale_ptr is not None:
        scale = tl.load(given_scale_ptr)
        scale_inv = tl.div_rn(1.0, scale)
    else:
        amax = reduce_partials(partial_ptr, partials, PARTIALS)
        scale, scale_inv = scale_from_amax(amax, epsilon, FMAX, SCALE)
    if active and tl.program_id(0) == 0:
        tl.store(scale_inv_ptr, scale_inv)
        if given_scale_ptr is None and amax_ptr is not None:
            tl.store(amax_ptr, amax)
    for i in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        m0, k0 = tile_origin(tiles - 1 - i, K, BLOCK_M, BLOCK_K)
        rows = tile_rows(m0, BLOCK_M, J)
        cols = k0 + tl.arange(0, BLOCK_K)
        x = load_tile(x_ptr, rows, cols, M, K, stride_m, stride_k, EVEN)
        if given_scale_ptr is not None and amax_ptr is not None:
            tile_max = tl.maximum(tl.max(tl.max(tl.abs(x), axis=1), axis=0), 0.0)
            tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), tile_max.to(tl.int32, bitcast=True), sem="relaxed")
        dtype = row_ptr.dtype.element_ty if row_ptr is not None else col_ptr.dtype.element_ty
        q = (x * scale).to(dtype)
        if row_ptr is not None:
            store_rowwise(row_ptr, q, rows, cols, M, K, EVEN)
        if col_ptr is not None:
            store_transposed(col_ptr, q, m0, cols, M, M, K, EVEN, BLOCK_M, BLOCK_K, J)
