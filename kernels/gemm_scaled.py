"""MXFP8 GEMMs over plain tensors: C = A @ B^T, operands K-major, an E8M0 scale for every 32 elements along K.

On tensor cores that take such scales (Blackwell) products go through `tl.dot_scaled`; elsewhere operands are decoded
to BF16 in registers, which is exact for codes 3 to 247 (what lies below, elements under 2^-130, is rounded to a
multiple of 2^-133). Either way sums are FP32, group sizes are read on the device, and nothing waits for it.

Scales are bytes of any strides: 1D `[rows, ceil(K/32)]`, or 2D, one for 32 rows, `[ceil(rows/32), ceil(K/32)]`. So
blockwise scales rewritten as codes fit as well. See `gemm.py` and `grouped_gemm.py` for the arguments that all share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import gemm_launch
from .gemm import check_bias, check_operands, output
from .gemm_launch import Problem
from .gemm_tl import BK, DENSE, GROUPED_K, GROUPED_M, tile_origin
from .grouped_gemm import check_ends

GROUP: tl.constexpr = tl.constexpr(32)  # elements that share a scale
E4M3: tl.constexpr = tl.constexpr("e4m3")
E5M2: tl.constexpr = tl.constexpr("e5m2")
_GROUP = GROUP.value


def gemm_mxfp8(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, *, bias: Tensor | None = None,
    out: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, accumulate: bool = False,
    native: bool | None = None,
) -> Tensor:  # fmt: skip
    """a `[M, K]`, b `[N, K]`. native: through block-scaled tensor cores; None: where the device has them."""
    check_operands(a, b)
    out = output(out, (a.shape[0], b.shape[0]), out_dtype, a, accumulate)
    problem = Problem(kind=DENSE.value, scaling=-1, a=a, b=b, scale_a=scale_inv_a, scale_b=scale_inv_b, out=out,
                      bias=check_bias(bias, b.shape[0]), accumulate=accumulate)  # fmt: skip
    _launch(problem, native)
    return out


def grouped_gemm_mxfp8(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, *, out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, native: bool | None = None,
) -> Tensor:  # fmt: skip
    """out[t] = a[t] @ b[g].T for each token t of group g: a `[T, K]`, b `[G, N, K]`, of any first stride, with
    scale_inv_b `[G, ...]`; out `[T, N]`."""
    check_operands(a, b, b_dims=3)
    if b.shape[0] != check_ends(ends) or scale_inv_b.shape[0] != b.shape[0]:
        raise ValueError(f"b has {b.shape[0]} groups, its scales {scale_inv_b.shape[0]}, ends {ends.numel()}")
    out = output(out, (a.shape[0], b.shape[1]), out_dtype, a, False)
    problem = Problem(kind=GROUPED_M.value, scaling=-1, a=a, b=b, scale_a=scale_inv_a, scale_b=scale_inv_b, out=out,
                      ends=ends)  # fmt: skip
    _launch(problem, native)
    return out


def grouped_wgrad_mxfp8(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, *, out: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32, accumulate: bool = False, padding: int = 1, native: bool | None = None,
) -> Tensor:  # fmt: skip
    """out[g] (+)= a[:, tokens of g] @ b[:, tokens of g].T: a `[M, T]`, b `[N, T]`, whose 32-wide 1D tiles restart at
    each group's first token; padding as in `grouped_wgrad_1d1d`."""
    check_operands(a, b)
    if padding < 1:
        raise ValueError(f"padding must be positive, not {padding}")
    out = output(out, (check_ends(ends), a.shape[0], b.shape[0]), out_dtype, a, accumulate)
    problem = Problem(kind=GROUPED_K.value, scaling=-1, a=a, b=b, scale_a=scale_inv_a, scale_b=scale_inv_b, out=out,
                      ends=ends, accumulate=accumulate, padding=padding)  # fmt: skip
    _launch(problem, native)
    return out


def _launch(p: Problem, native: bool | None) -> None:
    if gemm_launch.is_empty(p):
        return
    repeats = [_repeat(name, x, s, p.kind) for name, x, s in (("a", p.a, p.scale_a), ("b", p.b, p.scale_b))]
    p = gemm_launch.regrouped(p)
    index = p.a.get_device() if p.a.is_cuda else None
    native = _is_native(index) if native is None else native
    block = BK.value
    # Emulation holds decoded tiles in registers; the masked last block of a group spills in wide tiles.
    BM, BN = 128, 64 if p.kind == GROUPED_K.value or not native else 128
    a_desc = TensorDescriptor.from_tensor(gemm_launch.aligned(p.a), [BM, block])
    shape = [1, BN, block] if p.kind == GROUPED_M.value else [BN, block]
    b_desc = TensorDescriptor.from_tensor(gemm_launch.aligned(p.b), shape)
    scales = p.scale_a.view(torch.uint8), p.scale_b.view(torch.uint8)
    strides = (*scales[0].stride(), *scales[1].stride()[-2:], scales[1].stride(0) if p.kind == GROUPED_M.value else 0)
    sizes = (p.groups, p.M, p.N, p.K, *strides, p.padding, p.out.stride(-2), p.out.stride(0))
    pointers = (p.out, p.bias if p.bias is not None else p.out, *scales, p.ends if p.ends is not None else p.out)
    constants = {
        "BM": BM, "BN": BN, "BAND": 8, "KIND": p.kind, "REPEAT_A": repeats[0], "REPEAT_B": repeats[1],
        "NATIVE": native, "HAS_BIAS": p.bias is not None, "ACCUMULATE": p.accumulate,
    }  # fmt: skip
    grid = gemm_launch.grid(p, BM, gemm_launch.multiprocessors(index))
    gemm_launch.run(gemm_scaled_kernel, index, grid, (a_desc, b_desc), pointers, sizes, constants,
                    {"num_warps": 8, "num_stages": 4 if native else 3})  # fmt: skip


def _is_native(index: int | None) -> bool:
    return index is not None and torch.cuda.get_device_capability(index)[0] == 10


def _repeat(name: str, operand: Tensor, scale: Tensor, kind: int) -> int:
    """Rows that share a scale: 1 or 32. Raises ValueError unless the scales are bytes, and fit the operand."""
    rows, columns = operand.shape[-2], -(-operand.shape[-1] // _GROUP)
    got, bytewise = tuple(scale.shape), scale.dtype in (torch.float8_e8m0fnu, torch.uint8)
    stacked = (operand.shape[0],) if operand.dim() == 3 else ()
    one, two = (*stacked, rows, columns), (*stacked, -(-rows // _GROUP), columns)
    if kind == GROUPED_K.value:  # tiles restart, so there may be more of them
        one, two = (rows, max(columns, got[-1])), None
    if not bytewise or got not in (one, two):
        raise ValueError(f"scale_inv_{name} must be E8M0 {one}{f' or {two}' if two else ''}, not {scale.dtype} {got}")
    return 1 if got == one else _GROUP


@triton.jit
def _decoded(x, codes, ROWS: tl.constexpr):
    """BF16 values of FP8 `[ROWS, BK]` with a code for every 32: code 0 is 2^-127, 255 is NaN."""
    exponent = codes.to(tl.int32)
    bits = tl.where(exponent == 255, 0x7FC00000, tl.where(exponent == 0, 0x00400000, exponent << 23))
    scale = bits.to(tl.float32, bitcast=True)
    values = tl.reshape(x.to(tl.float32), [ROWS, BK // GROUP, GROUP]) * scale[:, :, None]
    return tl.reshape(values, [ROWS, BK]).to(tl.bfloat16)


@triton.jit
def _multiply(acc, a, b, codes_a, codes_b, BM: tl.constexpr, BN: tl.constexpr, NATIVE: tl.constexpr):
    """acc + decoded A @ decoded B^T of one K block."""
    if NATIVE:
        format_a: tl.constexpr = E5M2 if a.dtype == tl.float8e5 else E4M3
        format_b: tl.constexpr = E5M2 if b.dtype == tl.float8e5 else E4M3
        acc = tl.dot_scaled(a, codes_a, format_a, b.T, codes_b, format_b, acc)
    else:
        acc = tl.dot(_decoded(a, codes_a, BM), _decoded(b, codes_b, BN).T, acc)
    return acc


@triton.jit
def _contract(a_desc, b_desc, codes_a, codes_b, step_a, step_b, a_row, g, n, k_start, depth, row_mask, column_mask,
              BM: tl.constexpr, BN: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """The FP32 tile of C. A grouped contraction's last block is masked: it may hold the next group's tokens.

    codes_a, codes_b: pointers to the first block's codes; step_a, step_b: from one code to the next along K.
    """
    acc = tl.zeros([BM, BN], tl.float32)
    quarter = tl.arange(0, BK // GROUP)[None, :]
    pairs = tl.cdiv(depth, GROUP)
    blocks = tl.cdiv(depth, BK)
    if KIND == GROUPED_K:
        blocks = depth // BK
    for k in range(blocks):
        inside = k * (BK // GROUP) + quarter < pairs
        a = a_desc.load([a_row, k_start + k * BK])
        if KIND == GROUPED_M:
            b = b_desc.load([g, n, k_start + k * BK]).reshape(BN, BK)
        else:
            b = b_desc.load([n, k_start + k * BK])
        scale_a = tl.load(codes_a, mask=row_mask[:, None] & inside, other=0)
        scale_b = tl.load(codes_b, mask=column_mask[:, None] & inside, other=0)
        acc = _multiply(acc, a, b, scale_a, scale_b, BM, BN, NATIVE)
        codes_a += step_a * (BK // GROUP)
        codes_b += step_b * (BK // GROUP)
    if KIND == GROUPED_K:
        valid = depth - blocks * BK
        if valid > 0:
            inside = quarter * GROUP < valid
            own = (tl.arange(0, BK) < valid)[None, :]
            a = a_desc.load([a_row, k_start + blocks * BK])
            b = b_desc.load([n, k_start + blocks * BK])
            a = tl.where(own, a.to(tl.uint8, bitcast=True), 0).to(tl.uint8).to(a.dtype, bitcast=True)
            b = tl.where(own, b.to(tl.uint8, bitcast=True), 0).to(tl.uint8).to(b.dtype, bitcast=True)
            scale_a = tl.load(codes_a, mask=row_mask[:, None] & inside, other=0)
            scale_b = tl.load(codes_b, mask=column_mask[:, None] & inside, other=0)
            acc = _multiply(acc, a, b, scale_a, scale_b, BM, BN, NATIVE)
    return acc


# Not specialized on what changes from call to call: a new number of tokens must not compile a new kernel.
@triton.jit(do_not_specialize=["groups", "M", "K", "scale_a_ld", "scale_a_k", "scale_b_ld", "scale_b_k",
                               "scale_b_group", "padding", "c_group"])
def gemm_scaled_kernel(a_desc, b_desc, c, bias, scale_a, scale_b, ends, groups, M, N, K, scale_a_ld, scale_a_k,
                       scale_b_ld, scale_b_k, scale_b_group, padding, c_ld, c_group, BM: tl.constexpr,
                       BN: tl.constexpr, BAND: tl.constexpr, KIND: tl.constexpr, REPEAT_A: tl.constexpr,
                       REPEAT_B: tl.constexpr, NATIVE: tl.constexpr, HAS_BIAS: tl.constexpr,
                       ACCUMULATE: tl.constexpr):  # fmt: skip
    """Persistent: each program takes every num_programs-th tile, as `gemm_tl.gemm_kernel` does."""
    tile = tl.program_id(0)
    first_tile = 0
    start = 0
    k_start = 0  # grouped over K: where the group's tokens begin, and the first of its codes
    first_code = tl.full([], 0, tl.int64)
    quarter = tl.arange(0, BK // GROUP)[None, :]
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
            codes_b = scale_b
            if KIND == GROUPED_M:
                a_row += start
                row_end = end
                codes_b += g * scale_b_group
            row = a_row + tl.arange(0, BM)
            column = n + tl.arange(0, BN)
            row_mask = row < row_end
            column_mask = column < N
            row_at = (row // REPEAT_A).to(tl.int64)[:, None] * scale_a_ld
            column_at = (column // REPEAT_B).to(tl.int64)[:, None] * scale_b_ld
            codes_a = scale_a + row_at + (first_code + quarter) * scale_a_k
            codes_b = codes_b + column_at + (first_code + quarter) * scale_b_k
            acc = _contract(a_desc, b_desc, codes_a, codes_b, scale_a_k, scale_b_k, a_row, g, n, k_start, depth,
                            row_mask, column_mask, BM, BN, KIND, NATIVE)  # fmt: skip
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
            first_code += tl.cdiv(depth, GROUP)
            k_start += tl.cdiv(depth, padding) * padding
            c += c_group
