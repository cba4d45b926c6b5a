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
import triton.language as tl
from torch import Tensor

from .quantize import Stored, allocate, allocate_scales, pointers, scale_ld, spec_arguments, tile_epsilon
from .quantize_configs import GROUPED, TRANSPOSE
from .quantize_device import emit_colwise, emit_rowwise, load_tile, nonfinite_to_nan, store_transposed, tile_rows
from .quantize_tiles import tile_origin

if TYPE_CHECKING:
    from .quantize import Spec


@triton.jit
def decode_scale(scale):
    """FP32 of a stored scale: itself, or an E8M0 code (0 is 2^-127, 255 is NaN)."""
    if scale.dtype == tl.uint8:
        code = scale.to(tl.int32)
        bits = tl.where(code == 0, 0x400000, tl.where(code == 255, 0x7FC00000, code << 23))
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = scale
    return value


@triton.jit
def load_quantized_tile(ptr, scale_ptr, scale_stride_m, scale_stride_k, rows, m_end, cols, k0, K, stride_m,
                        stride_k, B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rowwise bytes dequantized to FP32 (exact under power-of-two scales)."""
    G: tl.constexpr = BLOCK_K // B
    mask = (rows[:, None] < m_end) & (cols[None, :] < K)
    ptrs = ptr + rows[:, None] * stride_m + cols[None, :] * stride_k
    q = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    g = k0 // B + tl.arange(0, G)
    scale = tl.load(scale_ptr + rows[:, None] * scale_stride_m + g[None, :] * scale_stride_k,
                    mask=(rows[:, None] < m_end) & (g[None, :] < tl.cdiv(K, B)), other=0)
    x = tl.reshape(q, (BLOCK_M, G, B)) * decode_scale(scale)[:, :, None]
    return nonfinite_to_nan(tl.reshape(x, (BLOCK_M, BLOCK_K)))


@triton.jit
def find_expert(offsets_ptr, tile, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, B: tl.constexpr):
    """(first row of this register tile, its expert's last row + 1, its first scale block); empty past the end."""
    e = tl.arange(0, EXPERTS)
    first = tl.load(offsets_ptr + e, mask=e < experts, other=0).to(tl.int64)
    last = tl.load(offsets_ptr + e + 1, mask=e < experts, other=0).to(tl.int64)
    tiles = (last - first + BLOCK_M - 1) // BLOCK_M
    blocks = (last - first + B - 1) // B
    tile_ends = tl.cumsum(tiles, axis=0)
    mine = e == tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
    local = tile - tl.sum(tl.where(mine, tile_ends - tiles, 0), axis=0)
    m_end = tl.sum(tl.where(mine, last, 0), axis=0)
    m0 = tl.sum(tl.where(mine, first, 0), axis=0) + local * BLOCK_M
    first_block = tl.sum(tl.where(mine, tl.cumsum(blocks, axis=0) - blocks, 0), axis=0) + local * (BLOCK_M // B)
    return m0, m_end, first_block


@triton.jit
def grouped_kernel(x_ptr, x_scale_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, offsets_ptr, experts, M, K,
                   stride_m, stride_k, x_scale_stride_m, x_scale_stride_k, row_scale_ld, col_scale_ld, epsilon,
                   FMAX: tl.constexpr, B: tl.constexpr, SCALE: tl.constexpr, EXPERTS: tl.constexpr,
                   ALIGNMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, J: tl.constexpr):
    """One register tile; the grid covers as many row tiles as M rows of `experts` experts can need."""
    k0 = (tl.program_id(0) % tl.cdiv(K, BLOCK_K)).to(tl.int64) * BLOCK_K
    tile = tl.program_id(0) // tl.cdiv(K, BLOCK_K)
    if offsets_ptr is None:
        m0, m_end, first_block = tile.to(tl.int64) * BLOCK_M, M, tile.to(tl.int64) * (BLOCK_M // B)
    else:
        m0, m_end, first_block = find_expert(offsets_ptr, tile, experts, EXPERTS, BLOCK_M, B)
        m0 = tl.multiple_of(m0, ALIGNMENT)
        m_end = tl.multiple_of(m_end, ALIGNMENT)
    if m0 >= m_end:
        return
    rows = tile_rows(m0, BLOCK_M, J)
    cols = k0 + tl.arange(0, BLOCK_K)
    if x_scale_ptr is not None:
        x = load_quantized_tile(x_ptr, x_scale_ptr, x_scale_stride_m, x_scale_stride_k, rows, m_end, cols, k0, K,
                                stride_m, stride_k, B, BLOCK_M, BLOCK_K)
    else:
        x = load_tile(x_ptr, rows, cols, m_end, K, stride_m, stride_k, False)
    if row_ptr is not None:
        emit_rowwise(x, rows, m0, cols, k0, row_ptr, row_scale_ptr, None, row_scale_ld, epsilon, m_end, K, FMAX, B,
                     SCALE, False, BLOCK_M, BLOCK_K, J)
    emit_colwise(x, m0, cols, col_ptr, col_scale_ptr, None, col_scale_ld, first_block, epsilon, M, m_end, K, FMAX, B,
                 SCALE, False, BLOCK_M, BLOCK_K, J)


@triton.jit
def transpose_kernel(x_ptr, out_ptr, M, K, stride_m, stride_k, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_K: tl.constexpr, J: tl.constexpr):
    m0, k0 = tile_origin(tl.program_id(0), K, BLOCK_M, BLOCK_K)
    rows = tile_rows(m0, BLOCK_M, J)
    cols = k0 + tl.arange(0, BLOCK_K)
    ptrs = x_ptr + rows[:, None] * stride_m + cols[None, :] * stride_k
    if EVEN:
        q = tl.load(ptrs)
    else:
        q = tl.load(ptrs, mask=(rows[:, None] < M) & (cols[None, :] < K), other=0)
    store_transposed(out_ptr, q, m0, cols, M, M, K, EVEN, BLOCK_M, BLOCK_K, J)


@triton.jit
def blockwise_to_mxfp8_kernel(scale_ptr, code_ptr, rows, columns, scale_stride_r, scale_stride_c,
                              code_stride_r, code_stride_c, ROW_REPEAT: tl.constexpr, BLOCK: tl.constexpr):
    """code[r, c] = exponent of scale_inv[r // ROW_REPEAT, c // 4], for `columns` codes a row."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r, c = i % rows, i // rows
    mask = c < columns
    scale = tl.load(scale_ptr + (r // ROW_REPEAT) * scale_stride_r + (c // 4) * scale_stride_c, mask=mask, other=1.0)
    code = (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF
    tl.store(code_ptr + r * code_stride_r + c * code_stride_c, code.to(tl.uint8), mask=mask)


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
    M, K = x.shape
    experts = 0 if offsets is None else offsets.numel() - 1
    row = allocate(M, K, spec, x.device) if rowwise else None
    data, scale_inv = allocate(K, M, spec, x.device)
    if experts:
        scale_inv = allocate_scales(K, M // spec.tile.block + experts, "1d", scale_inv.dtype, x.device)
    config = GROUPED
    row_tiles = M // config.block_m + experts if experts else -(-M // config.block_m)
    if M and K:
        scale = pointers((x, x_scale))[1] if x_scale is not None else None
        grouped_kernel[(row_tiles * -(-K // config.block_k),)](
            x, scale, *pointers(row), *pointers((data, scale_inv)), offsets, experts, M, K, *x.stride(),
            *(x_scale.stride() if x_scale is not None else (0, 0)), scale_ld(row), scale_ld((data, scale_inv)),
            tile_epsilon(spec), EXPERTS=triton.next_power_of_2(max(experts, 1)), ALIGNMENT=alignment,
            BLOCK_M=config.block_m, BLOCK_K=config.block_k, J=config.j, **spec_arguments(spec), **config.options())
    return row, (data, scale_inv)


def transpose(data: Tensor) -> Tensor:
    """Bytes of a 2-D tensor of any 1-byte dtype and strides, physically transposed."""
    M, K = data.shape
    out = torch.empty(K, M, dtype=data.dtype, device=data.device)
    if data.numel():
        config = TRANSPOSE
        transpose_kernel[config.grid(M, K, data.device)](
            data.view(torch.uint8), out.view(torch.uint8), M, K, *data.stride(), EVEN=config.even(M, K),
            BLOCK_M=config.block_m, BLOCK_K=config.block_k, J=config.j, **config.options())
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
            ROW_REPEAT=128 if tile.kind == "2d" else 1, BLOCK=1024)
    return data, codes
