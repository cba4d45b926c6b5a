"""Copies that come from bytes instead of a high-precision tensor, and experts' rows.

`grouped_kernel`: colwise tiles restart at each expert's first row; the experts' offsets are on the device. Its input is
high precision, or rowwise bytes with power-of-two scales (`x_scale_ptr`): those are dequantized in registers.
`transpose_kernel`: bytes [M, K] -> [K, M]. `blockwise_to_mxfp8_kernel`: FP32 power-of-two scales of 128-wide tiles
as the E8M0 codes of their 32-wide quarters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .quantize import Stored, allocate, allocate_scales, pointers, readable, scale_ld, spec_arguments, tile_epsilon
from .quantize_configs import GROUPED, GROUPED_COLUMNS, TRANSPOSE
from .quantize_device import (
    emit_colwise,
    emit_rowwise,
    layout_of,
    load_tile,
    nonfinite_to_nan,
    store_transposed_bytes,
    tile_layout,
    tile_mask,
    tile_offsets,
    tile_origin,
)

if TYPE_CHECKING:
    from .quantize import Spec


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
def load_quantized_tile(ptr, scale_ptr, scale_stride_m, scale_stride_k, rows, m0, m_end, cols, k0, K, stride_m,
                        stride_k, B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr):
    """Rowwise bytes dequantized to FP32 (exact under power-of-two scales)."""
    G: gl.constexpr = BLOCK_K // B if BLOCK_K > B else 1
    ptrs = ptr + tile_offsets(rows, cols, stride_m, stride_k)
    q = gl.load(ptrs, mask=tile_mask(rows, cols, m_end, K), other=0.0).to(gl.float32)
    q = gl.reshape(q, (BLOCK_M, G, BLOCK_K // G))
    SCALES: gl.constexpr = gl.SliceLayout(2, layout_of(q))
    m = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, SCALES))
    b = k0 // B + gl.arange(0, G, layout=gl.SliceLayout(0, SCALES))
    scale = gl.load(scale_ptr + tile_offsets(m, b, scale_stride_m, scale_stride_k),
                    mask=tile_mask(m, b, m_end, gl.cdiv(K, B)), other=0)
    x = gl.reshape(q * gl.expand_dims(decode_scale(scale), 2), (BLOCK_M, BLOCK_K))
    return nonfinite_to_nan(gl.convert_layout(x, layout_of(ptrs)))


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
def grouped_kernel(x_ptr, x_scale_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, offsets_ptr, experts, M, K,
                   stride_m, stride_k, x_scale_stride_m, x_scale_stride_k, row_scale_ld, col_scale_ld, epsilon,
                   FMAX: gl.constexpr, B: gl.constexpr, SCALE: gl.constexpr, EXPERTS: gl.constexpr,
                   ALIGNMENT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr,
                   C: gl.constexpr, W: gl.constexpr):
    """One register tile; the grid covers as many row tiles as M rows of `experts` experts can need."""
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    k0 = (gl.program_id(0) % gl.cdiv(K, BLOCK_K)).to(gl.int64) * BLOCK_K
    tile = (gl.program_id(0) // gl.cdiv(K, BLOCK_K)).to(gl.int64)
    if offsets_ptr is None:
        m0, m_end, first_block = tile * BLOCK_M, M, tile * (BLOCK_M // B)
    else:
        m0, m_end, first_block = find_expert(offsets_ptr, tile, experts, EXPERTS, BLOCK_M, B, W)
        m0 = m0 // ALIGNMENT * ALIGNMENT  # tells the compiler how wide stores may be
        m_end = m_end // ALIGNMENT * ALIGNMENT
    if m0 >= m_end:
        return
    rows = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    cols = k0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    if x_scale_ptr is not None:
        x = load_quantized_tile(x_ptr, x_scale_ptr, x_scale_stride_m, x_scale_stride_k, rows, m0, m_end, cols, k0, K,
                                stride_m, stride_k, B, BLOCK_M, BLOCK_K)
    else:
        x = load_tile(x_ptr, rows, cols, m_end, K, stride_m, stride_k, False)
    if row_ptr is not None:
        emit_rowwise(x, rows, m0, cols, k0, row_ptr, row_scale_ptr, None, row_scale_ld, epsilon, m_end, K, FMAX, B,
                     SCALE, False, BLOCK_M, BLOCK_K)
    emit_colwise(x, m0, k0, col_ptr, col_scale_ptr, None, col_scale_ld, first_block, epsilon, M, m_end, K, FMAX, B,
                 SCALE, False, BLOCK_M, BLOCK_K, R, C, W)


@jit
def transpose_kernel(x_ptr, out_ptr, M, K, stride_m, stride_k, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                     BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    m0, k0 = tile_origin(gl.program_id(0), K, BLOCK_M, BLOCK_K)
    rows = m0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, L))
    cols = k0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    ptrs = x_ptr + tile_offsets(rows, cols, stride_m, stride_k)
    if EVEN:
        q = gl.load(ptrs)
    else:
        q = gl.load(ptrs, mask=tile_mask(rows, cols, M, K), other=0)
    store_transposed_bytes(out_ptr, q, m0, k0, M, M, K, EVEN, BLOCK_M, BLOCK_K, W)


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
    if spec.tile.kind != "1d":
        raise ValueError(f"derive_colwise: {spec.tile} holds the same bytes in both orientations: transpose them")
    if spec.scale.value == "fp32":
        raise ValueError("derive_colwise: needs power-of-two scales; FP32 scales would round every value twice")
    return _colwise_tiles(data, scale_inv, spec, False, offsets, alignment)[1]


def quantize_grouped(x: Tensor, offsets: Tensor, spec: Spec, rowwise: bool = True,
                     alignment: int = 1) -> tuple[Stored | None, Stored]:
    """Quantizes tokens sorted by expert, `x [M, K]` under 1D tiles, in one pass: (rowwise or None, colwise).

    offsets: int32 or int64 [E + 1] on the device, expert e has rows offsets[e] to offsets[e + 1]. Colwise tiles restart
    at each expert's first row. Without asking the device, their number sum(ceil(m_e / B)) is known only up to a bound:
    colwise scale_inv is `[K, M // B + E]`, what lies past the number is not initialized; neither are rows and columns
    past the last offset.
    alignment: a number that divides all offsets (16 lets the transposed copy be written 16 bytes at a time).
    """
    if spec.tile.kind != "1d":
        raise ValueError(f"quantize_grouped: needs 1D tiles, got {spec.tile}")
    return _colwise_tiles(x, None, spec, rowwise, offsets, alignment)


def _colwise_tiles(x: Tensor, x_scale: Tensor | None, spec: Spec, rowwise: bool, offsets: Tensor | None,
                   alignment: int) -> tuple[Stored | None, Stored]:
    x, (M, K) = readable(x), x.shape
    experts = 0 if offsets is None else offsets.numel() - 1
    row = allocate(M, K, spec, x.device) if rowwise else None
    data, scale_inv = allocate(K, M, spec, x.device)
    if experts:
        scale_inv = allocate_scales(K, M // spec.tile.block + experts, "1d", scale_inv.dtype, x.device)
    config = GROUPED if rowwise else GROUPED_COLUMNS
    row_tiles = M // config.block_m + experts if experts else -(-M // config.block_m)
    if M and K:
        scale = pointers((x, x_scale))[1] if x_scale is not None else None
        grouped_kernel[(row_tiles * -(-K // config.block_k),)](
            x, scale, *pointers(row), *pointers((data, scale_inv)), offsets, experts, M, K, *x.stride(),
            *(x_scale.stride() if x_scale is not None else (0, 0)), scale_ld(row), scale_ld((data, scale_inv)),
            tile_epsilon(spec), EXPERTS=triton.next_power_of_2(max(experts, 1)), ALIGNMENT=alignment,
            **spec_arguments(spec), **config.options())
    return row, (data, scale_inv)


def transpose(data: Tensor) -> Tensor:
    """Bytes of a 2-D tensor of any 1-byte dtype and strides, physically transposed."""
    M, K = data.shape
    out = torch.empty(K, M, dtype=data.dtype, device=data.device)
    if data.numel():
        config = TRANSPOSE
        transpose_kernel[config.grid(M, K, data.device)](
            data.view(torch.uint8), out.view(torch.uint8), M, K, *data.stride(), EVEN=config.even(M, K),
            **config.options())
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
