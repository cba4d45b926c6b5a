"""Tensorwise quantization kernels: amax on the device, then a cast that reads the scale there. No host sync.

`amax_kernel` leaves one partial maximum a program; `cast_kernel` reduces the partials itself (a few KB from L2), so
that no third launch stands between them. It walks through the input backwards: what the amax pass read last is
still in L2. With delayed scaling the scale is given, and the amax is recorded on the way by an integer atomic
maximum (bits of non-negative floats are ordered as integers), which is deterministic.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .quantize_device import (
    farther,
    load_tile,
    max_of_all,
    scale_from_amax,
    tile_indices,
    tile_layout,
    tile_origin,
    to_f32,
)
from .quantize_emit import record_amax, store_rowwise, store_transposed


@jit
def amax_kernel(x_ptr, partial_ptr, M, K, stride_m, stride_k, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    rows = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    cols = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    dtype: gl.constexpr = gl.bfloat16 if x_ptr.dtype.element_ty == gl.bfloat16 else gl.float32
    acc = gl.zeros((BLOCK_M, BLOCK_K), dtype, layout=L)
    tiles = gl.cdiv(M, BLOCK_M).to(gl.int64) * gl.cdiv(K, BLOCK_K)
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m0, k0 = tile_origin(t, K, BLOCK_M, BLOCK_K)
        x = load_tile(x_ptr, m0 + rows, k0 + cols, M, K, stride_m, stride_k, EVEN)
        acc = farther(acc, x)
    gl.store(partial_ptr + gl.program_id(0), max_of_all(acc))


@jit
def reduce_partials(partial_ptr, partials, PARTIALS: gl.constexpr, W: gl.constexpr):
    i = gl.arange(0, PARTIALS, layout=gl.BlockedLayout([1], [32], [W], [0]))
    return gl.max(gl.load(partial_ptr + i, mask=i < partials, other=0.0), axis=0)


@jit
def finish_amax_kernel(partial_ptr, amax_ptr, partials, PARTIALS: gl.constexpr, W: gl.constexpr):
    gl.store(amax_ptr, reduce_partials(partial_ptr, partials, PARTIALS, W))


@jit
def cast_kernel(x_ptr, row_ptr, col_ptr, partial_ptr, given_scale_ptr, scale_inv_ptr, amax_ptr, noop_ptr, M, K,
                stride_m, stride_k, partials, epsilon, SPEC: gl.constexpr,
                PARTIALS: gl.constexpr, EVEN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
                R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Bytes [M, K] and/or [K, M] under one scale: from `partials` maxima, or given (then amax is recorded)."""
    if noop_ptr is not None:  # noqa: SIM102 (the first `if` is decided at compile time)
        if gl.load(noop_ptr) != 0:
            return
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    m0, k0 = tile_origin(gl.num_programs(0) - 1 - gl.program_id(0), K, BLOCK_M, BLOCK_K)
    rows, cols = tile_indices(m0, k0, BLOCK_M, BLOCK_K, L)
    x = load_tile(x_ptr, rows, cols, M, K, stride_m, stride_k, EVEN)
    if given_scale_ptr is not None:
        scale = gl.load(given_scale_ptr)
        stored = gl.div_rn(scale * 0.0 + 1.0, scale)
        if amax_ptr is not None:
            record_amax(amax_ptr, x)
    else:
        amax = reduce_partials(partial_ptr, partials, PARTIALS, W)
        scale, stored = scale_from_amax(amax, epsilon, SPEC[0], SPEC[2])
        if amax_ptr is not None:  # noqa: SIM102
            if gl.program_id(0) == 0:
                gl.store(amax_ptr, amax)
    if gl.program_id(0) == 0:
        gl.store(scale_inv_ptr, stored)
    y = to_f32(x) * scale
    if row_ptr is not None:
        store_rowwise(row_ptr, y, m0, k0, M, K, SPEC[0], EVEN, L)
    if col_ptr is not None:
        store_transposed(col_ptr, y, m0, k0, M, M, K, SPEC[0], EVEN, L)
