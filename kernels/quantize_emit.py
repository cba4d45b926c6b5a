"""What is done with a register tile: maxima of its quantization tiles, scales, casts, stores.

A kernel loads a tile (`load_tile`) or computes it (norm, SwiGLU), and hands it to `emit`: so fused producers' bytes are
the quantizer's bytes. Tiles are BF16 or FP32, non-finite elements already NaN, in `tile_layout`.

A stored copy is named by a tuple (data pointer, scale pointer, given amaxes or None, the stride of scales that is not
1); its data pointer is None where that copy is not wanted. SPEC is (fmax, tile's block, how scales are made).
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .quantize_device import (
    amax_of_columns,
    amax_of_rows,
    cast_fp8,
    column_layout,
    columns_a_thread,
    columns_layout,
    layout_of,
    magnitude,
    max_of_all,
    rows_a_thread,
    rows_first,
    scale_from_amax,
    scaled,
    tile_indices,
    tile_mask,
    tile_offsets,
    to_f32,
    transposed_layout,
)


@jit
def store(ptrs, x, mask, EVEN: gl.constexpr):
    if EVEN:
        gl.store(ptrs, x)
    else:
        gl.store(ptrs, x, mask=mask)


@jit
def store_rowwise(ptr, y, m0, k0, M, K, FMAX: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr):
    """Casts scaled values y and writes them to [M, K]."""
    rows, cols = tile_indices(m0, k0, y.shape[0], y.shape[1], LAYOUT)
    q = gl.convert_layout(cast_fp8(y, FMAX), LAYOUT)
    store(ptr + tile_offsets(rows, cols, K, 1), q, tile_mask(rows, cols, M, K), EVEN)


@jit
def store_transposed_bytes(ptr, q, m0, k0, M, M_end, K, EVEN: gl.constexpr):
    """Writes bytes q [BLOCK_M, BLOCK_K] to [K, M]; only rows below M_end."""
    T: gl.constexpr = transposed_layout(q.shape[0], q.shape[1], gl.num_warps())
    q = gl.convert_layout(gl.permute(q, (1, 0)), T)
    cols, rows = tile_indices(k0, m0, q.shape[0], q.shape[1], T)
    store(ptr + tile_offsets(cols, rows, M, 1), q, tile_mask(cols, rows, K, M_end), EVEN)


@jit
def store_transposed(ptr, y, m0, k0, M, M_end, K, FMAX: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr):
    """Casts scaled values y [BLOCK_M, BLOCK_K] and writes them to [K, M]; only rows below M_end."""
    ROWS_FIRST: gl.constexpr = rows_first(y.shape[0], y.shape[1], rows_a_thread(LAYOUT), columns_a_thread(LAYOUT),
                                          gl.num_warps())
    y = gl.convert_layout(y, ROWS_FIRST)
    store_transposed_bytes(ptr, cast_fp8(y, FMAX), m0, k0, M, M_end, K, EVEN)


@jit
def record_amax(ptr, x):
    """Raises the FP32 at ptr to x's amax. (Bits of non-negative floats are ordered as integers; the order of maxima
    does not matter.) Most programs see that there is nothing to raise."""
    seen = gl.load(ptr, volatile=True)
    amax = max_of_all(x)
    gl.atomic_max(ptr.to(gl.pointer_type(gl.int32)), amax.to(gl.int32, bitcast=True), mask=amax > seen, sem="relaxed")


@jit
def emit_rowwise(x, m0, k0, row, epsilon, M, K, SPEC: gl.constexpr, EVEN: gl.constexpr):
    """1 x B tiles along K: bytes [M, K]; scale (m, b) at `b * ld + m`. Returns scaled values and stored scales."""
    B: gl.constexpr = SPEC[1]
    L: gl.constexpr = layout_of(x)
    BLOCK_M: gl.constexpr = x.shape[0]
    BLOCK_K: gl.constexpr = x.shape[1]
    ptr, scale_ptr, amax_ptr, ld = row
    amax = amax_of_columns(x, B)
    x = gl.reshape(x, (BLOCK_M, BLOCK_K // B, B))
    SCALES: gl.constexpr = gl.SliceLayout(2, layout_of(x))
    amax = gl.convert_layout(amax, SCALES)
    m = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCALES))
    b = k0 // B + gl.arange(0, BLOCK_K // B, layout=gl.SliceLayout(0, SCALES))
    mask = tile_mask(m, b, M, gl.cdiv(K, B))
    if amax_ptr is not None:
        amax = gl.load(amax_ptr + tile_offsets(m, b, 1, M), mask=mask, other=0.0)
    scale, stored = scale_from_amax(amax, epsilon, SPEC[0], SPEC[2])
    y = gl.reshape(scaled(x, gl.expand_dims(scale, 2), SPEC[2]), (BLOCK_M, BLOCK_K))
    store_rowwise(ptr, y, m0, k0, M, K, SPEC[0], EVEN, L)
    store(scale_ptr + tile_offsets(m, b, 1, ld), stored, mask, EVEN)
    return y, stored


@jit
def emit_colwise(x, m0, k0, col, first_block, epsilon, M, M_end, K, SPEC: gl.constexpr, EVEN: gl.constexpr):
    """B x 1 tiles along M: bytes [K, M]; scale (k, b) at `b * ld + k`, the tile's first b is `first_block`."""
    L: gl.constexpr = layout_of(x)
    R: gl.constexpr = rows_a_thread(L)
    PACKED: gl.constexpr = 2 if x.dtype == gl.bfloat16 else 1
    amax = amax_of_rows(x, R)
    amax = gl.convert_layout(amax, columns_layout(x.shape[0] // R, x.shape[1], PACKED, gl.num_warps()))
    y = scaled_columns(x, amax, m0, k0, col, first_block, epsilon, M_end, K, SPEC, EVEN)
    store_transposed(col[0], y, m0, k0, M, M_end, K, SPEC[0], EVEN, L)


@jit
def emit_columns(memory, m0, k0, col, first_block, epsilon, M, M_end, K, SPEC: gl.constexpr, EVEN: gl.constexpr):
    """`emit_colwise` of a tile that waits in shared memory, non-finite elements already NaN."""
    x = memory.load(column_layout(memory.shape[0], memory.shape[1], gl.num_warps(), False))
    y = scaled_columns(x, amax_of_rows(x, 16), m0, k0, col, first_block, epsilon, M_end, K, SPEC, EVEN)
    store_columns(col[0], y, m0, k0, M, M_end, K, SPEC[0], EVEN)


@jit
def scaled_columns(x, amax, m0, k0, col, first_block, epsilon, M_end, K, SPEC: gl.constexpr, EVEN: gl.constexpr):
    """x times the scales of its B x 1 tiles, which are stored. amax: [BLOCK_M / n, BLOCK_K], each of n rows."""
    B: gl.constexpr = SPEC[1]
    BLOCK_M: gl.constexpr = x.shape[0]
    BLOCK_K: gl.constexpr = x.shape[1]
    G: gl.constexpr = BLOCK_M // B
    _, scale_ptr, amax_ptr, ld = col
    amax = gl.max(gl.reshape(to_f32(amax), (G, amax.shape[0] // G, BLOCK_K)), axis=1)
    b = first_block + gl.arange(0, G, layout=gl.SliceLayout(1, layout_of(amax)))
    k = k0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout_of(amax)))
    mask = tile_mask(b, k, first_block + (M_end - m0 + B - 1) // B, K)
    if amax_ptr is not None:
        amax = gl.load(amax_ptr + tile_offsets(b, k, K, 1), mask=mask, other=0.0)
    scale, stored = scale_from_amax(amax, epsilon, SPEC[0], SPEC[2])
    store(scale_ptr + tile_offsets(b, k, ld, 1), stored, mask, EVEN)
    x = gl.reshape(x, (G, B, BLOCK_K))
    scale = gl.convert_layout(scale, gl.SliceLayout(1, layout_of(x)))
    return gl.reshape(scaled(x, gl.expand_dims(scale, 1), SPEC[2]), (BLOCK_M, BLOCK_K))


@jit
def store_columns(ptr, y, m0, k0, M, M_end, K, FMAX: gl.constexpr, EVEN: gl.constexpr):
    """Casts scaled values y in `column_layout` and writes them to [K, M]; only rows below M_end."""
    L: gl.constexpr = column_layout(y.shape[0], y.shape[1], gl.num_warps(), True)
    q = gl.permute(cast_fp8(gl.convert_layout(y, L), FMAX), (1, 0))
    cols = k0 + gl.arange(0, q.shape[0], layout=gl.SliceLayout(1, layout_of(q)))
    rows = m0 + gl.arange(0, q.shape[1], layout=gl.SliceLayout(0, layout_of(q)))
    store(ptr + tile_offsets(cols, rows, M, 1), q, tile_mask(cols, rows, K, M_end), EVEN)


@jit
def emit_1d(x, m0, k0, row, col, first_block, epsilon, M, M_end, K, SPEC: gl.constexpr, EVEN: gl.constexpr):
    """The copies that are wanted under 1D tiles; rows past M_end are not written colwise."""
    if col[0] is not None:
        emit_colwise(x, m0, k0, col, first_block, epsilon, M, M_end, K, SPEC, EVEN)
    if row[0] is not None:
        emit_rowwise(x, m0, k0, row, epsilon, M_end, K, SPEC, EVEN)


@jit
def emit_2d(x, m0, k0, row, col, epsilon, M, K, SPEC: gl.constexpr, EVEN: gl.constexpr):
    """B x B tiles: one set of bytes, written as [M, K], as [K, M], or both; scales likewise, row-major."""
    B: gl.constexpr = SPEC[1]
    L: gl.constexpr = layout_of(x)
    BLOCK_M: gl.constexpr = x.shape[0]
    BLOCK_K: gl.constexpr = x.shape[1]
    R: gl.constexpr = rows_a_thread(L)
    GM: gl.constexpr = BLOCK_M // B
    GK: gl.constexpr = BLOCK_K // B
    amax_ptr = row[2]
    amax = gl.max(gl.reshape(to_f32(magnitude(x)), (BLOCK_M // R, R, BLOCK_K)), axis=1)
    amax = gl.max(gl.reshape(amax, (BLOCK_M // R, GK, B)), axis=2)
    amax = gl.max(gl.reshape(amax, (GM, B // R, GK)), axis=1)
    bm = m0 // B + gl.arange(0, GM, layout=gl.SliceLayout(1, layout_of(amax)))
    bk = k0 // B + gl.arange(0, GK, layout=gl.SliceLayout(0, layout_of(amax)))
    mask = tile_mask(bm, bk, gl.cdiv(M, B), gl.cdiv(K, B))
    if amax_ptr is not None:
        amax = gl.load(amax_ptr + tile_offsets(bm, bk, gl.cdiv(K, B), 1), mask=mask, other=0.0)
    scale, stored = scale_from_amax(amax, epsilon, SPEC[0], SPEC[2])
    x = gl.reshape(to_f32(x), (GM, B, GK, B))
    SCALES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout_of(x)))
    scale = gl.expand_dims(gl.expand_dims(gl.convert_layout(scale, SCALES), 1), 3)
    y = gl.reshape(x * scale, (BLOCK_M, BLOCK_K))
    if row[0] is not None:
        store_rowwise(row[0], y, m0, k0, M, K, SPEC[0], EVEN, L)
        gl.store(row[1] + tile_offsets(bm, bk, row[3], 1), stored, mask=mask)
    if col[0] is not None:
        store_transposed(col[0], y, m0, k0, M, M, K, SPEC[0], EVEN, L)
        gl.store(col[1] + tile_offsets(bm, bk, 1, col[3]), stored, mask=mask)


@jit
def tensor_scale(given_ptr, amax_ptr, epsilon, row, col, first, SPEC: gl.constexpr):
    """The scale of a tensor tile: given (delayed scaling), or from an amax that lies on the device; 1 where there is
    neither. Kernels read it once, before their tiles; the one whose tile is the `first` stores its inverse."""
    scale = 1.0
    if given_ptr is not None or amax_ptr is not None:
        if given_ptr is not None:
            scale = gl.load(given_ptr)
            stored = gl.div_rn(scale * 0.0 + 1.0, scale)
        else:
            scale, stored = scale_from_amax(gl.load(amax_ptr), epsilon, SPEC[0], SPEC[2])
        if first:
            if row[0] is not None:
                gl.store(row[1], stored)
            elif col[0] is not None:
                gl.store(col[1], stored)
    return scale


@jit
def expert_scale(given_ptr, amax_ptr, epsilon, expert, SPEC: gl.constexpr):
    """The scale of one expert's rows, given or from its amax; 1 where there is neither. `store_expert_scales` stores
    the inverses of all."""
    scale = 1.0
    if given_ptr is not None:
        scale = gl.load(given_ptr + expert)
    elif amax_ptr is not None:
        scale, _ = scale_from_amax(gl.load(amax_ptr + expert), epsilon, SPEC[0], SPEC[2])
    return scale


@jit
def store_expert_scales(given_ptr, amax_ptr, epsilon, scale_inv_ptr, experts, SPEC: gl.constexpr,
                        EXPERTS: gl.constexpr, W: gl.constexpr):
    """What is stored of all experts' scales: also of those that have no rows. For one program to do."""
    e = gl.arange(0, EXPERTS, layout=gl.BlockedLayout([1], [32], [W], [0]))
    if given_ptr is not None:
        scale = gl.load(given_ptr + e, mask=e < experts, other=1.0)
        stored = gl.div_rn(scale * 0.0 + 1.0, scale)
    else:
        _, stored = scale_from_amax(gl.load(amax_ptr + e, mask=e < experts, other=0.0), epsilon, SPEC[0], SPEC[2])
    gl.store(scale_inv_ptr + e, stored, mask=e < experts)


@jit
def emit_tensor(x, m0, k0, row, col, scale, M, K, SPEC: gl.constexpr, EVEN: gl.constexpr):
    """The copies that are wanted under one scale."""
    L: gl.constexpr = layout_of(x)
    if row[0] is not None or col[0] is not None:
        y = to_f32(x) * scale
        if row[0] is not None:
            store_rowwise(row[0], y, m0, k0, M, K, SPEC[0], EVEN, L)
        if col[0] is not None:
            store_transposed(col[0], y, m0, k0, M, M, K, SPEC[0], EVEN, L)


@jit
def emit(x, m0, k0, row, col, scale, epsilon, M, K, SPEC: gl.constexpr, EVEN: gl.constexpr):
    """What a fused producer does with its rounded result, under 1D or tensor tiles (scale: from `tensor_scale`)."""
    if SPEC[1] == 0:
        emit_tensor(x, m0, k0, row, col, scale, M, K, SPEC, EVEN)
    else:
        emit_1d(x, m0, k0, row, col, m0 // SPEC[1], epsilon, M, M, K, SPEC, EVEN)


@jit
def emit_part(x, m0, k0, row, scale, epsilon, M, K, SPEC: gl.constexpr, EVEN: gl.constexpr):
    """The rowwise side of `emit` for some rows of a tile that is not complete yet."""
    if SPEC[1] == 0:
        emit_tensor(x, m0, k0, row, (None, None, None, 0), scale, M, K, SPEC, EVEN)
    elif row[0] is not None:
        emit_rowwise(x, m0, k0, row, epsilon, M, K, SPEC, EVEN)


@jit
def emit_rest(memory, m0, k0, col, scale, epsilon, M, K, SPEC: gl.constexpr, EVEN: gl.constexpr):
    """The colwise side of `emit` for a tile that waits in shared memory."""
    if SPEC[1] != 0:
        emit_columns(memory, m0, k0, col, m0 // SPEC[1], epsilon, M, M, K, SPEC, EVEN)
    else:
        x = memory.load(column_layout(memory.shape[0], memory.shape[1], gl.num_warps(), False))
        store_columns(col[0], to_f32(x) * scale, m0, k0, M, M, K, SPEC[0], EVEN)
