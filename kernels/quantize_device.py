"""Device functions that every quantization kernel is made of: NUMERICS in Triton, tile loads and tile stores.

A kernel loads a tile as FP32 (`load_tile`), and hands it to `emit_1d` or `emit_2d`, which take the amax of every
quantization tile inside it, turn amaxes into scales, cast, and write the rowwise bytes, the transposed bytes and
their scales. Fused producers (norm, SwiGLU) compute their tile instead of loading it and call the same functions,
so their bytes are the quantizer's bytes.

Row order inside a tile. Row `i` of a register tile is row `(i % S) * J + i // S` of the tile in memory, with
`S = BLOCK_M / J`. A thread of Triton's blocked layout holds the register rows `i, i + S, i + 2S, ...`: with this
order they are J neighbours in memory, so the transposed copy leaves the registers as J-byte words instead of
single bytes. Any J is right; the best one is `BLOCK_M / (rows that the program's warps cover at once)`.
"""

import triton
import triton.language as tl

# How a stored scale is made from an amax.
FP32 = tl.constexpr(0)
POWER_OF_TWO = tl.constexpr(1)
E8M0 = tl.constexpr(2)


@triton.jit
def nonfinite_to_nan(x):
    """x with every Inf turned into NaN: `x * 0 + x` is exact for finite x (signed zeros too) and NaN otherwise.

    NaN then drops out of every maximum (`max.f32` returns the other operand) and casts to 0x7F in both formats: the
    hardware's saturating conversion rounds to nearest even, saturates finite overflow and gives 0x7F for any NaN.
    """
    return tl.fma(x, tl.zeros_like(x), x)


@triton.jit
def scale_from_amax(amax, epsilon, FMAX: tl.constexpr, SCALE: tl.constexpr):
    """(what elements are multiplied by, what is stored) for FP32 amaxes of any shape.

    Powers of two need no division. `fmax = 1.75 * 2^e` in both formats, so `fmax / a` rounded down to a power of
    two is `2^(e - exponent(a))`, and half of that when a's significand exceeds 1.75: adding `0x1FFFFF` to a's bits
    carries into the exponent in exactly that case.
    """
    a = tl.maximum(amax, epsilon)  # a tile without finite elements has amax NaN: this makes it epsilon
    if SCALE == E8M0:
        v = (a * (1.0 / 448.0)).to(tl.int32, bitcast=True)
        # Exponent of the smallest power of two >= v, v <= 2^-127 (bits 0x400000) being code 0. A finite amax gives
        # at most 247, so 2^(127 - code) is a normal number.
        code = tl.where(v <= 0x400000, 0, (v + 0x7FFFFF) >> 23)
        scale = ((254 - code) << 23).to(tl.float32, bitcast=True)
        stored = code.to(tl.uint8)
    elif SCALE == POWER_OF_TWO:
        TOP: tl.constexpr = 262 if FMAX == 448.0 else 269  # 2 * 127 + exponent of fmax
        exponent = (a.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
        exponent = tl.where(a == 0.0, 127, tl.minimum(TOP - exponent, 253))
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        stored = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        one = tl.zeros_like(a) + 1.0
        scale = tl.minimum(tl.div_rn(one * FMAX, a), 8.507059173023462e37)  # 2^126
        scale = tl.where(a == 0.0, 1.0, scale)
        stored = tl.div_rn(one, scale)
    return scale, stored


@triton.jit
def tile_rows(m0, BLOCK_M: tl.constexpr, J: tl.constexpr):
    """Memory rows (int64) of a tile's register rows; see the module's docstring."""
    i = tl.arange(0, BLOCK_M)
    return m0 + (i % (BLOCK_M // J)) * J + i // (BLOCK_M // J)


@triton.jit
def load_tile(ptr, rows, cols, M, K, stride_m, stride_k, EVEN: tl.constexpr):
    """A tile as FP32 with non-finite elements as NaN; outside [M, K] it is zero."""
    ptrs = ptr + rows[:, None] * stride_m + cols[None, :] * stride_k
    if EVEN:
        x = tl.load(ptrs)
    else:
        x = tl.load(ptrs, mask=(rows[:, None] < M) & (cols[None, :] < K), other=0.0)
    return nonfinite_to_nan(x.to(tl.float32))


@triton.jit
def store_rowwise(ptr, q, rows, cols, M, K, EVEN: tl.constexpr):
    ptrs = ptr + rows[:, None] * K + cols[None, :]
    if EVEN:
        tl.store(ptrs, q)
    else:
        tl.store(ptrs, q, mask=(rows[:, None] < M) & (cols[None, :] < K))


@triton.jit
def store_transposed(ptr, q, m0, cols, M, M_end, K, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_K: tl.constexpr, J: tl.constexpr):
    """Write q [BLOCK_M, BLOCK_K] (register rows) to [K, M]; only rows below M_end."""
    q = tl.reshape(q, (J, BLOCK_M // J, BLOCK_K)).permute(2, 1, 0).reshape(BLOCK_K, BLOCK_M)
    rows = m0 + tl.arange(0, BLOCK_M)
    ptrs = ptr + cols[:, None] * M + rows[None, :]
    if EVEN:
        tl.store(ptrs, q)
    else:
        tl.store(ptrs, q, mask=(cols[:, None] < K) & (rows[None, :] < M_end))


@triton.jit
def emit_rowwise(x, rows, m0, cols, k0, ptr, scale_ptr, amax_ptr, scale_ld, epsilon, M, K, FMAX: tl.constexpr,
                 B: tl.constexpr, SCALE: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_K: tl.constexpr, J: tl.constexpr):
    """1 x B tiles along K: bytes [M, K]; scale (m, b) at `b * scale_ld + m`."""
    G: tl.constexpr = BLOCK_K // B
    x = tl.reshape(x, (BLOCK_M, G, B))
    g = k0 // B + tl.arange(0, G)
    num_blocks = tl.cdiv(K, B)
    if amax_ptr is None:
        amax = tl.max(tl.abs(x), axis=2)
    else:
        amax = tl.load(amax_ptr + g[None, :] * M + rows[:, None],
                       mask=(rows[:, None] < M) & (g[None, :] < num_blocks), other=0.0)
    scale, stored = scale_from_amax(amax, epsilon, FMAX, SCALE)
    q = tl.reshape((x * scale[:, :, None]).to(ptr.dtype.element_ty), (BLOCK_M, BLOCK_K))
    store_rowwise(ptr, q, rows, cols, M, K, EVEN)
    # Back to memory order, so that neighbouring rows' scales are stored together.
    stored = tl.reshape(stored, (J, BLOCK_M // J, G)).permute(1, 0, 2).reshape(BLOCK_M, G)
    m = m0 + tl.arange(0, BLOCK_M)
    ptrs = scale_ptr + g[None, :] * scale_ld + m[:, None]
    if EVEN:
        tl.store(ptrs, stored)
    else:
        tl.store(ptrs, stored, mask=(m[:, None] < M) & (g[None, :] < num_blocks))


@triton.jit
def emit_colwise(x, m0, cols, ptr, scale_ptr, amax_ptr, scale_ld, first_block, epsilon, M, M_end, K,
                 FMAX: tl.constexpr, B: tl.constexpr, SCALE: tl.constexpr, EVEN: tl.constexpr,
                 BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, J: tl.constexpr):
    """B x 1 tiles along M: bytes [K, M]; scale (k, b) at `b * scale_ld + k`, the tile's first b is `first_block`."""
    G: tl.constexpr = BLOCK_M // B
    x = tl.reshape(x, (J, G, B // J, BLOCK_K))  # register row = j * S + s, memory row = s * J + j
    b = first_block + tl.arange(0, G)
    num_blocks = first_block + (M_end - m0 + B - 1) // B
    mask = (cols[None, :] < K) & (b[:, None] < num_blocks)
    offsets = b[:, None] * scale_ld + cols[None, :]
    if amax_ptr is None:
        amax = tl.max(tl.max(tl.abs(x), axis=0), axis=1)
    else:
        amax = tl.load(amax_ptr + b[:, None] * K + cols[None, :], mask=mask, other=0.0)
    scale, stored = scale_from_amax(amax, epsilon, FMAX, SCALE)
    q = (x * scale[None, :, None, :]).to(ptr.dtype.element_ty)
    store_transposed(ptr, tl.reshape(q, (BLOCK_M, BLOCK_K)), m0, cols, M, M_end, K, EVEN, BLOCK_M, BLOCK_K, J)
    if EVEN:
        tl.store(scale_ptr + offsets, stored)
    else:
        tl.store(scale_ptr + offsets, stored, mask=mask)


@triton.jit
def emit_2d(x, rows, m0, cols, k0, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, amax_ptr, row_scale_ld,
            col_scale_ld, epsilon, M, K, FMAX: tl.constexpr, B: tl.constexpr, SCALE: tl.constexpr,
            EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, J: tl.constexpr):
    """B x B tiles: one set of bytes, written as [M, K] and, if asked, as [K, M]; scales likewise, row-major."""
    GM: tl.constexpr = BLOCK_M // B
    GK: tl.constexpr = BLOCK_K // B
    bm = m0 // B + tl.arange(0, GM)
    bk = k0 // B + tl.arange(0, GK)
    x = tl.reshape(x, (J, GM, B // J, GK, B))
    mask = (bm[:, None] < tl.cdiv(M, B)) & (bk[None, :] < tl.cdiv(K, B))
    if amax_ptr is None:
        amax = tl.max(tl.max(tl.max(tl.abs(x), axis=0), axis=3), axis=1)
    else:
        amax = tl.load(amax_ptr + bm[:, None] * tl.cdiv(K, B) + bk[None, :], mask=mask, other=0.0)
    scale, stored = scale_from_amax(amax, epsilon, FMAX, SCALE)
    dtype: tl.constexpr = row_ptr.dtype.element_ty if row_ptr is not None else col_ptr.dtype.element_ty
    q = tl.reshape((x * scale[None, :, None, :, None]).to(dtype), (BLOCK_M, BLOCK_K))
    if row_ptr is not None:
        store_rowwise(row_ptr, q, rows, cols, M, K, EVEN)
        tl.store(row_scale_ptr + bm[:, None] * row_scale_ld + bk[None, :], stored, mask=mask)
    if col_ptr is not None:
        store_transposed(col_ptr, q, m0, cols, M, M, K, EVEN, BLOCK_M, BLOCK_K, J)
        tl.store(col_scale_ptr + bk[None, :] * col_scale_ld + bm[:, None], stored, mask=mask)
