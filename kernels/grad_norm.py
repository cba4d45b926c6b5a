"""Sums of squares, largest values and zero counts over flat FP32 tensors, in one pass: the GPU's part of
`megafp8/optimizer/norm.py`.

`squares` leaves one FP64 sum a chunk of 64 elements (a 32nd of the bytes read), `grids` reads those and adds them up
exactly. Squares of FP32 numbers are exact in FP64, and a chunk's are added in a fixed order, that of the reference:
neighbours in pairs, pairs of pairs, then 16 such sums by halving. Every partial result is a program's own: nothing here
depends on the order in which programs run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .adamw_device import CHUNK, chunk_layout
from .quantize_configs import multiprocessors

ROWS, WARPS, PROGRAMS_A_MULTIPROCESSOR = 32, 4, 12
GRIDS, GRID_PROGRAMS = 4, 4


class Squares(NamedTuple):
    """What `squares` found: FP64 [2], the largest sum and whether one isn't finite (0 or 1); int64 [programs], elements
    that are not 0 (None unless asked for)."""

    summary: Tensor
    nonzero: Tensor | None


@jit
def pair(a, b):
    return a + b


@jit
def squares_kernel(x_ptr, mask_ptr, sums_ptr, partial_ptr, nonzero_ptr, chunks, R: gl.constexpr, W: gl.constexpr):
    """A chunk that isn't counted (mask 0), or isn't finite, has the sum 0."""
    L: gl.constexpr = chunk_layout(W)
    rows = gl.arange(0, R, layout=gl.SliceLayout(1, L))
    columns = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L)), 0)
    largest = gl.full((R,), 0.0, gl.float64, layout=gl.SliceLayout(1, L))
    bad = gl.full((R,), 0.0, gl.float64, layout=gl.SliceLayout(1, L))
    nonzero = gl.full((R,), 0, gl.int32, layout=gl.SliceLayout(1, L))
    for first in range(gl.program_id(0) * R, chunks, gl.num_programs(0) * R):
        row = first + rows
        live = row < chunks
        offsets = gl.expand_dims(row, 1).to(gl.int64) * CHUNK + columns
        x = gl.load(x_ptr + offsets, mask=gl.expand_dims(live, 1), other=0.0)
        wide = x.to(gl.float64)
        s = gl.reshape(wide * wide, (R, 16, 2, 2))
        a, b = gl.split(s)
        a, b = gl.split(a + b)
        s = gl.reduce(a + b, 1, pair)
        s = gl.convert_layout(s, gl.SliceLayout(1, L))
        finite = s - s == 0.0
        bad = gl.where(finite, bad, 1.0)
        counted = live
        if mask_ptr is not None:
            counted = gl.load(mask_ptr + row, mask=live, other=0) != 0
        s = gl.where(finite & counted, s, 0.0)
        gl.store(sums_ptr + row, s, mask=live)
        largest = gl.maximum(largest, s)
        if nonzero_ptr is not None:
            nonzero += gl.where(counted, gl.sum((x != 0.0).to(gl.int32), axis=1), 0)
    partial = partial_ptr + gl.program_id(0) * 2
    gl.store(partial, gl.max(largest, axis=0))
    gl.store(partial + 1, gl.max(bad, axis=0))
    if nonzero_ptr is not None:
        gl.store(nonzero_ptr + gl.program_id(0), gl.sum(nonzero.to(gl.int64), axis=0))


@jit
def shift_of(largest, LEVEL: gl.constexpr):
    """1.5 * 2^(52 - 22 level) times the power of two above `largest`: `norm.grid_shifts`."""
    exponent = (largest.to(gl.int64, bitcast=True) >> 52) + 1 - 22 * LEVEL + 52
    exponent = gl.where(largest == 0.0, 1023 - 22 * LEVEL + 52, exponent)
    return ((exponent << 52) + (1 << 51)).to(gl.float64, bitcast=True)


@jit
def grids_kernel(sums_ptr, largest_ptr, out_ptr, count, N: gl.constexpr, W: gl.constexpr):
    """Adds what lies on each of the four grids; every such sum is exact."""
    L: gl.constexpr = gl.BlockedLayout([2], [32], [W], [0])
    index = gl.arange(0, N, layout=L)
    a0 = gl.full((N,), 0.0, gl.float64, layout=L)
    a1 = a0
    a2 = a0
    a3 = a0
    largest = gl.load(largest_ptr)
    s0 = shift_of(largest, 1)
    s1 = shift_of(largest, 2)
    s2 = shift_of(largest, 3)
    s3 = shift_of(largest, 4)
    for first in range(gl.program_id(0) * N, count, gl.num_programs(0) * N):
        rest = gl.load(sums_ptr + (first + index), mask=first + index < count, other=0.0)
        on = (rest + s0) - s0
        rest = rest - on
        a0 += on
        on = (rest + s1) - s1
        rest = rest - on
        a1 += on
        on = (rest + s2) - s2
        rest = rest - on
        a2 += on
        a3 += (rest + s3) - s3
    out = out_ptr + gl.program_id(0) * 4
    gl.store(out, gl.sum(a0, axis=0))
    gl.store(out + 1, gl.sum(a1, axis=0))
    gl.store(out + 2, gl.sum(a2, axis=0))
    gl.store(out + 3, gl.sum(a3, axis=0))


def squares(x: Tensor, mask: Tensor | None, sums: Tensor, *, count_nonzero: bool = False) -> Squares:
    """Of a flat FP32 tensor `[64 n]`. mask: bool [n], chunks that count; None: all. sums: FP64 [n], written."""
    chunks = x.numel() // CHUNK.value
    programs = max(1, min(-(-chunks // ROWS), PROGRAMS_A_MULTIPROCESSOR * multiprocessors(x.device)))
    partial = torch.empty(programs, 2, dtype=torch.float64, device=x.device)
    nonzero = torch.empty(programs, dtype=torch.int64, device=x.device) if count_nonzero else None
    mask = None if mask is None else mask.view(torch.uint8)
    squares_kernel[(programs,)](
        x, mask, sums, partial, nonzero, chunks, R=ROWS, W=WARPS, num_warps=WARPS, enable_fp_fusion=False
    )
    return Squares(partial.amax(0), nonzero)


def grids(sums: Tensor, largest: Tensor) -> Tensor:
    """FP64 sums [4] of the parts of `sums` on each grid. largest: FP64 scalar that no sum exceeds."""
    programs = max(1, min(-(-sums.numel() // 1024), GRID_PROGRAMS * multiprocessors(sums.device)))
    out = torch.empty(programs, GRIDS, dtype=torch.float64, device=sums.device)
    grids_kernel[(programs,)](sums, largest, out, sums.numel(), N=1024, W=4, num_warps=4, enable_fp_fusion=False)
    return out.sum(0)
