"""What quantization did to one operand, on the GPU: `fp8/operand_stats.py`'s numbers in two launches an operand.

`look_kernel` goes over the operand's scales (an exact histogram of their bits), over all of its high-precision elements
(the bits of the largest magnitude), and over the sampled blocks (FP64 sums of squares, counts); each program leaves its
own part. `finish_kernel`, one program, adds the parts to what is known of the operand, in a fixed order. Only counts of
the histogram are added by atomics, of integers: so the same operand gives the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

PROGRAMS = 264  # at most: twice a Hopper's multiprocessors. On every GPU alike, since sums' last bits follow from it
FINISHED = triton.next_power_of_2(PROGRAMS)
ELEMENTS, SCALES = 16384, 1024  # that a program takes at once
SAMPLE_ROWS, SAMPLE_COLUMNS = 8, 128
BLOCK_ROWS = tl.constexpr(128)  # of a sampled block
PARTS = 9  # FP64 numbers of a program: six sums; the largest bits of values and of scales, the smallest negated

INFINITE = tl.constexpr(0x7F800000)
MANTISSA = tl.constexpr(0x7FFFFF)
# The smallest mantissas of numbers that are at least 2^(1/4), 2^(2/4), 2^(3/4).
QUARTER, HALF, THREE_QUARTERS = tl.constexpr(1587185), tl.constexpr(3474676), tl.constexpr(5719293)


class Row(NamedTuple):
    """What is known of one operand: FP64 [6], FP32 [3], int64 [bins]; see `OperandStats`."""

    sums: Tensor
    largest: Tensor
    histogram: Tensor


@triton.jit
def scale_bits(scale):
    """int32: the FP32 bits of scales, stored as FP32 or as E8M0 codes."""
    if scale.dtype == tl.uint8:
        code = scale.to(tl.int32)
        bits = tl.where(code == 255, 0x7FC00000, tl.where(code == 0, 0x00400000, code << 23))
    else:
        bits = scale.to(tl.int32, bitcast=True)
    return bits


@triton.jit
def bin_of(bits, BINS: tl.constexpr):
    """Which quarter of an octave scales lie in; the first begins at 2^-128. From bits: exact, subnormals too."""
    shift = tl.where(bits < 0x400000, 2, tl.where(bits < 0x800000, 1, 0))
    mantissa = (bits << shift) & MANTISSA
    exponent = tl.where(shift > 0, 1 - shift, bits >> 23)
    quarter = (mantissa >= QUARTER).to(tl.int32) + (mantissa >= HALF).to(tl.int32)
    place = (exponent + 1) * 4 + quarter + (mantissa >= THREE_QUARTERS).to(tl.int32)
    return tl.where(bits < 0x200000, 0, tl.minimum(place, BINS - 1))


@triton.jit
def differences(x, q, scale, mask, FMAX: tl.constexpr, LIMIT: tl.constexpr):
    """Elementwise `underflow, saturated, signal, noise, compared`: FP32 x, stored as q under FP32 scales."""
    finite = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITE
    value = tl.where(finite, q * scale, 0.0)
    x = tl.where(finite, x, 0.0)
    exact, stored = x.to(tl.float64), value.to(tl.float64)
    beyond = tl.abs(exact) * FMAX > tl.abs(stored) * LIMIT  # both products are exact
    error = exact - stored
    saturated = (tl.abs(q) == FMAX) & beyond & mask
    underflow = (x != 0.0) & (value == 0.0) & mask
    return (underflow.to(tl.int32), saturated.to(tl.int32), exact * exact, tl.where(mask, error * error, 0.0),
            (finite & mask).to(tl.int32))  # fmt: skip


@triton.jit
def store_sums(partial, elements, underflow, saturated, signal, noise, compared):
    """A program's own six; each argument but `elements`, a number, is added up."""
    place = partial + tl.program_id(0)
    step = tl.num_programs(0)
    tl.store(place, elements.to(tl.float64))
    tl.store(place + step, tl.sum(underflow).to(tl.float64))
    tl.store(place + step * 2, tl.sum(saturated).to(tl.float64))
    tl.store(place + step * 3, tl.sum(signal))
    tl.store(place + step * 4, tl.sum(noise))
    tl.store(place + step * 5, tl.sum(compared).to(tl.float64))


@triton.jit
def see_scales(scale, histogram, partial, outer, inner, outer_stride, inner_stride, BINS: tl.constexpr,
               SCALES: tl.constexpr):  # fmt: skip
    """Adds this program's scales to the histogram; leaves their largest bits, and the smallest ones negated."""
    index, bins = tl.arange(0, SCALES), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    high = tl.zeros([SCALES], tl.int32)
    low = tl.full([SCALES], 0x7FFFFFFF, tl.int32)
    pieces = tl.cdiv(inner, SCALES)
    for t in range(tl.program_id(0), outer * pieces, tl.num_programs(0)):
        start = t % pieces * SCALES
        live = index < inner - start
        first = scale + (t // pieces).to(tl.int64) * outer_stride + start.to(tl.int64) * inner_stride
        place = first + index.to(tl.int64) * inner_stride
        bits = tl.where(live, scale_bits(tl.load(place, mask=live, other=0)), 0)
        high = tl.maximum(high, bits)
        low = tl.minimum(low, tl.where(live, bits, 0x7FFFFFFF))
        dead = SCALES - tl.minimum(inner - start, SCALES)  # they went into the first bin
        counts += tl.histogram(bin_of(bits, BINS), BINS) - tl.where(bins == 0, dead, 0).to(tl.int32)
    tl.atomic_add(histogram + bins, counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    place = partial + tl.program_id(0)
    tl.store(place + tl.num_programs(0) * 7, tl.max(high, 0).to(tl.float64))
    tl.store(place + tl.num_programs(0) * 8, -tl.min(low, 0).to(tl.float64))


@triton.jit
def see_amax(x, partial, outer, inner, outer_stride, ELEMENTS: tl.constexpr):
    """Leaves the bits of the largest magnitude; NaN's are the largest of all."""
    index = tl.arange(0, ELEMENTS)
    largest = tl.zeros([ELEMENTS], tl.int32)
    pieces = tl.cdiv(inner, ELEMENTS)
    for t in range(tl.program_id(0), outer * pieces, tl.num_programs(0)):
        start = t % pieces * ELEMENTS
        first = x + (t // pieces).to(tl.int64) * outer_stride + start
        value = tl.load(first + index, mask=index < inner - start, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(partial + tl.num_programs(0) * 6 + tl.program_id(0), tl.max(largest, 0).to(tl.float64))


@triton.jit(do_not_specialize=["scale_outer", "scale_inner", "x_outer", "rows", "blocks", "wanted"])
def look_kernel(data, scale, x, histogram, partial, scale_outer, scale_inner, scale_outer_stride, scale_inner_stride,
                x_outer, x_inner, x_outer_stride, rows, width, blocks, wanted, x_stride_r, x_stride_c, data_stride_r,
                scale_stride_r, scale_stride_c, FMAX: tl.constexpr, LIMIT: tl.constexpr, TILE_R: tl.constexpr,
                TILE_C: tl.constexpr, BINS: tl.constexpr, ELEMENTS: tl.constexpr, SCALES: tl.constexpr,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """x None: scales alone. Of x, `rows` rows are compared: `wanted` blocks of 128 out of `blocks`; equal: all rows.

    Tiles of TILE_R x TILE_C, TILE_C = 0: one scale for all.
    """
    see_scales(scale, histogram, partial, scale_outer, scale_inner, scale_outer_stride, scale_inner_stride, BINS,
               SCALES)  # fmt: skip
    if x is not None:
        see_amax(x, partial, x_outer, x_inner, x_outer_stride, ELEMENTS)
        underflow = tl.zeros([ROWS, COLUMNS], tl.int32)
        saturated = tl.zeros([ROWS, COLUMNS], tl.int32)
        compared = tl.zeros([ROWS, COLUMNS], tl.int32)
        signal = tl.zeros([ROWS, COLUMNS], tl.float64)
        noise = tl.zeros([ROWS, COLUMNS], tl.float64)
        across = tl.cdiv(width, COLUMNS)
        for t in range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, tl.num_programs(0)):
            r = t // across * ROWS
            first = (r // BLOCK_ROWS).to(tl.int64) * blocks // wanted * BLOCK_ROWS + r % BLOCK_ROWS
            row = (first + tl.arange(0, ROWS))[:, None]
            column = (t % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]  # strides may be long
            mask = (tl.arange(0, ROWS) < rows - r)[:, None] & (column < width)
            value = tl.load(x + row * x_stride_r + column * x_stride_c, mask=mask, other=0.0).to(tl.float32)
            q = tl.load(data + row * data_stride_r + column, mask=mask, other=0.0).to(tl.float32)
            if TILE_C == 0:
                s = tl.load(scale)
            else:
                places = row // TILE_R * scale_stride_r + column // TILE_C * scale_stride_c
                s = tl.load(scale + places, mask=mask, other=0)
            s = scale_bits(s).to(tl.float32, bitcast=True)
            u, o, a, b, n = differences(value, q, s, mask, FMAX, LIMIT)
            underflow += u
            saturated += o
            signal += a
            noise += b
            compared += n
        elements = tl.where(tl.program_id(0) == 0, rows.to(tl.int64) * width, 0)
        store_sums(partial, elements, underflow, saturated, signal, noise, compared)


@triton.jit(do_not_specialize=["start", "end"])
def errors_kernel(data, scale, x, partial, count, start, end, width, scale_stride_r, scale_stride_c,
                  FMAX: tl.constexpr, LIMIT: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """The sums of elements `start` to `end`, flat, of contiguous data; x: `count` values, those elements'."""
    index = tl.arange(0, BLOCK)
    underflow = tl.zeros([BLOCK], tl.int32)
    saturated = tl.zeros([BLOCK], tl.int32)
    compared = tl.zeros([BLOCK], tl.int32)
    signal = tl.zeros([BLOCK], tl.float64)
    noise = tl.zeros([BLOCK], tl.float64)
    for t in range(tl.program_id(0), tl.cdiv(end - start, BLOCK), tl.num_programs(0)):
        mask = index < count - t * BLOCK
        place = start + t * BLOCK + index
        value = tl.load(x + t * BLOCK + index, mask=mask, other=0.0).to(tl.float32)
        q = tl.load(data + place, mask=mask, other=0.0).to(tl.float32)
        if TILE_C == 0:
            s = tl.load(scale)
        else:
            places = place // width // TILE_R * scale_stride_r + place % width // TILE_C * scale_stride_c
            s = tl.load(scale + places, mask=mask, other=0)
        u, o, a, b, n = differences(value, q, scale_bits(s).to(tl.float32, bitcast=True), mask, FMAX, LIMIT)
        underflow += u
        saturated += o
        signal += a
        noise += b
        compared += n
    elements = tl.where(tl.program_id(0) == 0, count, 0)
    store_sums(partial, elements, underflow, saturated, signal, noise, compared)


@triton.jit
def finish_kernel(partial, sums, largest, programs, FMAX: tl.constexpr, VALUES: tl.constexpr, SCALED: tl.constexpr,
                  N: tl.constexpr):  # fmt: skip
    """Adds all programs' parts to a row: of values, if there were any, and of scales."""
    index = tl.arange(0, N)
    mask = index < programs
    if VALUES:
        for column in tl.static_range(6):
            part = tl.load(partial + programs * column + index, mask=mask, other=0.0)
            tl.store(sums + column, tl.load(sums + column) + tl.sum(part, 0))
    if SCALED:
        high_bits = tl.max(tl.load(partial + programs * 7 + index, mask=mask, other=0.0), 0).to(tl.int32)
        low_bits = -tl.max(tl.load(partial + programs * 8 + index, mask=mask, other=-2147483647.0), 0)
        high = high_bits.to(tl.float32, bitcast=True)
        low = low_bits.to(tl.int32).to(tl.float32, bitcast=True)
        if VALUES:
            bits = tl.max(tl.load(partial + programs * 6 + index, mask=mask, other=0.0), 0).to(tl.int32)
            amax = tl.minimum(bits, INFINITE).to(tl.float32, bitcast=True)  # NaN: infinite
        else:
            amax = high * FMAX  # of a current scale, that is the amax; of one from a history, a bound
        raise_to(largest, amax)
        raise_to(largest + 1, high)
        raise_to(largest + 2, -low)


@triton.jit
def raise_to(place, value):
    tl.store(place, tl.maximum(tl.load(place), value, propagate_nan=tl.PropagateNan.ALL))


def supports(x: Tensor | None, stored: Any) -> bool:
    """Whether `look` takes them, whatever their device."""
    data, scale_inv = stored.data, stored.scale_inv
    if data.dim() != 2 or (data.stride(1) != 1 and data.shape[1] > 1):
        return False
    if scale_inv.dtype not in (torch.float32, torch.float8_e8m0fnu):
        return False
    return x is None or (x.dtype in (torch.bfloat16, torch.float16, torch.float32) and _lines(x) is not None)


def look(row: Row, x: Tensor | None, stored: Any, limit: float, sampled: int) -> None:
    """Adds an operand to a row.

    stored: a `QuantizedStorage`, not grouped, with at least one scale. x: what was quantized, in the orientation of
    `stored.data`, or None. limit: what has saturated is larger. sampled: elements that are compared, at most.
    """
    data, tile, scale, fmax = stored.data, stored.tile, _readable(stored.scale_inv), stored.format.fmax
    (rows, width), bins = data.shape, row.histogram
    programs = _programs(scale.numel(), SCALES) if x is None else _programs(max(x.numel(), scale.numel() * 8), ELEMENTS)
    partial = torch.empty(PARTS, programs, dtype=torch.float64, device=data.device)

    def work_out() -> tuple:
        blocks, wanted = rows // BLOCK_ROWS.value, max(1, sampled // max(1, BLOCK_ROWS.value * width))
        sizes = (rows, width, 1, 1) if blocks <= wanted else (wanted * BLOCK_ROWS.value, width, blocks, wanted)
        strides = (*((0, 0) if x is None else x.stride()), data.stride(0), *_scale_strides(scale, tile))
        lines = (0, 0, 0) if x is None else _lines(x)
        return (
            (programs,),
            (data, scale, x, bins, partial, *_scale_lines(scale), *lines, *sizes, *strides),
            _constants(fmax, limit, tile) | {
                "BINS": bins.numel(), "ELEMENTS": ELEMENTS, "SCALES": SCALES, "ROWS": SAMPLE_ROWS,
                "COLUMNS": SAMPLE_COLUMNS},
        )  # fmt: skip

    facts = (data.shape, data.stride(), scale.shape, scale.stride(), tile.kind, tile.block, sampled, programs)
    launch(look_kernel, facts if x is None else (*facts, x.stride()), (data, scale, x, bins, partial), work_out)
    _finish(row, partial, fmax, x is not None, True)


def look_at_errors(row: Row, x: Tensor, stored: Any, limit: float, start: int) -> None:
    """Adds the sums of elements `start` and on, flat, of contiguous `stored.data`; x: those elements, contiguous."""
    data, tile, scale, fmax = stored.data, stored.tile, _readable(stored.scale_inv), stored.format.fmax
    count, width = x.numel(), data.shape[1]
    programs = _programs(count, ELEMENTS)
    partial = torch.empty(PARTS, programs, dtype=torch.float64, device=data.device)
    facts = (count, start, data.shape, scale.stride(), tile.kind, tile.block, programs)
    launch(errors_kernel, facts, (data, scale, x, partial), lambda: (
        (programs,),
        (data, scale, x, partial, count, start, start + count, width, *_scale_strides(scale, tile)),
        _constants(fmax, limit, tile) | {"BLOCK": SAMPLE_ROWS * SAMPLE_COLUMNS},
    ))  # fmt: skip
    _finish(row, partial, fmax, True, False)


def _finish(row: Row, partial: Tensor, fmax: float, values: bool, scaled: bool) -> None:
    programs = partial.shape[1]
    launch(finish_kernel, (programs, fmax, values, scaled), (partial, row.sums, row.largest), lambda: (
        (1,),
        (partial, row.sums, row.largest, programs),
        {"FMAX": fmax, "VALUES": values, "SCALED": scaled, "N": FINISHED, "num_warps": 4},
    ))  # fmt: skip


def _programs(count: int, at_once: int) -> int:
    return min(PROGRAMS, max(1, triton.cdiv(count, at_once)))


def _readable(scale_inv: Tensor) -> Tensor:
    return scale_inv.view(torch.uint8) if scale_inv.dtype == torch.float8_e8m0fnu else scale_inv


def _constants(fmax: float, limit: float, tile: Any) -> dict[str, Any]:
    rows, columns = (tile.block if tile.kind == "2d" else 1), (0 if tile.kind == "tensor" else tile.block)
    return {"FMAX": fmax, "LIMIT": limit, "TILE_R": rows, "TILE_C": columns, "num_warps": 8}


def _scale_strides(scale: Tensor, tile: Any) -> tuple[int, int]:
    return (0, 0) if tile.kind == "tensor" else scale.stride()


def _lines(x: Tensor) -> tuple[int, int, int] | None:
    """Number of lines of contiguous elements, their length, and from one to the next; None: there are none."""
    (rows, columns), (row, column) = x.shape, x.stride()
    if x.is_contiguous() or x.t().is_contiguous():
        return 1, x.numel(), 0
    if column == 1:
        return rows, columns, row
    return (columns, rows, column) if row == 1 else None


def _scale_lines(scale: Tensor) -> tuple[int, int, int, int]:
    """The same of scales of any strides, with that inside of a line."""
    if scale.dim() == 1:
        return 1, scale.numel(), 0, scale.stride(0)
    lines = _lines(scale)
    if lines is not None:
        return *lines, 1
    return *scale.shape, *scale.stride()
