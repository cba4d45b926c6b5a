"""One scale an expert: rows that lie by expert, quantized under their expert's scale; sizes are read on the device.

Experts begin at multiples of 128 rows, so a register tile belongs to one. Rows may be picked by an index out of tokens
that lie elsewhere: they are never written in high precision, and an expert's amax is the largest of its tokens' own,
which are read once however many experts a token goes to (a maximum commutes with a permutation, so it is exact).

`row_amax_kernel`     the amax of each token
`expert_amax_kernel`  the amax of each expert, from those of its rows
`expert_cast_kernel`  bytes [N, K] and [K, N], in one pass
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .launch import launch
from .quantize import BLOCK, Stored, pointers, readable, spec_arguments, tile_epsilon
from .quantize_configs import chosen
from .quantize_device import (
    amax_of_columns,
    expert_of,
    farther,
    load_or_zero,
    load_tile,
    nonfinite_to_nan,
    source_rows,
    tile_indices,
    tile_layout,
    tile_offsets,
    tile_origin,
)
from .quantize_emit import emit_tensor, expert_scale, store_expert_scales

if TYPE_CHECKING:
    from .quantize import Spec

ALIGNMENT = BLOCK  # what the first rows of experts are multiples of
_ROWS = 1024  # amaxes of rows that a program reads at a time


@jit
def row_amax_kernel(x_ptr, out_ptr, M, K, stride_m, stride_k, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                    BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    dtype: gl.constexpr = gl.bfloat16 if x_ptr.dtype.element_ty == gl.bfloat16 else gl.float32
    m0 = gl.program_id(0).to(gl.int64) * BLOCK_M
    largest = gl.zeros((BLOCK_M, BLOCK_K), dtype, layout=L)
    for k0 in range(0, K, BLOCK_K):
        rows, cols = tile_indices(m0, k0.to(gl.int64), BLOCK_M, BLOCK_K, L)  # strides may be long
        largest = farther(largest, load_tile(x_ptr, rows, cols, M, K, stride_m, stride_k, EVEN))
    amax = gl.max(amax_of_columns(largest, BLOCK_K), axis=1)
    rows = m0 + gl.arange(0, BLOCK_M, layout=amax.type.layout)
    gl.store(out_ptr + rows, gl.maximum(amax, 0.0), mask=rows < M)


@triton.jit
def expert_amax_kernel(row_amax, index, ends, out, M, ROWS: tl.constexpr):
    """out[e]: the largest amax of the rows of expert e. index: the token of each row, none outside of 0 .. M - 1."""
    e = tl.program_id(0)
    start = tl.load(ends + e - 1, mask=e > 0, other=0)
    end = tl.load(ends + e)
    largest = tl.zeros([ROWS], dtype=tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        there = row < end
        if index is not None:
            row = tl.load(index + row, mask=there, other=-1)
            there = (row >= 0) & (row < M)
        largest = tl.maximum(largest, tl.load(row_amax + row, mask=there, other=0.0))
    tl.store(out + e, tl.max(largest, axis=0))


@jit
def expert_cast_kernel(x_ptr, row_ptr, col_ptr, amax_ptr, given_scale_ptr, scale_inv_ptr, ends_ptr, index_ptr, experts,
                       M, N, K, stride_m, stride_k, epsilon, SPEC: gl.constexpr, EXPERTS: gl.constexpr,
                       EVEN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr,
                       C: gl.constexpr, W: gl.constexpr):
    """A register tile of the N result rows, of x's rows `index`, or of x's own. EVEN: no result tile needs a mask."""
    if gl.program_id(0) == 0:
        store_expert_scales(given_scale_ptr, amax_ptr, epsilon, scale_inv_ptr, experts, SPEC, EXPERTS, W)
    m0, k0 = tile_origin(gl.program_id(0), K, BLOCK_M, BLOCK_K)
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    rows, valid = source_rows(index_ptr, m0, N, M, BLOCK_M, L)
    cols = k0 + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, L))
    whole: gl.constexpr = EVEN and index_ptr is None
    x = load_or_zero(x_ptr + tile_offsets(rows, cols, stride_m, stride_k), valid[:, None] & (cols < K)[None, :], whole)
    expert = expert_of(ends_ptr, m0, experts, EXPERTS, W)  # while the rows are on their way
    if expert >= experts:  # nobody's rows
        return
    scale = expert_scale(given_scale_ptr, amax_ptr, epsilon, expert, SPEC)
    x = nonfinite_to_nan(x if x.dtype == gl.bfloat16 else x.to(gl.float32))
    emit_tensor(x, m0, k0, (row_ptr, None, None, 0), (col_ptr, None, None, 0), scale, N, K, SPEC, EVEN)


def row_amaxes(x: Tensor) -> Tensor:
    """FP32 [M]: the largest finite magnitude of each row of `x [M, K]`."""
    x, (M, K) = readable(x), x.shape
    out = torch.empty(M, dtype=torch.float32, device=x.device)
    if M and K:
        config = chosen("row amax")
        grid, even = (-(-M // config.block_m), 1, 1), config.even(M, K)
        launch(row_amax_kernel, (config, even, K, x.stride()), (x, out), lambda: (
            grid,
            (x, out, M, K, *x.stride()),
            {"EVEN": even, **config.options()},
        ), grid=grid, numbers=((2, M),))  # fmt: skip
    return out if K else out.zero_()


def expert_amaxes(rows: Tensor, ends: Tensor, index: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """FP32 [G]: the largest of each expert's `rows`, FP32 [M]; of `rows[index]` (int64 [N], negative: none).

    ends: int32 [G], one past each expert's last row. out: FP32 [G], receives it.
    """
    out = torch.empty(ends.numel(), dtype=torch.float32, device=ends.device) if out is None else out
    if out.numel():
        experts, count = out.numel(), rows.numel()
        launch(expert_amax_kernel, experts, (rows, index, ends, out), lambda: (
            (experts,),
            (rows, index, ends, out, count),
            {"ROWS": _ROWS, "num_warps": 4},
        ), numbers=((4, count),))  # fmt: skip
    return out


def quantize_experts(x: Tensor, ends: Tensor, spec: Spec, rowwise: bool = True, colwise: bool = False, *,
                     amax: Tensor | None = None, scale: Tensor | None = None,
                     index: Tensor | None = None) -> tuple[Stored | None, Stored | None]:
    """Bytes of `x [M, K]` under one scale an expert: (data, scale_inv [G]) rowwise [N, K] and colwise [K, N].

    ends: int32 [G], multiples of 128. amax: FP32 [G], from which scales are made; or scale: FP32 [G], the scales.
    index: int64 [N], row n is row index[n] of x, or zeros where that is none; None: all rows as they are. Rows and
    columns past the last end are not written.
    """
    x, (M, K), experts = readable(x), x.shape, ends.numel()
    N = M if index is None else index.numel()
    scale_inv = torch.empty(experts, dtype=torch.float32, device=x.device)
    row, col = ((torch.empty(shape, dtype=spec.format.dtype, device=x.device), scale_inv) if wanted else None
                for shape, wanted in (((N, K), rowwise), ((K, N), colwise)))
    if not (N and K):
        scale_inv.fill_(1.0)
        return row, col
    config = chosen("experts")
    tensors = x, row and row[0], col and col[0], amax, scale, scale_inv, ends, index
    launch(expert_cast_kernel, (spec, config, N, K, experts, x.stride()), tensors, lambda: (
        config.grid(N, K, x.device),
        (x, pointers(row)[0], pointers(col)[0], amax, scale, scale_inv, ends, index, experts, M, N, K, *x.stride(),
         tile_epsilon(spec)),
        {"EXPERTS": triton.next_power_of_2(experts), "EVEN": config.even(N, K), **spec_arguments(spec),
         **config.options()},
    ), numbers=((9, M),))  # fmt: skip
    return row, col
