"""Copies that come from bytes instead of a high-precision tensor, and experts' rows.

`grouped_kernel`: colwise tiles restart at each expert's first row; the experts' offsets are on the device. Its input is
high precision, or rowwise bytes with power-of-two scales (`x_scale_ptr`): those are dequantized in registers. Its rows
may be picked by an index: dispatch and quantization in one pass.
`transpose_kernel`: bytes [M, K] -> [K, M]. `blockwise_to_mxfp8_kernel`: FP32 power-of-two scales of 128-wide tiles
as the E8M0 codes of their 32-wide quarters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .launch import launch
from .quantize import Stored, allocate, allocate_scales, pointers, readable, scale_ld, spec_arguments, tile_epsilon
from .quantize_configs import chosen
from .quantize_device import (
    cast_fp8,
    dequantize_tile,
    layout_of,
    load_or_zero,
    load_row_scales,
    nonfinite_to_nan,
    source_rows,
    tile_indices,
    tile_layout,
    tile_mask,
    tile_offsets,
    tile_origin,
    waiting_layout,
)
from .quantize_emit import emit_columns, emit_colwise, emit_rowwise, store_transposed_bytes

if TYPE_CHECKING:
    from .quantize import Spec


@jit
def find_expert(offsets_ptr, tile, experts, EXPERTS: gl.constexpr, BLOCK_M: gl.constexpr, B: gl.constexpr,
                W: gl.constexpr):
    """(first row of this register tile, its expert's last row + 1, its first scale block); empty past the end."""
    e = gl.arange(0, EXPERTS, layout=gl.BlockedLayout([1], [32], [W], [0]))
    first = gl.load(offsets_ptr + e, mask=e < experts, other=0).to(gl.int64)
    last = gl.load(offsets_ptr + e + 1, mask=e < experts, other=0).to(gl.int64)
    tiles = (last - first + BLOCK_M - 1) // BLOCK_M
    blocks = (last - first + B - 1) // B
    tile_ends = gl.associative_scan(tiles, 0, add)
    block_ends = gl.associative_scan(blocks, 0, add)
    mine = e == gl.sum((tile_ends <= tile).to(gl.int32), axis=0)
    local = tile - gl.sum(gl.where(mine, tile_ends - tiles, 0), axis=0)
    m_end = gl.sum(gl.where(mine, last, 0), axis=0)
    m0 = gl.sum(gl.where(mine, first, 0), axis=0) + local * BLOCK_M
    first_block = gl.sum(gl.where(mine, block_ends - blocks, 0), axis=0) + local * (BLOCK_M // B)
    return m0, m_end, first_block


@jit
def add(a, b):
    return a + b


@jit
def grouped_kernel(x_ptr, x_scale_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, offsets_ptr, index_ptr, experts,
                   M, N, K, stride_m, stride_k, x_scale_stride_m, x_scale_stride_k, row_scale_ld, col_scale_ld, epsilon,
                   SPEC: gl.constexpr, EXPERTS: gl.constexpr, ALIGNMENT: gl.constexpr, DERIVED: gl.constexpr,
                   EVEN: gl.constexpr, PART: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
                   R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """One register tile of the N result rows; the grid covers as many row tiles as `experts` experts can need.

    PART: 0, or how many rows are worked on at a time; for the columns' sake they then wait in shared memory.
    """
    B: gl.constexpr = SPEC[1]
    k0 = (gl.program_id(0) % gl.cdiv(K, BLOCK_K)).to(gl.int64) * BLOCK_K
    tile = (gl.program_id(0) // gl.cdiv(K, BLOCK_K)).to(gl.int64)
    if offsets_ptr is None:
        m0, m_end, first_block = tile * BLOCK_M, N, tile * (BLOCK_M // B)
    else:
        m0, m_end, first_block = find_expert(offsets_ptr, tile, experts, EXPERTS, BLOCK_M, B, W)
        m0 = m0 // ALIGNMENT * ALIGNMENT  # tells the compiler how wide stores may be
        m_end = m_end // ALIGNMENT * ALIGNMENT
    if m0 >= m_end:
        return
    row = (row_ptr, row_scale_ptr, None, row_scale_ld)
    col = (col_ptr, col_scale_ptr, None, col_scale_ld)
    STEP: gl.constexpr = BLOCK_M if PART == 0 else PART
    parts = ()
    for i in gl.static_range(0, BLOCK_M, STEP):
        rows, valid = source_rows(index_ptr, m0 + i, m_end, M, STEP, tile_layout(STEP, BLOCK_K, R, C, W))
        cols = k0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, tile_layout(STEP, BLOCK_K, R, C, W)))
        mask = valid[:, None] & (cols < K)[None, :]
        x = load_or_zero(x_ptr + tile_offsets(rows, cols, stride_m, stride_k), mask, EVEN)
        parts = parts + (x,)  # noqa: RUF005 (the compiler knows no unpacking here)
    if PART != 0:
        memory = gl.allocate_shared_memory(
            gl.bfloat16 if parts[0].dtype == gl.bfloat16 and not DERIVED else gl.float32, (BLOCK_M, BLOCK_K),
            waiting_layout(BLOCK_M, BLOCK_K))
    for i in gl.static_range(len(parts)):
        x = parts[i]
        if x_scale_ptr is not None:
            rows, valid = source_rows(index_ptr, m0 + i * STEP, m_end, M, STEP, layout_of(x))
            scale = load_row_scales(x_scale_ptr, x, rows, valid, k0, K, x_scale_stride_m, x_scale_stride_k, B)
            if row_ptr is not None:
                copy_rows(x, scale, m0 + i * STEP, k0, row, m_end, K, B)
            x = nonfinite_to_nan(dequantize_tile(x, scale, B))
        else:
            x = nonfinite_to_nan(x if x.dtype == gl.bfloat16 else x.to(gl.float32))
            if row_ptr is not None:
                y, stored = emit_rowwise(x, m0 + i * STEP, k0, row, epsilon, m_end, K, SPEC, EVEN)
                if DERIVED:
                    x = nonfinite_to_nan(dequantize_tile(fp8_of(y, SPEC[0], layout_of(x)), stored, B))
        if PART != 0:
            memory.slice(i * STEP, STEP).store(x)
        elif col_ptr is not None:
            emit_colwise(x, m0, k0, col, first_block, epsilon, N, m_end, K, SPEC, EVEN)
    if PART != 0:
        emit_columns(memory, m0, k0, col, first_block, epsilon, N, m_end, K, SPEC, EVEN)


@jit
def fp8_of(y, FMAX: gl.constexpr, LAYOUT: gl.constexpr):
    """Scaled values as FP8."""
    FP8: gl.constexpr = gl.float8e4nv if FMAX == 448.0 else gl.float8e5
    return gl.convert_layout(cast_fp8(y, FMAX), LAYOUT).to(FP8, bitcast=True)


@jit
def copy_rows(q, scale, m0, k0, row, M, K, B: gl.constexpr):
    """Bytes and their scales as they are."""
    rows, cols = tile_indices(m0, k0, q.shape[0], q.shape[1], layout_of(q))
    gl.store(row[0] + tile_offsets(rows, cols, K, 1), q.to(gl.uint8, bitcast=True), mask=tile_mask(rows, cols, M, K))
    m = m0 + gl.arange(0, q.shape[0], layout=gl.SliceLayout(1, layout_of(scale)))
    b = k0 // B + gl.arange(0, scale.shape[1], layout=gl.SliceLayout(0, layout_of(scale)))
    gl.store(row[1] + tile_offsets(m, b, 1, row[3]), scale, mask=tile_mask(m, b, M, gl.cdiv(K, B)))


@jit
def transpose_kernel(x_ptr, out_ptr, M, K, stride_g, stride_m, stride_k, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                     BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """stride_g: of a stack of matrices one after the other."""
    tile = gl.program_id(0)
    if stride_g is not None:
        tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(K, BLOCK_K)
        g = (tile // tiles).to(gl.int64)
        tile = tile % tiles
        x_ptr += g * stride_g
        out_ptr += g * M * K
    m0, k0 = tile_origin(tile, K, BLOCK_M, BLOCK_K)
    rows, cols = tile_indices(m0, k0, BLOCK_M, BLOCK_K, tile_layout(BLOCK_M, BLOCK_K, R, C, W))
    q = load_or_zero(x_ptr + tile_offsets(rows, cols, stride_m, stride_k), tile_mask(rows, cols, M, K), EVEN)
    store_transposed_bytes(out_ptr, q, m0, k0, M, M, K, EVEN)


@jit
def blockwise_to_mxfp8_kernel(scale_ptr, code_ptr, rows, columns, scale_stride_r, scale_stride_c, code_stride_r,
                              code_stride_c, ROW_REPEAT: gl.constexpr, BLOCK: gl.constexpr, W: gl.constexpr):
    """code[r, c] = exponent of scale_inv[r // ROW_REPEAT, c // 4], for `columns` codes a row."""
    i = gl.arange(0, BLOCK, layout=gl.BlockedLayout([4], [32], [W], [0]))
    i += gl.program_id(0).to(gl.int64) * BLOCK
    r, c = i % rows, i // rows
    mask = c < columns
    scale = gl.load(scale_ptr + (r // ROW_REPEAT) * scale_stride_r + (c // 4) * scale_stride_c, mask=mask, other=1.0)
    code = (scale.to(gl.int32, bitcast=True) >> 23) & 0xFF
    gl.store(code_ptr + r * code_stride_r + c * code_stride_c, code.to(gl.uint8), mask=mask)


def derive_colwise(data: Tensor, scale_inv: Tensor, spec: Spec, offsets: Tensor | None = None,
                   alignment: int = 1) -> Stored:
    """Colwise copy of an operand of which only rowwise bytes exist: `data [M, K]` under 1D tiles.

    Dequantizes and quantizes the other way, in registers. offsets, alignment: as in `quantize_grouped`.
    Raises ValueError under FP32 scales, which would round every value a second time.
    """
    return quantize_grouped((data, scale_inv), offsets, spec, False, True, alignment=alignment)[1]


def quantize_grouped(x: Tensor | Stored, offsets: Tensor | None, spec: Spec, rowwise: bool = True,
                     colwise: bool = True, *, alignment: int = 1, index: Tensor | None = None,
                     derived: bool = False) -> tuple[Stored | None, Stored | None]:
    """Quantizes tokens sorted by expert under 1D tiles, in one pass: (rowwise, colwise), None where not asked for.

    x: [M, K] of high precision; or its rowwise bytes (data, scale_inv) under power-of-two scales: those are the rowwise
        result, and the colwise one is derived from them.
    offsets: int32 or int64 [E + 1] on the device, expert e has result rows offsets[e] to offsets[e + 1]. Colwise tiles
        restart at each expert's first row. Without asking the device, their number sum(ceil(m_e / B)) is known only up
        to a bound: colwise scale_inv is `[K, N // B + E]`, what lies past the number is not initialized; neither are
        rows and columns past the last offset. None: one expert has all rows.
    alignment: a number that divides all offsets (16 lets the transposed copy be written 16 bytes at a time).
    index: int32 or int64 [N] on the device, row n of the result is row index[n] of x, or zeros where that is none of
        0 .. M - 1 (padding). None: all rows as they are, N = M.
    derived: colwise bytes come from the rowwise ones, as a receiver of those would make them.
    Raises ValueError for other tiles, and where colwise bytes are to come from rowwise ones under FP32 scales.
    """
    stored = isinstance(x, tuple)
    x, x_scale = x if stored else (readable(x), None)
    _check_grouped(spec, rowwise, colwise, colwise and (stored or derived))
    (M, K), N = x.shape, x.shape[0] if index is None else index.numel()
    experts = 0 if offsets is None else offsets.numel() - 1
    row = allocate(N, K, spec, x.device) if rowwise else None
    col = allocate(K, N, spec, x.device) if colwise else None
    if experts and col:
        col = (col[0], allocate_scales(K, N // spec.tile.block + experts, "1d", col[1].dtype, x.device))
    if not colwise:
        config = chosen("grouped rows")
    elif stored:
        config = chosen("derived")
    else:
        config = chosen("grouped columns" if not rowwise else "grouped derived" if derived else "grouped")
    row_tiles = N // config.block_m + experts if experts else -(-N // config.block_m)
    if N and K:
        even = not experts and index is None and config.even(N, K)
        facts = (spec, config, N, K, experts, alignment, derived and colwise, even, x.stride(),
                 stored and x_scale.stride(), scale_ld(row), scale_ld(col))
        tensors = x, x_scale, *(row or (None, None)), *(col or (None, None)), offsets, index
        launch(grouped_kernel, facts, tensors, lambda: (
            (row_tiles * -(-K // config.block_k),),
            (x, pointers((x, x_scale))[1] if stored else None, *pointers(row), *pointers(col), offsets, index, experts,
             M, N, K, *x.stride(), *(x_scale.stride() if stored else (0, 0)), scale_ld(row), scale_ld(col),
             tile_epsilon(spec)),
            {"EXPERTS": triton.next_power_of_2(max(experts, 1)), "ALIGNMENT": alignment, "DERIVED": derived and colwise,
             "EVEN": even, "PART": config.rows, **spec_arguments(spec),
             **config.options()},
        ), numbers=((9, M),))  # fmt: skip
        if stored and row and index is not None and tile_epsilon(spec):
            _fill_scales(row[1], spec, (index < 0) | (index >= M))
    return row, col


def _fill_scales(scale_inv: Tensor, spec: Spec, filled: Tensor) -> None:
    """Under a floor for amaxes, rows of zeros beside rows that came as bytes get the scale of that floor, too."""
    zeros = torch.zeros(1, spec.tile.block, dtype=torch.bfloat16, device=scale_inv.device)
    of_zeros = quantize_grouped(zeros, None, spec, True, False)[0][1]
    scale_inv.copy_(torch.where(filled[:, None], of_zeros, scale_inv))


def _check_grouped(spec: Spec, rowwise: bool, colwise: bool, derives: bool) -> None:
    if spec.tile.kind != "1d":
        raise ValueError(f"quantize_grouped: needs 1D tiles, got {spec.tile}: both orientations of other tiles hold "
                         "the same bytes, transpose them")
    if not (rowwise or colwise):
        raise ValueError("quantize_grouped: ask for rowwise=True, colwise=True or both")
    if derives and spec.scale.value == "fp32":
        raise ValueError("quantize_grouped: a colwise copy can be derived from rowwise bytes only under power-of-two "
                         "scales; FP32 scales would round every value twice")


def transpose(data: Tensor, out: Tensor | None = None) -> Tensor:
    """Bytes of a 2-D tensor of any 1-byte dtype and strides, physically transposed, or of each of a stack of them
    [G, M, K]. out: contiguous [K, M] or [G, K, M]."""
    *groups, M, K = data.shape
    out = torch.empty(*groups, K, M, dtype=data.dtype, device=data.device) if out is None else out
    if data.numel():
        config = chosen("transpose")
        strides = data.stride() if groups else (None, *data.stride())
        launch(transpose_kernel, (config, data.shape, strides), (data, out), lambda: (
            (config.grid(M, K, data.device)[0] * math.prod(groups),),
            (data.view(torch.uint8), out.view(torch.uint8), M, K, *strides),
            {"EVEN": config.even(M, K), **config.options()},
        ))  # fmt: skip
    return out


def blockwise_as_mxfp8(data: Tensor, scale_inv: Tensor, tile: Any) -> Stored:
    """Blockwise bytes under power-of-two scales as 1D MXFP8: the same bytes, each 128-wide scale as four codes."""
    assert tile.block == 128
    rows, columns = data.shape[0], -(-data.shape[1] // 32)
    codes = allocate_scales(rows, columns, "1d", torch.float8_e8m0fnu, data.device)
    if codes.numel():
        raw = codes.view(torch.uint8)
        blockwise_to_mxfp8_kernel[(triton.cdiv(rows * columns, 1024),)](
            scale_inv, raw, rows, columns, *scale_inv.stride(), *raw.stride(),
            ROW_REPEAT=128 if tile.kind == "2d" else 1, BLOCK=1024, W=4, num_warps=4)
    return data, codes
