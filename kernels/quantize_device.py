"""Device functions that every quantization kernel is made of: NUMERICS in Gluon, layouts, loads, maxima, casts.

A tile stays in BF16 as long as it can: two values a register, and one instruction works on both. Whatever is not BF16
is FP32. `quantize_emit` has what is done with a tile.

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
def rows_a_thread(layout):
    return layout.size_per_thread[0]


@constexpr_function
def columns_a_thread(layout):
    return layout.size_per_thread[1]


@constexpr_function
def log2(n):
    return n.bit_length() - 1


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
def columns_layout(rows, columns, C, W):
    """As many rows of C whole columns a thread as fit: for the last step of a reduction along the first dimension."""
    each = max(1, rows * columns // (32 * W * C))
    lanes_m = max(1, rows // each)
    return gl.BlockedLayout([min(each, rows), C], [lanes_m, 32 // lanes_m], [1, W], [1, 0])


@constexpr_function
def _bits(first, last, dimension):
    """Basis vectors of the index bits [first, last) of one dimension."""
    return [[1 << i, 0] if dimension == 0 else [0, 1 << i] for i in range(first, last)]


@constexpr_function
def column_layout(BLOCK_M, BLOCK_K, W, ROWS_FIRST):
    """[BLOCK_M, BLOCK_K] by columns: a thread owns two columns, 16 rows of each together, a warp whole columns.

    So amaxes of columns stay inside a warp, and bytes leave 16 rows of a column at a time, 64 or 128 side by side.
    ROWS_FIRST: the same thread owns the same elements, its registers counted along the rows first.
    """
    m, k, w = BLOCK_M.bit_length() - 1, BLOCK_K.bit_length() - 1, W.bit_length() - 1
    lanes_m = min(2, m - 4)
    lanes_k = 5 - lanes_m
    rows, more = _bits(0, 4, 0), _bits(4 + lanes_m, m, 0)
    lanes = _bits(1, 1 + lanes_k, 1) + _bits(4, 4 + lanes_m, 0)
    warps = _bits(1 + lanes_k, min(k, 1 + lanes_k + w), 1)
    more_columns = _bits(1 + lanes_k + len(warps), k, 1)
    while len(warps) < w:  # a tile of few columns: warps share them
        warps.append(more.pop())
    registers = rows + more + _bits(0, 1, 1) if ROWS_FIRST else _bits(0, 1, 1) + rows + more
    return gl.DistributedLinearLayout(registers + more_columns, lanes, warps, [], [BLOCK_M, BLOCK_K])


@constexpr_function
def waiting_layout(BLOCK_M, BLOCK_K):
    """Shared memory of a tile that is written by rows and read in `column_layout`: 16 elements between every 16 rows,
    so that the rows which the lanes of a warp read lie in different banks."""
    return gl.PaddedSharedLayout.with_identity_for([[16 * BLOCK_K, 16]], [BLOCK_M, BLOCK_K], [1, 0])


@constexpr_function
def transposed_layout(BLOCK_M, BLOCK_K, W):
    """[BLOCK_K, BLOCK_M] bytes, 16 along M a thread."""
    lanes = BLOCK_M // 16
    return gl.BlockedLayout([1, 16], [32 // lanes, lanes], [W, 1], [1, 0])


@jit
def nonfinite_to_nan(x):
    """x with every Inf turned into NaN: `x * 0 + x` is exact for finite x (signed zeros too) and NaN otherwise.

    NaN then drops out of every maximum (the instruction returns the other operand) and casts to 0x7F in both formats.
    """
    if x.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }", "=r,r",
                                      [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        y = gl.fma(x, 0.0, x)
    return y


@jit
def to_f32(x):
    """FP32 values. (Of two BF16 in a register: one instruction each instead of two.)"""
    if x.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x],
                                      dtype=gl.float32, is_pure=True, pack=2)
    else:
        y = x.to(gl.float32)
    return y


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
        y = nonfinite_to_nan(to_compute_dtype(x, dtype))
    else:
        y = nonfinite_to_nan(x.to(dtype).to(gl.float32))
    return y


@constexpr_function
def rounded(dtype):
    """What `round_through` returns."""
    return gl.bfloat16 if dtype == gl.bfloat16 else gl.float32


@jit
def magnitude(x):
    if x.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("abs.bf16x2 $0, $1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        y = gl.abs(x)
    return y


@jit
def farther(a, b):
    """The one farther from zero, elementwise, with some sign; a number beats NaN.

    One instruction for two values, where the magnitudes and their maximum are three.
    """
    if a.dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.bfloat16,
                                      is_pure=True, pack=2)
    else:
        y = gl.maximum(gl.abs(a), gl.abs(b))
    return y


@jit
def amax_of_rows(x, COUNT: gl.constexpr):
    """[M, K] -> [M / COUNT, K]: maxima of |x| over COUNT neighbouring rows, all of them in one thread."""
    if x.dtype == gl.bfloat16:
        for _ in gl.static_range(log2(COUNT)):
            a, b = gl.split(gl.permute(gl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1)))
            x = farther(a, b)
        y = magnitude(x)
    else:
        y = gl.max(gl.reshape(gl.abs(x), (x.shape[0] // COUNT, COUNT, x.shape[1])), axis=1)
    return y


@jit
def amax_of_columns(x, COUNT: gl.constexpr):
    """[M, K] -> [M, K / COUNT] FP32: maxima of |x| over COUNT neighbouring columns, over threads where it must be."""
    C: gl.constexpr = columns_a_thread(layout_of(x))
    M: gl.constexpr = x.shape[0]
    G: gl.constexpr = x.shape[1] // COUNT
    if x.dtype == gl.bfloat16:
        IN_THREAD: gl.constexpr = min(C, COUNT)
        for _ in gl.static_range(log2(IN_THREAD) - 1):
            a, b = gl.split(gl.permute(gl.reshape(x, (M, x.shape[1] // 4, 2, 2)), (0, 1, 3, 2)))
            x = gl.reshape(farther(a, b), (M, x.shape[1] // 2))
        y = gl.max(gl.reshape(gl.abs(to_f32(x)), (M, G, x.shape[1] // G)), axis=2)
    else:
        y = gl.max(gl.reshape(gl.abs(x), (M, G, COUNT)), axis=2)
    return y


@jit
def max_of_all(x):
    """FP32 maximum of |x|, at least 0."""
    x = amax_of_rows(x, rows_a_thread(layout_of(x)))
    return gl.maximum(gl.max(gl.max(to_f32(x), axis=1), axis=0), 0.0)


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
def scaled(x, scale, SCALE: gl.constexpr):
    """FP32 of x * scale. BF16 by a power of two two at a time: exact, but for what FP8 rounds to zero anyway."""
    if x.dtype == gl.bfloat16 and SCALE != FP32:
        scale = to_compute_dtype(scale, gl.bfloat16)
        y = to_f32(gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, scale], dtype=gl.bfloat16,
                                             is_pure=True, pack=2))
    else:
        y = to_f32(x) * scale
    return y


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
def decode_scale(scale):
    """FP32 of a stored scale: itself, or an E8M0 code (0 is 2^-127, 255 is NaN)."""
    if scale.dtype == gl.uint8:
        code = scale.to(gl.int32)
        bits = gl.where(code == 0, 0x400000, gl.where(code == 255, 0x7FC00000, code << 23))
        value = bits.to(gl.float32, bitcast=True)
    else:
        value = scale
    return value


@jit
def tile_origin(index, K, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr):
    """First row and column (int64) of a register tile; tiles are counted along K first."""
    tiles_k = gl.cdiv(K, BLOCK_K)
    return (index // tiles_k).to(gl.int64) * BLOCK_M, (index % tiles_k).to(gl.int64) * BLOCK_K


@jit
def tile_indices(m0, k0, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, LAYOUT: gl.constexpr):
    """Row and column indices of a tile."""
    rows = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT))
    cols = k0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, LAYOUT))
    return rows, cols


@jit
def tile_offsets(rows, cols, stride_m, stride_k):
    return rows[:, None] * stride_m + cols[None, :] * stride_k


@jit
def tile_mask(rows, cols, M, K):
    return (rows[:, None] < M) & (cols[None, :] < K)


@jit
def load_or_zero(ptrs, mask, EVEN: gl.constexpr):
    """What lies there; zero outside the mask, which EVEN says is nowhere."""
    if EVEN:
        x = gl.load(ptrs)
    else:
        x = gl.load(ptrs, mask=mask, other=0.0)
    return x


@jit
def load_tile(ptr, rows, cols, M, K, stride_m, stride_k, EVEN: gl.constexpr):
    """A tile with non-finite elements as NaN, BF16 as BF16, else as FP32; outside [M, K] it is zero."""
    x = load_or_zero(ptr + tile_offsets(rows, cols, stride_m, stride_k), tile_mask(rows, cols, M, K), EVEN)
    if x.dtype != gl.bfloat16:
        x = x.to(gl.float32)
    return nonfinite_to_nan(x)


@jit
def source_rows(index_ptr, m0, m_end, M, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """(rows of the input, which of them exist) for ROWS result rows."""
    rows = m0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    valid = rows < m_end
    if index_ptr is not None:
        rows = gl.load(index_ptr + rows, mask=valid, other=-1).to(gl.int64)
        valid = (rows >= 0) & (rows < M)
    return rows, valid


@jit
def expert_of(ends_ptr, row, experts, EXPERTS: gl.constexpr, W: gl.constexpr):
    """The expert whose rows `row` is one of, `experts` if nobody's. ends: int32, one past each expert's last row."""
    e = gl.arange(0, EXPERTS, layout=gl.BlockedLayout([1], [32], [W], [0]))
    ends = gl.load(ends_ptr + e, mask=e < experts, other=2147483647)
    return gl.sum((ends <= row).to(gl.int32), axis=0)


@jit
def blocks_of(x, B: gl.constexpr):
    """[M, K] -> [M, K / B, B]; of a tile narrower than B, [M, 1, K]."""
    G: gl.constexpr = x.shape[1] // B if x.shape[1] > B else 1
    return gl.reshape(x, (x.shape[0], G, x.shape[1] // G))


@jit
def load_row_scales(scale_ptr, q, rows, valid, k0, K, stride_m, stride_b, B: gl.constexpr):
    """Stored scales [BLOCK_M, G] of the bytes q, whose rows lie at `rows`; of a tile of zeros where not valid."""
    SCALES: gl.constexpr = gl.SliceLayout(2, layout_of(blocks_of(q, B)))
    G: gl.constexpr = blocks_of(q, B).shape[1]
    m = gl.convert_layout(rows, gl.SliceLayout(1, SCALES))[:, None]
    valid = gl.convert_layout(valid, gl.SliceLayout(1, SCALES))[:, None]
    b = (k0 // B + gl.arange(0, G, layout=gl.SliceLayout(0, SCALES)))[None, :]
    other = 0 if scale_ptr.dtype.element_ty == gl.uint8 else 1.0
    return gl.load(scale_ptr + m * stride_m + b * stride_b, mask=valid & (b < gl.cdiv(K, B)), other=other)


@jit
def dequantize_tile(q, scale, B: gl.constexpr):
    """FP32 of bytes (FP8 dtype) under stored row scales [BLOCK_M, G]; exact under power-of-two scales."""
    x = blocks_of(q.to(gl.float32), B)
    scale = gl.convert_layout(decode_scale(scale), gl.SliceLayout(2, layout_of(x)))
    return gl.convert_layout(gl.reshape(x * gl.expand_dims(scale, 2), q.shape), layout_of(q))
