"""Plain Triton FP8 GEMM: the same problems as `gemm_hopper.py`, on any GPU with FP8 tensor cores and TMA.

It is the twin for devices that the Gluon kernel was not written for, and the simpler kernel to compare it with: a
persistent loop over tiles, operands by TMA (which zeroes what lies past M, N and K), scales and results by pointers.
See `gemm_hopper.py` for the problem kinds.
"""

import triton
import triton.language as tl

DENSE: tl.constexpr = tl.constexpr(0)
GROUPED_M: tl.constexpr = tl.constexpr(1)
GROUPED_K: tl.constexpr = tl.constexpr(2)
TENSORWISE: tl.constexpr = tl.constexpr(0)
BLOCK_1D2D: tl.constexpr = tl.constexpr(1)
BLOCK_1D1D: tl.constexpr = tl.constexpr(2)
BK: tl.constexpr = tl.constexpr(128)  # K block: the width of a 1D scale's block


@triton.jit
def tile_origin(tile, rows, N, BM: tl.constexpr, BN: tl.constexpr, BAND: tl.constexpr):
    """First row and column of a tile. Bands of BAND tile rows, column by column, so that operands stay in L2."""
    in_band = BAND * tl.cdiv(N, BN)
    first = tile // in_band * BAND
    height = tl.minimum(tl.cdiv(rows, BM) - first, BAND)
    tile = tile % in_band
    return (first + tile % height) * BM, tile // height * BN


@triton.jit
def _promote(acc, a, b, scale_a_ptrs, scale_b_ptrs, row_mask, column_mask, SCALING: tl.constexpr, FAST: tl.constexpr):
    """acc += (a @ b^T) * scales for one K block."""
    if FAST:
        acc = tl.dot(a, b.T, acc)
    else:
        partial = tl.dot(a, b.T)
        if SCALING == TENSORWISE:
            acc += partial
        elif SCALING == BLOCK_1D2D:
            row_scale = tl.load(scale_a_ptrs, mask=row_mask, other=0.0)
            acc += partial * (row_scale * tl.load(scale_b_ptrs))[:, None]
        else:
            row_scale = tl.load(scale_a_ptrs, mask=row_mask, other=0.0)
            column_scale = tl.load(scale_b_ptrs, mask=column_mask, other=0.0)
            acc += partial * row_scale[:, None] * column_scale[None, :]
    return acc


@triton.jit
def _load_b(b_desc, g, row, k, BN: tl.constexpr, KIND: tl.constexpr):
    """A block of B, which is a stack of matrices where rows are grouped."""
    if KIND == GROUPED_M:
        b = b_desc.load([g, row, k]).reshape(BN, BK)
    else:
        b = b_desc.load([row, k])
    return b


@triton.jit
def _contract(a_desc, b_desc, scale_a_ptrs, scale_b_ptrs, scale_a_ld, scale_b_step, a_row, g, n, k_start, depth,
              row_mask, column_mask, BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, SCALING: tl.constexpr,
              FAST: tl.constexpr):  # fmt: skip
    """The FP32 tile of C. A grouped contraction's last block is masked: it may hold the next group's tokens."""
    acc = tl.zeros([BM, BN], tl.float32)
    blocks = tl.cdiv(depth, BK)
    if KIND == GROUPED_K:
        blocks = depth // BK
    for k in range(blocks):
        a = a_desc.load([a_row, k_start + k * BK])
        b = _load_b(b_desc, g, n, k_start + k * BK, BN, KIND)
        acc = _promote(acc, a, b, scale_a_ptrs, scale_b_ptrs, row_mask, column_mask, SCALING, FAST)
        scale_a_ptrs += scale_a_ld
        scale_b_ptrs += scale_b_step
    if KIND == GROUPED_K:
        valid = depth - blocks * BK
        if valid > 0:
            inside = (tl.arange(0, BK) < valid)[None, :]
            a = a_desc.load([a_row, k_start + blocks * BK])
            b = b_desc.load([n, k_start + blocks * BK])
            a = tl.where(inside, a.to(tl.uint8, bitcast=True), 0).to(tl.uint8).to(a.dtype, bitcast=True)
            b = tl.where(inside, b.to(tl.uint8, bitcast=True), 0).to(tl.uint8).to(b.dtype, bitcast=True)
            acc = _promote(acc, a, b, scale_a_ptrs, scale_b_ptrs, row_mask, column_mask, SCALING, FAST)
    return acc


# Not specialized on what changes from call to call: a new number of tokens must not compile a new kernel.
@triton.jit(do_not_specialize=["groups", "M", "K", "scale_a_ld", "scale_b_ld", "scale_b_k", "scale_b_group",
                               "padding", "c_group"])
def gemm_kernel(a_desc, b_desc, c, bias, scale_a, scale_b, ends, groups, M, N, K, scale_a_ld, scale_b_ld, scale_b_k,
                scale_b_group, padding, c_ld, c_group, BM: tl.constexpr, BN: tl.constexpr, BAND: tl.constexpr,
                KIND: tl.constexpr, SCALING: tl.constexpr, FAST: tl.constexpr, HAS_BIAS: tl.constexpr,
                ACCUMULATE: tl.constexpr):  # fmt: skip
    """Persistent: each program takes every num_programs-th tile. BN must be 128 or divide it (2D scales)."""
    tile = tl.program_id(0)
    first_tile = 0
    start = 0
    k_start = 0  # grouped over K: where the group's tokens begin, and the first block of its scales
    first_block = tl.full([], 0, tl.int64)
    for g in range(groups):
        end = M
        rows = M
        depth = K
        if KIND == GROUPED_M:
            end = tl.load(ends + g)
            rows = end - start
        if KIND == GROUPED_K:
            end = tl.load(ends + g)
            depth = end - start
        tiles = tl.cdiv(rows, BM) * tl.cdiv(N, BN)
        if ACCUMULATE:
            tiles = tl.where(depth > 0, tiles, 0)
        while tile < first_tile + tiles:
            m, n = tile_origin(tile - first_tile, rows, N, BM, BN, BAND)
            a_row = m
            row_end = M
            scale_b_base = scale_b
            if KIND == GROUPED_M:
                a_row += start
                row_end = end
                if SCALING == BLOCK_1D2D:
                    scale_b_base += g * scale_b_group
            row = a_row + tl.arange(0, BM)
            column = n + tl.arange(0, BN)
            row_mask = row < row_end
            column_mask = column < N
            scale_a_ptrs = scale_a + first_block * scale_a_ld + row
            if SCALING == BLOCK_1D2D:
                scale_b_ptrs = scale_b_base + n // 128 * scale_b_ld
                scale_b_step = scale_b_k
            else:
                scale_b_ptrs = scale_b + first_block * scale_b_ld + n + tl.arange(0, BN)
                scale_b_step = scale_b_ld
            acc = _contract(a_desc, b_desc, scale_a_ptrs, scale_b_ptrs, scale_a_ld, scale_b_step, a_row, g, n,
                            k_start, depth, row_mask, column_mask, BM, BN, KIND, SCALING, FAST)  # fmt: skip
            if SCALING == TENSORWISE:
                acc *= tl.load(scale_a + g) * tl.load(scale_b + g)
            if HAS_BIAS:
                acc += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
            ptrs = c + row.to(tl.int64)[:, None] * c_ld + column[None, :]
            mask = row_mask[:, None] & column_mask[None, :]
            if ACCUMULATE:
                acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
            tl.store(ptrs, acc.to(c.dtype.element_ty), mask=mask)
            tile += tl.num_programs(0)
        first_tile += tiles
        start = end
        if KIND == GROUPED_K:
            first_block += tl.cdiv(depth, BK)
            k_start += tl.cdiv(depth, padding) * padding
            c += c_group
