"""Device functions of the AdamW kernels: one chunk a row, its state read, moved and written in one pass.

A tile is [R, 64]: R chunks of 64 elements, each contiguous in memory (`megafp8.optimizer.layout.ALIGNMENT`), 4 elements
a thread, so that FP32 moves 16 bytes at a time. Every operation is one that rounds once, in the order of the PyTorch
reference (`megafp8/optimizer/adamw.py`), and kernels are compiled without fused multiply-adds: bytes are equal.

State may be stored as FP32, as BF16, or as FP8 with a scale a chunk (`megafp8/optimizer/codecs.py` has the formats).
"""

from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as gl

from .quantize_device import cast_fp8, to_compute_dtype

CHUNK = gl.constexpr(64)
TABLE_ROWS = gl.constexpr(128)  # magnitudes of E4M3 an expansion has in the table
SMALLEST_AMAX = gl.constexpr(1.1754943508222875e-38)  # 2^-126: smaller blocks are zero
FLIP = gl.constexpr(0.0146484375)  # what rounds to at least 2^-6, E4M3's smallest normal number


@constexpr_function
def chunk_layout(W):
    """[R, 64]: half a warp a chunk, 4 elements a thread."""
    return gl.BlockedLayout([1, 4], [2, 16], [W, 1], [1, 0])


@jit
def mix(x):
    """A bijection of uint32 that scrambles all bits (the hash `lowbias32`)."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@jit
def random_words(index, key, step):
    """uint32 a function of the element's index in its parameter, the parameter's key and the step."""
    seed = mix(key.to(gl.uint32) ^ mix(step.to(gl.uint32)))
    return mix(index.to(gl.uint32) * 0x9E3779B9 + seed)


@jit
def update(p, m, v, g, grad_scale, step_size, decay, correction2, rest1, rest2, eps):
    """AdamW: new (p, m, v, root of v). rest1, rest2: 1 - beta."""
    g = g * grad_scale
    m = (g - m) * rest1 + m
    v = (g * g - v) * rest2 + v
    root = gl.sqrt_rn(v)
    change = gl.div_rn(m * step_size, root * correction2 + eps)
    change = gl.where(decay == 0.0, change, change + p * decay)
    return p - change, m, v, root


@jit
def load_moment(ptr, amax_ptr, code_ptr, table_ptr, offsets, chunks, live, ROOT: gl.constexpr):
    """FP32 moments [R, 64]. chunks [R]: their numbers in the rank's state. ROOT: FP8 holds their roots."""
    mask = gl.expand_dims(live, 1)
    x = gl.load(ptr + offsets, mask=mask, other=0.0 if amax_ptr is None else 0)
    if amax_ptr is not None:
        amax = gl.load(amax_ptr + chunks, mask=live, other=0.0)
        code = gl.load(code_ptr + chunks, mask=live, other=0).to(gl.int32)
        byte = x.to(gl.int32)
        magnitude = gl.load(table_ptr + (gl.expand_dims(code * TABLE_ROWS, 1) + (byte & 127)))
        magnitude = magnitude * gl.expand_dims(amax, 1)
        if ROOT:
            y = magnitude * magnitude
        else:
            y = gl.where(byte >= 128, -magnitude, magnitude)
    else:
        y = x.to(gl.float32)
    return y


@jit
def store_moment(ptr, amax_ptr, code_ptr, x, root, random, offsets, chunks, live, ROOT: gl.constexpr):
    """root: of x, which FP8 holds with ROOT. random: uint32 [R, 64] below 2^16; FP32 moments need none."""
    mask = gl.expand_dims(live, 1)
    if amax_ptr is not None:
        byte, amax, code = encode_fp8(root if ROOT else x, random, ROOT)
        gl.store(ptr + offsets, byte, mask=mask)
        gl.store(amax_ptr + chunks, amax, mask=live)
        gl.store(code_ptr + chunks, code.to(gl.uint8), mask=live)
    elif ptr.dtype.element_ty == gl.bfloat16:
        bits = (x.to(gl.uint32, bitcast=True) + random) >> 16
        gl.store(ptr + offsets, bits.to(gl.uint16).to(gl.bfloat16, bitcast=True), mask=mask)
    else:
        gl.store(ptr + offsets, x, mask=mask)


@jit
def encode_fp8(x, random, KEEP: gl.constexpr):
    """(bytes [R, 64], amaxes [R], codes [R]) of dynamic range expansion, rounded stochastically.

    KEEP: nothing but 0 becomes 0.
    """
    size = gl.abs(x)
    amax = gl.max(size, axis=1)
    amax = gl.where(amax < SMALLEST_AMAX, 0.0, amax)
    inverse = gl.div_rn(amax * 0.0 + 1.0, gl.maximum(amax, SMALLEST_AMAX))
    r1 = gl.min(gl.where(size == 0.0, float("inf"), size), axis=1) * inverse
    r2 = r1 * r1
    r4 = r2 * r2
    code = gl.where((r4 * r4) * 448.0 >= FLIP, 0, gl.where(r4 * 448.0 >= FLIP, 1, gl.where(r2 * 448.0 >= FLIP, 2, 3)))
    which = gl.expand_dims(code, 1)
    whole = gl.expand_dims(amax, 1)
    y = gl.where(size == whole, 1.0, size * gl.expand_dims(inverse, 1))
    y = gl.where(which < 3, y * y, y)
    y = gl.where(which < 2, y * y, y)
    y = gl.where(which < 1, y * y, y) * 448.0
    # Below 2^-6 E4M3 is a grid of 2^-9, as FP32 with 3 bits is from 2^-6 on.
    shift = gl.where(y < 0.015625, 0.015625, 0.0)
    bits = (y + shift).to(gl.uint32, bitcast=True) + random * 16
    y = (bits & 0xFFF00000).to(gl.float32, bitcast=True) - shift
    if KEEP:
        y = gl.maximum(y, 0.001953125)
    y = gl.where((size == 0.0) | (whole == 0.0), 0.0, y)
    return cast_fp8(gl.where(x < 0.0, 0.0 - y, y), 448.0), amax, code  # zeros are positive


@jit
def load_master(master_ptr, weight_ptr, offsets, weight_offsets, live, REMAINDER: gl.constexpr):
    """FP32 masters; with REMAINDER their upper halves are the BF16 weights, see `split_master`."""
    mask = gl.expand_dims(live, 1)
    low = gl.load(master_ptr + offsets, mask=mask, other=0.0 if not REMAINDER else 0)
    if REMAINDER:
        high = gl.load(weight_ptr + weight_offsets, mask=mask, other=0.0).to(gl.int16, bitcast=True).to(gl.int32)
        p = ((high << 16) + low.to(gl.int32)).to(gl.float32, bitcast=True)
    else:
        p = low
    return p


@jit
def store_master(master_ptr, weight_ptr, p, offsets, weight_offsets, live, REMAINDER: gl.constexpr):
    """The masters, and the weights rounded from them (half up with REMAINDER, else half to even), if there are any."""
    mask = gl.expand_dims(live, 1)
    if REMAINDER:
        bits = p.to(gl.uint32, bitcast=True)
        high = (bits + 0x8000) >> 16
        gl.store(master_ptr + offsets, bits.to(gl.uint16).to(gl.int16, bitcast=True), mask=mask)
        gl.store(weight_ptr + weight_offsets, high.to(gl.uint16).to(gl.bfloat16, bitcast=True), mask=mask)
    else:
        gl.store(master_ptr + offsets, p, mask=mask)
        if weight_ptr is not None:
            gl.store(weight_ptr + weight_offsets, to_compute_dtype(p, weight_ptr.dtype.element_ty), mask=mask)


@jit
def step_chunks(master_ptr, weight_ptr, m_ptr, m_amax_ptr, m_code_ptr, v_ptr, v_amax_ptr, v_code_ptr, table_ptr,
                grad_ptr, chunks, buffer_chunks, index_chunks, live, skip, key, step, grad_scale, step_size, decay,
                correction2, rest1, rest2, eps, REMAINDER: gl.constexpr, L: gl.constexpr):
    """One update of chunks [R], numbered in the rank's state, in the buffer and in the parameter. Returns masters.

    With `skip` nothing is written.
    """
    columns = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L)), 0)
    offsets = gl.expand_dims(chunks, 1).to(gl.int64) * CHUNK + columns
    buffer_offsets = gl.expand_dims(buffer_chunks, 1).to(gl.int64) * CHUNK + columns
    old = load_master(master_ptr, weight_ptr, offsets, buffer_offsets, live, REMAINDER)
    m = load_moment(m_ptr, m_amax_ptr, m_code_ptr, table_ptr, offsets, chunks, live, False)
    v = load_moment(v_ptr, v_amax_ptr, v_code_ptr, table_ptr, offsets, chunks, live, True)
    g = gl.load(grad_ptr + buffer_offsets, mask=gl.expand_dims(live, 1), other=0.0)
    p, m, v, root = update(old, m, v, g, grad_scale, step_size, decay, correction2, rest1, rest2, eps)
    live = live & (skip == 0)
    store_master(master_ptr, weight_ptr, p, offsets, buffer_offsets, live, REMAINDER)
    words = random_words(gl.expand_dims(index_chunks, 1) * CHUNK + columns, key, step)  # unused under FP32
    store_moment(m_ptr, m_amax_ptr, m_code_ptr, m, m, words & 0xFFFF, offsets, chunks, live, False)
    store_moment(v_ptr, v_amax_ptr, v_code_ptr, v, root, words >> 16, offsets, chunks, live, True)
    return gl.where(skip, old, p)
