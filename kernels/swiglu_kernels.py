"""The kernels of `swiglu_quantize`: one register tile a program.

Where rows lie by expert and each has a scale of its own (`ends_ptr`), scales and amaxes are vectors, and a tile takes
its expert's: tiles lie in one expert, since those begin at multiples of 128 rows. Tiles of nobody's rows are left out.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .quantize_device import (
    decode_scale,
    dequantize_tile,
    expert_of,
    farther,
    load_or_zero,
    load_row_scales,
    round_through,
    rounded,
    tile_indices,
    tile_layout,
    tile_mask,
    tile_offsets,
    tile_origin,
    to_compute_dtype,
    to_f32,
    waiting_layout,
)
from .quantize_emit import (
    emit,
    emit_part,
    emit_rest,
    emit_rowwise,
    expert_scale,
    record_amax,
    store_expert_scales,
    tensor_scale,
)


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
def load_half(source, rows, cols, half, f0, T, F, X_FORM: gl.constexpr, EVEN: gl.constexpr):
    """(values or bytes, their scales or 0) of columns `cols` of a half of fc1's output [T, 2f].

    source: (pointer, scale pointer, stride of rows, strides of the scales' rows and blocks). half: the half's first
    column in [T, 2f]. X_FORM: (width of the bytes' tiles or 0, whether the second half starts with a tile, dtype).
    """
    x_ptr, scale_ptr, stride_t, scale_stride_t, scale_stride_b = source
    BLOCK: gl.constexpr = X_FORM[0]
    mask = (rows < T)[:, None] & (cols < F)[None, :]
    cols += half
    x = load_or_zero(x_ptr + tile_offsets(rows, cols, stride_t, 1), mask, EVEN)
    if BLOCK == 0:
        scale = 0
    elif X_FORM[1]:
        scale = load_row_scales(scale_ptr, x, rows, rows < T, f0 + half, 2 * F, scale_stride_t, scale_stride_b, BLOCK)
    else:
        scale = gl.load(scale_ptr + tile_offsets(rows, cols // BLOCK, scale_stride_t, scale_stride_b), mask=mask,
                        other=0)
    return x, scale


@jit
def decode_half(x, scale, X_FORM: gl.constexpr):
    """FP32 values of what `load_half` returns; those of bytes rounded to the compute dtype."""
    BLOCK: gl.constexpr = X_FORM[0]
    if BLOCK == 0:
        y = to_f32(x)
    elif X_FORM[1]:
        y = to_f32(to_compute_dtype(dequantize_tile(x, scale, BLOCK), X_FORM[2]))
    else:
        y = to_f32(to_compute_dtype(x.to(gl.float32) * decode_scale(scale), X_FORM[2]))
    return y


@jit
def load_halves(source, t0, f0, T, F, X_FORM: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr,
                ROWS: gl.constexpr, BLOCK_K: gl.constexpr):
    """Gate and up of ROWS rows, as `load_half` returns them."""
    rows, cols = tile_indices(t0, f0, ROWS, BLOCK_K, LAYOUT)
    gate, gate_scale = load_half(source, rows, cols, 0, f0, T, F, X_FORM, EVEN)
    up, up_scale = load_half(source, rows, cols, F, f0, T, F, X_FORM, EVEN)
    return gate, gate_scale, up, up_scale


@jit
def load_part(ptr, t0, f0, T, F, stride_t, EVEN: gl.constexpr, LAYOUT: gl.constexpr, ROWS: gl.constexpr,
              BLOCK_K: gl.constexpr):
    rows, cols = tile_indices(t0, f0, ROWS, BLOCK_K, LAYOUT)
    return load_or_zero(ptr + tile_offsets(rows, cols, stride_t, 1), tile_mask(rows, cols, T, F), EVEN)


@jit
def swiglu_part(halves, weights_ptr, y_ptr, keep, keep_epsilon, t0, f0, T, F, X_FORM: gl.constexpr,
                KEEP_SPEC: gl.constexpr, EVEN: gl.constexpr, ROWS: gl.constexpr, BLOCK_K: gl.constexpr,
                LAYOUT: gl.constexpr):
    """ROWS rows of SwiGLU's output as `emit` takes them; also written to y_ptr where given.

    keep: where fc1's output goes as FP8 bytes (nowhere if its data pointer is None), as `emit_rowwise` takes it.
    """
    dtype: gl.constexpr = X_FORM[2]
    rows, cols = tile_indices(t0, f0, ROWS, BLOCK_K, LAYOUT)
    gate = decode_half(halves[0], halves[1], X_FORM)
    up = decode_half(halves[2], halves[3], X_FORM)
    if keep[0] is not None:
        emit_rowwise(round_through(gate, dtype), t0, f0, keep, keep_epsilon, T, 2 * F, KEEP_SPEC, EVEN)
        emit_rowwise(round_through(up, dtype), t0, f0 + F, keep, keep_epsilon, T, 2 * F, KEEP_SPEC, EVEN)
    y = swiglu(gate, up)
    if weights_ptr is not None:
        y *= load_or_zero(weights_ptr + rows, rows < T, EVEN)[:, None]
    if y_ptr is not None:
        gl.store(y_ptr + tile_offsets(rows, cols, F, 1), to_compute_dtype(y, dtype), mask=tile_mask(rows, cols, T, F))
    return round_through(y, dtype)


@jit
def swiglu_kernel(x_ptr, x_scale_ptr, stride_t, x_scale_stride_t, x_scale_stride_b, weights_ptr, y_ptr, keep_ptr,
                  keep_scale_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, scale_ptr, amax_ptr, record_ptr, T, F,
                  keep_scale_ld, row_scale_ld, col_scale_ld, keep_epsilon, epsilon, ends_ptr, experts,
                  EXPERTS: gl.constexpr, X_BLOCK: gl.constexpr, X_ALIGNED: gl.constexpr, DTYPE: gl.constexpr,
                  KEEP_SPEC: gl.constexpr, SPEC: gl.constexpr, EVEN: gl.constexpr, ROWS: gl.constexpr,
                  BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """ROWS: 0, or how many rows of the tile are made at a time; for the columns' sake they then wait in shared
    memory."""
    dtype: gl.constexpr = gl.bfloat16 if DTYPE == "bf16" else gl.float16
    X_FORM: gl.constexpr = (X_BLOCK, X_ALIGNED, dtype)
    t0, f0 = tile_origin(gl.program_id(0), F, BLOCK_M, BLOCK_K)
    source = (x_ptr, x_scale_ptr, stride_t, x_scale_stride_t, x_scale_stride_b)
    keep = (keep_ptr, keep_scale_ptr, None, keep_scale_ld)
    row = (row_ptr, row_scale_ptr, None, row_scale_ld)
    col = (col_ptr, col_scale_ptr, None, col_scale_ld)
    STEP: gl.constexpr = BLOCK_M if ROWS == 0 else ROWS
    if ROWS != 0 and col_ptr is not None:
        ys = gl.allocate_shared_memory(rounded(dtype), (BLOCK_M, BLOCK_K), waiting_layout(BLOCK_M, BLOCK_K))
    L: gl.constexpr = tile_layout(STEP, BLOCK_K, R, C, W)
    if record_ptr is not None:
        largest = gl.zeros((STEP, BLOCK_K), rounded(dtype), layout=L)
    coming = load_halves(source, t0, f0, T, F, X_FORM, EVEN, L, STEP, BLOCK_K)
    expert = 0
    if ends_ptr is not None:
        if gl.program_id(0) == 0:
            store_scales(scale_ptr, amax_ptr, epsilon, row, col, experts, SPEC, EXPERTS, W)
        expert = expert_of(ends_ptr, t0, experts, EXPERTS, W)
        if expert >= experts:
            return
    if ends_ptr is None:
        scale = tensor_scale(scale_ptr, amax_ptr, epsilon, row, col, t0 + f0 == 0, SPEC)
    else:
        scale = expert_scale(scale_ptr, amax_ptr, epsilon, expert, SPEC)
    for i in gl.static_range(0, BLOCK_M, STEP):
        halves = coming
        if i + STEP < BLOCK_M:  # on their way while these rows are worked on
            coming = load_halves(source, t0 + i + STEP, f0, T, F, X_FORM, EVEN, L, STEP, BLOCK_K)
        y = swiglu_part(halves, weights_ptr, y_ptr, keep, keep_epsilon, t0 + i, f0, T, F, X_FORM, KEEP_SPEC, EVEN,
                        STEP, BLOCK_K, L)
        if record_ptr is not None:
            largest = farther(largest, y)
        if ROWS == 0:
            emit(y, t0, f0, row, col, scale, epsilon, T, F, SPEC, EVEN)
        else:
            emit_part(y, t0 + i, f0, row, scale, epsilon, T, F, SPEC, EVEN)
            if col_ptr is not None:
                ys.slice(i, ROWS).store(y)
    if ROWS != 0 and col_ptr is not None:
        emit_rest(ys, t0, f0, col, scale, epsilon, T, F, SPEC, EVEN)
    if record_ptr is not None:
        record_amax(record_ptr + expert, largest)


@jit
def walk(T, F, WALK: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr):
    """(first, last + 1, step) of a program's tiles: every num_programs-th, or all of WALK rows, which lie in one
    expert."""
    tiles_f = gl.cdiv(F, BLOCK_K)
    tiles = gl.cdiv(T, BLOCK_M) * tiles_f
    if WALK == 0:
        first, last, step = gl.program_id(0), tiles, gl.num_programs(0)
    else:
        first = gl.program_id(0) * (WALK // BLOCK_M) * tiles_f
        last, step = gl.minimum(first + WALK // BLOCK_M * tiles_f, tiles), 1
    return first, last, step


@jit
def store_scales(given_ptr, amax_ptr, epsilon, row, col, experts, SPEC: gl.constexpr, EXPERTS: gl.constexpr,
                 W: gl.constexpr):
    """The inverses of all experts' scales, for the copies that there are."""
    if row[0] is not None:
        store_expert_scales(given_ptr, amax_ptr, epsilon, row[1], experts, SPEC, EXPERTS, W)
    elif col[0] is not None:
        store_expert_scales(given_ptr, amax_ptr, epsilon, col[1], experts, SPEC, EXPERTS, W)


@jit
def swiglu_amax_kernel(x_ptr, x_scale_ptr, stride_t, x_scale_stride_t, x_scale_stride_b, weights_ptr, record_ptr, T, F,
                       ends_ptr, experts, EXPERTS: gl.constexpr, WALK: gl.constexpr, X_BLOCK: gl.constexpr,
                       X_ALIGNED: gl.constexpr, DTYPE: gl.constexpr, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                       BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """The first pass under current scaling: amax of SwiGLU's output, a walk over tiles; WALK: see `walk`."""
    dtype: gl.constexpr = gl.bfloat16 if DTYPE == "bf16" else gl.float16
    X_FORM: gl.constexpr = (X_BLOCK, X_ALIGNED, dtype)
    KEEP: gl.constexpr = (448.0, 0, 0)
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    source = (x_ptr, x_scale_ptr, stride_t, x_scale_stride_t, x_scale_stride_b)
    largest = gl.zeros((BLOCK_M, BLOCK_K), rounded(dtype), layout=L)
    first, last, step = walk(T, F, WALK, BLOCK_M, BLOCK_K)
    t0, f0 = tile_origin(first, F, BLOCK_M, BLOCK_K)
    coming = load_halves(source, t0, f0, T, F, X_FORM, EVEN, L, BLOCK_M, BLOCK_K)
    expert = 0
    if ends_ptr is not None:
        expert = expert_of(ends_ptr, t0, experts, EXPERTS, W)
        if expert >= experts:
            return
    for tile in range(first, last, step):
        halves = coming
        t0, f0 = tile_origin(tile, F, BLOCK_M, BLOCK_K)
        t1, f1 = tile_origin(gl.minimum(tile + step, last - 1), F, BLOCK_M, BLOCK_K)
        coming = load_halves(source, t1, f1, T, F, X_FORM, EVEN, L, BLOCK_M, BLOCK_K)
        y = swiglu_part(halves, weights_ptr, None, (None, None, None, 0), 0.0, t0, f0, T, F, X_FORM, KEEP, EVEN,
                        BLOCK_M, BLOCK_K, L)
        largest = farther(largest, y)
    record_amax(record_ptr + expert, largest)


@jit
def swiglu_grad_amax_kernel(dy_ptr, x_ptr, x_scale_ptr, stride_t, x_scale_stride_t, x_scale_stride_b, weights_ptr,
                            record_ptr, T, F, stride_dy, ends_ptr, experts, EXPERTS: gl.constexpr,
                            WALK: gl.constexpr, X_BLOCK: gl.constexpr, X_ALIGNED: gl.constexpr, DTYPE: gl.constexpr,
                            EVEN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr,
                            C: gl.constexpr, W: gl.constexpr):
    """The same of the gradient: amax of d(fc1 output)."""
    dtype: gl.constexpr = gl.bfloat16 if DTYPE == "bf16" else gl.float16
    X_FORM: gl.constexpr = (X_BLOCK, X_ALIGNED, dtype)
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    source = (x_ptr, x_scale_ptr, stride_t, x_scale_stride_t, x_scale_stride_b)
    largest = gl.zeros((BLOCK_M, BLOCK_K), rounded(dtype), layout=L)
    first, last, step = walk(T, F, WALK, BLOCK_M, BLOCK_K)
    t0, f0 = tile_origin(first, F, BLOCK_M, BLOCK_K)
    coming = load_halves(source, t0, f0, T, F, X_FORM, EVEN, L, BLOCK_M, BLOCK_K)
    coming_dy = load_part(dy_ptr, t0, f0, T, F, stride_dy, EVEN, L, BLOCK_M, BLOCK_K)
    expert = 0
    if ends_ptr is not None:
        expert = expert_of(ends_ptr, t0, experts, EXPERTS, W)
        if expert >= experts:
            return
    for tile in range(first, last, step):
        halves = coming
        dy = to_f32(coming_dy)
        rows, _ = tile_indices(tile_origin(tile, F, BLOCK_M, BLOCK_K)[0], 0, BLOCK_M, BLOCK_K, L)
        t1, f1 = tile_origin(gl.minimum(tile + step, last - 1), F, BLOCK_M, BLOCK_K)
        coming = load_halves(source, t1, f1, T, F, X_FORM, EVEN, L, BLOCK_M, BLOCK_K)
        coming_dy = load_part(dy_ptr, t1, f1, T, F, stride_dy, EVEN, L, BLOCK_M, BLOCK_K)
        if weights_ptr is not None:
            dy *= load_or_zero(weights_ptr + rows, rows < T, EVEN)[:, None]
        gate = decode_half(halves[0], halves[1], X_FORM)
        d_gate, d_up, _ = swiglu_grad(dy, gate, decode_half(halves[2], halves[3], X_FORM))
        largest = farther(largest, farther(round_through(d_gate, dtype), round_through(d_up, dtype)))
    record_amax(record_ptr + expert, largest)


@jit
def swiglu_grad_kernel(dy_ptr, x_ptr, x_scale_ptr, stride_t, x_scale_stride_t, x_scale_stride_b, weights_ptr,
                       partial_ptr, dx_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, scale_ptr, amax_ptr,
                       record_ptr, y_col_ptr, y_col_scale_ptr, y_scale_ptr, y_amax_ptr, T, F, stride_dy, row_scale_ld,
                       col_scale_ld, y_scale_ld, epsilon, y_epsilon, ends_ptr, experts, EXPERTS: gl.constexpr,
                       X_BLOCK: gl.constexpr, X_ALIGNED: gl.constexpr, DTYPE: gl.constexpr, SPEC: gl.constexpr,
                       Y_SPEC: gl.constexpr, EVEN: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
                       BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Three results of one tile are made ROWS rows at a time; for the columns' sake they wait in shared memory.

    A tile of one half is a tile of the whole [T, 2f] only if f is a multiple of the tile's width; otherwise the host
    asks for dx alone.
    """
    dtype: gl.constexpr = gl.bfloat16 if DTYPE == "bf16" else gl.float16
    L: gl.constexpr = tile_layout(ROWS, BLOCK_K, R, C, W)
    WAITING: gl.constexpr = waiting_layout(BLOCK_M, BLOCK_K)
    t0, f0 = tile_origin(gl.program_id(0), F, BLOCK_M, BLOCK_K)
    row = (row_ptr, row_scale_ptr, None, row_scale_ld)
    col = (col_ptr, col_scale_ptr, None, col_scale_ld)
    y_col = (y_col_ptr, y_col_scale_ptr, None, y_scale_ld)
    source = (x_ptr, x_scale_ptr, stride_t, x_scale_stride_t, x_scale_stride_b)
    X_FORM: gl.constexpr = (X_BLOCK, X_ALIGNED, dtype)
    if col_ptr is not None:
        d_gates = gl.allocate_shared_memory(rounded(dtype), (BLOCK_M, BLOCK_K), WAITING)
        d_ups = gl.allocate_shared_memory(rounded(dtype), (BLOCK_M, BLOCK_K), WAITING)
    if y_col_ptr is not None:
        ys = gl.allocate_shared_memory(rounded(dtype), (BLOCK_M, BLOCK_K), WAITING)
    coming = load_halves(source, t0, f0, T, F, X_FORM, EVEN, L, ROWS, BLOCK_K)
    coming_dy = load_part(dy_ptr, t0, f0, T, F, stride_dy, EVEN, L, ROWS, BLOCK_K)
    expert = 0
    if ends_ptr is not None:
        if gl.program_id(0) == 0:
            store_scales(scale_ptr, amax_ptr, epsilon, row, col, experts, SPEC, EXPERTS, W)
            store_scales(y_scale_ptr, y_amax_ptr, y_epsilon, y_col, y_col, experts, Y_SPEC, EXPERTS, W)
        expert = expert_of(ends_ptr, t0, experts, EXPERTS, W)
        if expert >= experts:
            return
    if ends_ptr is None:
        scale = tensor_scale(scale_ptr, amax_ptr, epsilon, row, col, t0 + f0 == 0, SPEC)
    else:
        scale = expert_scale(scale_ptr, amax_ptr, epsilon, expert, SPEC)
    if record_ptr is not None:
        largest = gl.zeros((ROWS, BLOCK_K), rounded(dtype), layout=L)
    for i in gl.static_range(0, BLOCK_M, ROWS):
        halves = coming
        dy = to_f32(coming_dy)
        if i + ROWS < BLOCK_M:  # on their way while these rows are worked on
            coming = load_halves(source, t0 + i + ROWS, f0, T, F, X_FORM, EVEN, L, ROWS, BLOCK_K)
            coming_dy = load_part(dy_ptr, t0 + i + ROWS, f0, T, F, stride_dy, EVEN, L, ROWS, BLOCK_K)
        rows, cols = tile_indices(t0 + i, f0, ROWS, BLOCK_K, L)
        mask = tile_mask(rows, cols, T, F)
        gate = decode_half(halves[0], halves[1], X_FORM)
        up = decode_half(halves[2], halves[3], X_FORM)
        if weights_ptr is not None:
            weights = load_or_zero(weights_ptr + rows, rows < T, EVEN)[:, None]
            d_gate, d_up, y = swiglu_grad(dy * weights, gate, up)
            if partial_ptr is not None:
                gl.store(partial_ptr + (f0 // BLOCK_K) * T + rows, gl.sum(dy * y, axis=1), mask=rows < T)
            y *= weights
        else:
            d_gate, d_up, y = swiglu_grad(dy, gate, up)
        if dx_ptr is not None:
            gl.store(dx_ptr + tile_offsets(rows, cols, 2 * F, 1), to_compute_dtype(d_gate, dtype), mask=mask)
            gl.store(dx_ptr + tile_offsets(rows, cols + F, 2 * F, 1), to_compute_dtype(d_up, dtype), mask=mask)
        d_gate = round_through(d_gate, dtype)
        d_up = round_through(d_up, dtype)
        if record_ptr is not None:
            largest = farther(largest, farther(d_gate, d_up))
        emit_part(d_gate, t0 + i, f0, row, scale, epsilon, T, 2 * F, SPEC, EVEN)
        emit_part(d_up, t0 + i, f0 + F, row, scale, epsilon, T, 2 * F, SPEC, EVEN)
        if col_ptr is not None:
            d_gates.slice(i, ROWS).store(d_gate)
            d_ups.slice(i, ROWS).store(d_up)
        if y_col_ptr is not None:
            ys.slice(i, ROWS).store(round_through(y, dtype))
    if record_ptr is not None:
        record_amax(record_ptr + expert, largest)
    if y_col_ptr is not None:
        if ends_ptr is None:
            y_scale = tensor_scale(y_scale_ptr, y_amax_ptr, y_epsilon, y_col, y_col, t0 + f0 == 0, Y_SPEC)
        else:
            y_scale = expert_scale(y_scale_ptr, y_amax_ptr, y_epsilon, expert, Y_SPEC)
        emit_rest(ys, t0, f0, y_col, y_scale, y_epsilon, T, F, Y_SPEC, EVEN)
    if col_ptr is not None:
        emit_rest(d_gates, t0, f0, col, scale, epsilon, T, 2 * F, SPEC, EVEN)
        emit_rest(d_ups, t0, f0 + F, col, scale, epsilon, T, 2 * F, SPEC, EVEN)
