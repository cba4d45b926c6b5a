"""Device functions that every quantization kernel is made of: NUMERICS in Gluon, tile loads and tile stores.

A kernel loads a register tile as FP32 (`load_tile`), and hands it to `emit_rowwise`, `emit_colwise` or `emit_2d`, which
take the amax of every quantization tile inside it, turn amaxes into scales, cast, and write bytes and scales. Fused
producers (norm, SwiGLU) compute their tile instead of loading it and call the same functions, so their bytes are the
quantizer's bytes.

Layout. A thread owns R neighbouring rows and C neighbouring columns of the tile (`tile_layout`), a warp whole rows of
it. So memory is read and written rowwise 16 bytes at a time; a column's amax is reduced over R rows without leaving the
thread, then through shared memory in a layout where each thread owns whole columns, which is also where its scale is
computed once and not in every thread; and the transposed bytes leave as words of R bytes, because the cast packs the R
rows of a column (`rows_first`: the same thread owns the same elements, counted rows first).
"""

from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

# How a stored scale is made from an amax.
FP32 = gl.constexpr(0)
POWER_OF_TWO = gl.constexpr(1)
E8M0 = gl.constexpr(2)


@builtin
def layout_of(x, _semantic=None):
    """The layout of a tensor, as a compile-time value."""
    return gl.constexpr(x.type.layout)


@constexpr_function
def tile_layout(BLOCK_M, BLOCK_K, R, C, W):
    """R x C elements a thread; a warp's lanes along K first; W warps along M, the rest of them along K."""
    lanes_k = min(32, BLOCK_K // C)
    warps_m = max(1, min(W, BLOCK_M // (R * (32 // lanes_k))))
    return gl.BlockedLayout([R, C], [32 // lanes_k, lanes_k], [warps_m, W // warps_m], [1, 0])


@constexpr_function
def rows_first(BLOCK_M, BLOCK_K, R, C, W):
    """`tile_layout` (all warps along M) with the registers of a thread counted rows first."""
    registers = [[1 << i, 0] for i in range(R.bit_length() - 1)] + [[0, 1 << i] for i in range(C.bit_length() - 1)]
    across = [[0, C << i] for i in range((BLOCK_K // C).bit_length() - 1)]
    down = [[R << i, 0] for i in range((BLOCK_M // R).bit_length() - 1)]
    lanes = across + down[: 5 - len(across)]
    down = down[5 - len(across) :]
    warps = W.bit_length() - 1
    return gl.DistributedLinearLayout(registers + down[warps:], lanes, down[:warps], [], [BLOCK_M, BLOCK_K])


@constexpr_function
def columns_layout(rows, columns, W):
    """As many whole columns a thread as fit: for the last step of a reduction along the first dimension."""
    each = max(1, rows * columns // (32 * W))
    lanes_m = max(1, rows // each)
    return gl.BlockedLayout([min(each, rows), 1], [lanes_m, 32 // lanes_m], [1, W], [1, 0])


@constexpr_function
def transposed_layout(BLOCK_M, BLOCK_K, W):
    """[BLOCK_K, BLOCK_M] bytes, 16 along M a thread."""
    lanes = BLOCK_M // 16
    return gl.BlockedLayout([1, 16], [32 // lanes, lanes], [W, 1], [1, 0])


@jit
def nonfinite_to_nan(x):
    """x with every Inf turned into NaN: `x * 0 + x` is exact for finite x (signed zeros too) and NaN otherwise.

    NaN then drops out of every maximum (`max.f32` returns the other operand) and casts to 0x7F in both formats.
    """
    return gl.fma(x, 0.0, x)


@jit
def to_compute_dtype(x, dtype: gl.constexpr):
    """x rounded to nearest even. (Packed conversions to BF16 are fast, single ones very slow.)"""
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True,
                                      pack=2)
    else:
        y = x.to(dtype)
    return y


@jit
def round_through(x, dtype: gl.constexpr):
    """FP32 values rounded to a compute dtype, non-finite ones as NaN: what the quantizer would read from memory."""
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            "{ .reg .b32 p, zero; mov.b32 zero, 0; cvt.rn.bf16x2.f32 p, $3, $2; fma.rn.bf16x2 p, p, zero, p;"
            " shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000; }",
            "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        y = nonfinite_to_nan(x.to(dtype).to(gl.float32))
    return y


@jit
def scale_from_amax(amax, epsilon, FMAX: gl.constexpr, SCALE: gl.constexpr):
    """(what elements are multiplied by, what is stored) for FP32 amaxes of any shape.

    Powers of two need no division. `fmax = 1.75 * 2^e` in both formats, so `fmax / a` rounded down to a power of
    two is `2^(e - exponent(a))`, and half of that when a's significand exceeds 1.75: adding `0x1FFFFF` to a's bits
    carries into the exponent in exactly that case.
    """
    a = gl.maximum(amax, epsilon)  # a tile without finite elements has amax NaN: this makes it epsilon
    if SCALE == E8M0:
        v = (a * (1.0 / 448.0)).to(gl.int32, bitcast=True)
        # Exponent of the smallest power of two >= v, v <= 2^-127 (bits 0x400000) being code 0. A finite amax gives
        # at most 247, so 2^(127 - code) is a normal number.
        code = gl.where(v <= 0x400000, 0, (v + 0x7FFFFF) >> 23)
        scale = ((254 - code) << 23).to(gl.float32, bitcast=True)
        stored = code.to(gl.uint8)
    elif SCALE == POWER_OF_TWO:
        TOP: gl.constexpr = 262 if FMAX == 448.0 else 269  # 2 * 127 + exponent of fmax
        exponent = (a.to(gl.int32, bitcast=True) + 0x1FFFFF) >> 23
        exponent = gl.where(a == 0.0, 127, gl.minimum(TOP - exponent, 253))
        scale = (exponent << 23).to(gl.float32, bitcast=True)
        stored = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    else:
        one = a * 0.0 + 1.0
        scale = gl.minimum(gl.div_rn(one * FMAX, a), 8.507059173023462e37)  # 2^126
        scale = gl.where(a == 0.0, 1.0, scale)
        stored = gl.div_rn(one, scale)
    return scale, stored


@jit
def cast_fp8(x, FMAX: gl.constexpr):
    """Bytes of x: round to nearest even, finite overflow saturates, NaN gives 0x7F.

    Four neighbouring registers become one word. (Triton's own cast makes 16-bit pairs, of which ptxas 12.8 has been
    seen to miscompile the transposition: tests/gpu caught it.)
    """
    if FMAX == 448.0:
        q = gl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;"
            " mov.b32 $0, {lo, hi}; }", "=r,f,f,f,f", [x], dtype=gl.uint8, is_pure=True, pack=4)
    else:
        q = gl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1; cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3;"
            " mov.b32 $0, {lo, hi}; }", "=r,f,f,f,f", [x], dtype=gl.uint8, is_pure=True, pack=4)
    return q


@jit
def tile_origin(index, K, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr):
    """First row and column (int64) of a register tile; tiles are counted along K first."""
    tiles_k = gl.cdiv(K, BLOCK_K)
    return (index // tiles_k).to(gl.int64) * BLOCK_M, (index % tiles_k).to(gl.int64) * BLOCK_K


@jit
def tile_offsets(rows, cols, stride_m, stride_k):
    return rows[:, None] * stride_m + cols[None, :] * stride_k


@jit
def tile_mask(rows, cols, M, K):
    return (rows[:, None] < M) & (cols[None, :] < K)


@jit
def load_f32(ptrs, mask, EVEN: gl.constexpr):
    """FP32 of what lies there; zero outside the mask, which EVEN says is nowhere."""
    if EVEN:
        x = gl.load(ptrs)
    else:
        x = gl.load(ptrs, mask=mask, other=0.0)
    return x.to(gl.float32)


@jit
def load_tile(ptr, rows, cols, M, K, stride_m, stride_k, EVEN: gl.constexpr):
    """A tile as FP32 with non-finite elements as NaN; outside [M, K] it is zero."""
    ptrs = ptr + tile_offsets(rows, cols, stride_m, stride_k)
    return nonfinite_to_nan(load_f32(ptrs, tile_mask(rows, cols, M, K), EVEN))


@jit
def store_rowwise(ptr, y, rows, cols, M, K, FMAX: gl.constexpr, EVEN: gl.constexpr):
    """Casts scaled values y and writes them to [M, K]."""
    ptrs = ptr + tile_offsets(rows, cols, K, 1)
    q = gl.convert_layout(cast_fp8(y, FMAX), layout_of(ptrs))
    if EVEN:
        gl.store(ptrs, q)
    else:
        gl.store(ptrs, q, mask=tile_mask(rows, cols, M, K))


@jit
def store_transposed_bytes(ptr, q, m0, k0, M, M_end, K, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                           BLOCK_K: gl.constexpr, W: gl.constexpr):
    """Writes bytes q [BLOCK_M, BLOCK_K] to [K, M]; only rows below M_end."""
    T: gl.constexpr = transposed_layout(BLOCK_M, BLOCK_K, W)
    q = gl.convert_layout(gl.permute(q, (1, 0)), T)
    cols = k0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, T))
    rows = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, T))
    ptrs = ptr + tile_offsets(cols, rows, M, 1)
    if EVEN:
        gl.store(ptrs, q)
    else:
        gl.store(ptrs, q, mask=tile_mask(cols, rows, K, M_end))


@jit
def store_transposed(ptr, y, m0, k0, M, M_end, K, FMAX: gl.constexpr, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                     BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Casts scaled values y [BLOCK_M, BLOCK_K] and writes them to [K, M]; only rows below M_end."""
    y = gl.convert_layout(y, rows_first(BLOCK_M, BLOCK_K, R, C, W))
    store_transposed_bytes(ptr, cast_fp8(y, FMAX), m0, k0, M, M_end, K, EVEN, BLOCK_M, BLOCK_K, W)


@jit
def emit_rowwise(x, rows, m0, cols, k0, ptr, scale_ptr, amax_ptr, scale_ld, epsilon, M, K, FMAX: gl.constexpr,
                 B: gl.constexpr, SCALE: gl.constexpr, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                 BLOCK_K: gl.constexpr):
    """1 x B tiles along K: bytes [M, K]; scale (m, b) at `b * scale_ld + m`."""
    G: gl.constexpr = BLOCK_K // B
    x = gl.reshape(x, (BLOCK_M, G, B))
    SCALES: gl.constexpr = gl.SliceLayout(2, layout_of(x))
    m = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCALES))
    b = k0 // B + gl.arange(0, G, layout=gl.SliceLayout(0, SCALES))
    mask = tile_mask(m, b, M, gl.cdiv(K, B))
    if amax_ptr is None:
        amax = gl.max(gl.abs(x), axis=2)
    else:
        amax = gl.load(amax_ptr + tile_offsets(m, b, 1, M), mask=mask, other=0.0)
    scale, stored = scale_from_amax(amax, epsilon, FMAX, SCALE)
    y = gl.reshape(x * gl.expand_dims(scale, 2), (BLOCK_M, BLOCK_K))
    store_rowwise(ptr, y, rows, cols, M, K, FMAX, EVEN)
    if EVEN:
        gl.store(scale_ptr + tile_offsets(m, b, 1, scale_ld), stored)
    else:
        gl.store(scale_ptr + tile_offsets(m, b, 1, scale_ld), stored, mask=mask)


@jit
def emit_colwise(x, m0, k0, ptr, scale_ptr, amax_ptr, scale_ld, first_block, epsilon, M, M_end, K, FMAX: gl.constexpr,
                 B: gl.constexpr, SCALE: gl.constexpr, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                 BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """B x 1 tiles along M: bytes [K, M]; scale (k, b) at `b * scale_ld + k`, the tile's first b is `first_block`."""
    G: gl.constexpr = BLOCK_M // B
    amax = gl.max(gl.reshape(gl.abs(x), (BLOCK_M // R, R, BLOCK_K)), axis=1)
    amax = gl.convert_layout(amax, columns_layout(BLOCK_M // R, BLOCK_K, W))
    amax = gl.max(gl.reshape(amax, (G, B // R, BLOCK_K)), axis=1)
    b = first_block + gl.arange(0, G, layout=gl.SliceLayout(1, layout_of(amax)))
    k = k0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout_of(amax)))
    mask = tile_mask(b, k, first_block + (M_end - m0 + B - 1) // B, K)
    if amax_ptr is not None:
        amax = gl.load(amax_ptr + tile_offsets(b, k, K, 1), mask=mask, other=0.0)
    scale, stored = scale_from_amax(amax, epsilon, FMAX, SCALE)
    if EVEN:
        gl.store(scale_ptr + tile_offsets(b, k, scale_ld, 1), stored)
    else:
        gl.store(scale_ptr + tile_offsets(b, k, scale_ld, 1), stored, mask=mask)
    x = gl.reshape(x, (G, B, BLOCK_K))
    scale = gl.convert_layout(scale, gl.SliceLayout(1, layout_of(x)))
    y = gl.reshape(x * gl.expand_dims(scale, 1), (BLOCK_M, BLOCK_K))
    store_transposed(ptr, y, m0, k0, M, M_end, K, FMAX, EVEN, BLOCK_M, BLOCK_K, R, C, W)


@jit
def emit_2d(x, rows, m0, cols, k0, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, row_scale_ld,
            col_scale_ld, epsilon, M, K, FMAX: gl.constexpr, B: gl.constexpr, SCALE: gl.constexpr,
            EVEN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
            W: gl.constexpr):
    """B x B tiles: one set of bytes, written as [M, K], as [K, M], or both; scales likewise, row-major."""
    GM: gl.constexpr = BLOCK_M // B
    GK: gl.constexpr = BLOCK_K // B
    amax = gl.max(gl.reshape(gl.abs(x), (BLOCK_M // R, R, BLOCK_K)), axis=1)
    amax = gl.max(gl.reshape(amax, (BLOCK_M // R, GK, B)), axis=2)
    amax = gl.max(gl.reshape(amax, (GM, B // R, GK)), axis=1)
    bm = m0 // B + gl.arange(0, GM, layout=gl.SliceLayout(1, layout_of(amax)))
    bk = k0 // B + gl.arange(0, GK, layout=gl.SliceLayout(0, layout_of(amax)))
    mask = tile_mask(bm, bk, gl.cdiv(M, B), gl.cdiv(K, B))
    if amax_ptr is not None:
        amax = gl.load(amax_ptr + tile_offsets(bm, bk, gl.cdiv(K, B), 1), mask=mask, other=0.0)
    scale, stored = scale_from_amax(amax, epsilon, FMAX, SCALE)
    x = gl.reshape(x, (GM, B, GK, B))
    SCALES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout_of(x)))
    scale = gl.expand_dims(gl.expand_dims(gl.convert_layout(scale, SCALES), 1), 3)
    y = gl.reshape(x * scale, (BLOCK_M, BLOCK_K))
    if row_ptr is not None:
        store_rowwise(row_ptr, y, rows, cols, M, K, FMAX, EVEN)
        gl.store(row_scale_ptr + tile_offsets(bm, bk, row_scale_ld, 1), stored, mask=mask)
    if col_ptr is not None:
        store_transposed(col_ptr, y, m0, k0, M, M, K, FMAX, EVEN, BLOCK_M, BLOCK_K, R, C, W)
        gl.store(col_scale_ptr + tile_offsets(bm, bk, 1, col_scale_ld), stored, mask=mask)
