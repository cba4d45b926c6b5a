"""AdamW on whole tiles of FP8 primary weights: from gradients to new FP8 bytes in one launch.

A program owns B rows x 128 columns of a weight, whole tiles. It updates them in strips of rows, keeps the new weights,
rounded to the compute dtype, in registers, and once it has the tiles' amaxes writes bytes. What `adamw.adamw` and
`adamw.cast` do in two launches for tiles that ranks share takes one here, and reads no master twice.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .adamw_device import CHUNK, chunk_layout, step_chunks
from .quantize_device import cast_fp8, layout_of, nonfinite_to_nan, scale_from_amax, to_compute_dtype

FIELDS, LOCAL, START, CHUNKS, INDEX, GROUP, KEY, AMAX, COLUMNS, ROWS, COLUMN_AMAX = (
    gl.constexpr(i) for i in (10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
)  # see `adamw.PieceRow`


@jit
def as_tiles(x, SR: gl.constexpr, J: gl.constexpr):
    """[2 SR, 64] chunks as [rows, 2, J tiles, columns a tile]."""
    return gl.reshape(x, (SR, 2, J, 64 // J))


@jit
def store_bytes(ptr, y, offsets, live, FMAX: gl.constexpr, SR: gl.constexpr):
    """Casts scaled values of any shape and writes them to the chunks [2 SR, 64]."""
    q = cast_fp8(gl.reshape(y, (2 * SR, 64)), FMAX)
    gl.store(ptr + offsets, gl.convert_layout(q, layout_of(offsets)), mask=gl.expand_dims(live, 1))


@jit
def store_squares(ptr, x, scale, offsets, live, FMAX: gl.constexpr, SR: gl.constexpr, J: gl.constexpr):
    """scale [2, J], or [1, 1]: of the B x B tiles across the strip."""
    x = as_tiles(x, SR, J)
    S: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(3, layout_of(x)))
    y = x * gl.expand_dims(gl.expand_dims(gl.convert_layout(scale, S), 0), 3)
    store_bytes(ptr, y, offsets, live, FMAX, SR)


@jit
def store_columns(ptr, x, scale, offsets, live, FMAX: gl.constexpr, SR: gl.constexpr):
    """scale [2, 64]: of the B x 1 tiles, a column each."""
    x = gl.reshape(x, (SR, 2, 64))
    scale = gl.convert_layout(scale, gl.SliceLayout(0, layout_of(x)))
    store_bytes(ptr, x * gl.expand_dims(scale, 0), offsets, live, FMAX, SR)


@jit
def store_rows(ptr, amax_ptr, x, index, epsilon, offsets, live, FMAX: gl.constexpr, SCALE: gl.constexpr,
               SR: gl.constexpr, J: gl.constexpr):
    """1 x B tiles: bytes, and their amaxes at `index` (chunks [2 SR]) * J."""
    x = as_tiles(x, SR, J)
    amax = gl.maximum(gl.max(gl.abs(x), axis=3), 0.0)
    scale, _ = scale_from_amax(amax, epsilon, FMAX, SCALE)
    store_bytes(ptr, x * gl.expand_dims(scale, 3), offsets, live, FMAX, SR)
    amax = gl.reshape(amax, (2 * SR, J))
    C: gl.constexpr = amax.type.layout
    j = gl.expand_dims(gl.arange(0, J, layout=gl.SliceLayout(0, C)), 0)
    index = gl.expand_dims(gl.convert_layout(index, gl.SliceLayout(1, C)), 1)
    mask = gl.expand_dims(gl.convert_layout(live, gl.SliceLayout(1, C)), 1)
    gl.store(amax_ptr + index * J + j, amax, mask=mask)


@jit
def squares_amax(largest, packed, tile_row, column0, columns, B: gl.constexpr, SR: gl.constexpr, J: gl.constexpr):
    """Amaxes of the B x B tiles across the strip, [2, J], or [1, 1] of one tile; written to `packed`."""
    amax = gl.maximum(gl.max(gl.max(as_tiles(largest, SR, J), axis=3), axis=0), 0.0)
    if B == 128:
        amax = gl.expand_dims(gl.max(amax, axis=0), 0)
    T: gl.constexpr = amax.type.layout
    N: gl.constexpr = amax.type.shape[0]
    part = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, T)), 1)
    j = gl.expand_dims(gl.arange(0, J, layout=gl.SliceLayout(0, T)), 0)
    across = (columns * 64 + B - 1) // B
    place = tile_row * across + (column0 // 2 + part + j if B == 128 else (column0 + part) * J + j)
    gl.store(packed + place, amax, mask=column0 + part + j * 0 < columns)
    return amax


@jit
def columns_amax(largest, packed, tile_row, column0, columns, down, SR: gl.constexpr):
    """Amaxes of the B x 1 tiles, [2, 64], written to `packed [K, down]`."""
    amax = gl.maximum(gl.max(gl.reshape(largest, (SR, 2, 64)), axis=0), 0.0)
    T: gl.constexpr = amax.type.layout
    part = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(1, T)), 1)
    k = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, T)), 0)
    place = ((column0 + part) * 64 + k) * down + tile_row
    gl.store(packed + place, amax, mask=column0 + part + k * 0 < columns)
    return amax


@jit
def adamw_tiles_kernel(master_ptr, m_ptr, m_amax_ptr, m_code_ptr, v_ptr, v_amax_ptr, v_code_ptr, table_ptr, grad_ptr,
                       packed_ptr, row_ptr, col_ptr, grad_scale_ptr, correction2_ptr, step_ptr, skip_ptr, rates_ptr,
                       pieces_ptr, tasks_ptr, rest1, rest2, eps, epsilon, FMAX: gl.constexpr, SCALE: gl.constexpr,
                       B: gl.constexpr, TWO_D: gl.constexpr, ROUND: gl.constexpr,
                       SR: gl.constexpr, W: gl.constexpr):
    """Tiles B x B (TWO_D), whose bytes go to `row_ptr`; or 1 x B, and B x 1 tiles whose bytes go to `col_ptr`.

    packed_ptr: FP32, receives the amaxes.
    """
    L: gl.constexpr = chunk_layout(W)
    S: gl.constexpr = B // SR
    J: gl.constexpr = 1 if B >= 64 else 64 // B
    task = tasks_ptr + gl.program_id(0).to(gl.int64) * 2
    piece = pieces_ptr + gl.load(task).to(gl.int64) * FIELDS
    tile = gl.load(task + 1)
    columns = gl.load(piece + COLUMNS)
    rows = gl.load(piece + CHUNKS) // columns
    tiles_k = (columns + 1) // 2
    row0 = tile // tiles_k * B
    column0 = tile % tiles_k * 2
    local = gl.load(piece + LOCAL)
    start = gl.load(piece + START)
    index = gl.load(piece + INDEX)
    first_row = index // columns  # of the piece in the weight
    key = gl.load(piece + KEY)
    row_amax_ptr = packed_ptr + gl.load(piece + AMAX)
    step = gl.load(step_ptr)
    grad_scale = gl.load(grad_scale_ptr)
    correction2 = gl.load(correction2_ptr)
    skip = gl.load(skip_ptr) != 0
    rates = rates_ptr + gl.load(piece + GROUP) * 2
    step_size = gl.load(rates)
    decay = gl.load(rates + 1)
    i = gl.arange(0, 2 * SR, layout=gl.SliceLayout(1, L))
    kept = ()
    largest = gl.zeros((2 * SR, 64), gl.float32, layout=L)
    for s in gl.static_range(S):
        row = row0 + s * SR + i // 2
        column = column0 + i % 2
        live = (row < rows) & (column < columns)
        chunk = row * columns + column
        p = step_chunks(master_ptr, None, m_ptr, m_amax_ptr, m_code_ptr, v_ptr, v_amax_ptr, v_code_ptr, table_ptr,
                        grad_ptr, local + chunk, start + chunk, index + chunk, live, skip, key, step, grad_scale,
                        step_size, decay, correction2, rest1, rest2, eps, False, L)
        w = to_compute_dtype(gl.where(gl.expand_dims(live, 1), p, 0.0), ROUND)
        largest = gl.maximum(largest, gl.abs(nonfinite_to_nan(w.to(gl.float32))))
        kept = kept + (w,)
    in_chunk = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L)), 0)
    tile_row = (first_row + row0) // B
    if TWO_D:
        amax = squares_amax(largest, row_amax_ptr, tile_row, column0, columns, B, SR, J)
    else:
        down = (gl.load(piece + ROWS) + B - 1) // B
        amax = columns_amax(largest, packed_ptr + gl.load(piece + COLUMN_AMAX), tile_row, column0, columns, down, SR)
    scale, _ = scale_from_amax(amax, epsilon, FMAX, SCALE)
    for s in gl.static_range(S):
        row = row0 + s * SR + i // 2
        column = column0 + i % 2
        live = (row < rows) & (column < columns)
        chunk = row * columns + column
        offsets = gl.expand_dims(start + chunk, 1).to(gl.int64) * CHUNK + in_chunk
        x = nonfinite_to_nan(kept[s].to(gl.float32))
        if TWO_D:
            store_squares(row_ptr, x, scale, offsets, live, FMAX, SR, J)
        else:
            store_columns(col_ptr, x, scale, offsets, live, FMAX, SR)
            store_rows(row_ptr, row_amax_ptr, x, index + chunk, epsilon, offsets, live, FMAX, SCALE, SR, J)
