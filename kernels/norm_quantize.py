"""RMSNorm fused with the quantization of its output.

y = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps), rounded to x's dtype and only then
quantized, so that the bytes are the quantizer's bytes of that rounded value.

A norm needs whole rows, a colwise tile 128 of them: both do not fit into one multiprocessor. So rows alone take one
kernel, while both orientations take two: `norm_rows_kernel` for rstd, then `norm_tiles_kernel`, which reads x again,
last rows first, while they are still in L2. rstd is made by one function in one layout and y by one expression, so y
has the same bits whichever copies are asked for: recomputation changes nothing. Tensor tiles under current scaling take
two passes likewise: the first makes rstd and the amax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .launch import launch
from .quantize import Stored, pointers, scale_ld, spec_arguments, tile_epsilon
from .quantize_configs import chosen, norm_rows_config
from .quantize_device import (
    farther,
    layout_of,
    load_or_zero,
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
from .quantize_emit import emit, emit_part, emit_rest, record_amax, tensor_scale
from .quantize_producer import UNSCALED, Share, TensorScaling, allocate_pair, check_spec
from .zeros import zeros

if TYPE_CHECKING:
    from .quantize import Spec


@jit
def row_rstd(squares, H: gl.constexpr, eps):
    """1 / sqrt(mean + eps) from each thread's sums of squares; the same order of additions wherever it is called."""
    mean = gl.sum(squares, axis=1) / H
    return gl.div_rn(mean * 0.0 + 1.0, gl.sqrt_rn(mean + eps))


@jit
def normalize(x, rstd, weight, WEIGHT_OFFSET: gl.constexpr):
    weight = to_f32(weight)
    if WEIGHT_OFFSET != 0:
        weight += WEIGHT_OFFSET
    return (to_f32(x) * rstd[:, None]) * weight[None, :]


@jit
def norm_rows_kernel(x_ptr, weight_ptr, rstd_ptr, y_ptr, row_ptr, row_scale_ptr, scale_ptr, amax_ptr, record_ptr, T,
                     stride_t, row_scale_ld, eps, epsilon, H: gl.constexpr, WEIGHT_OFFSET: gl.constexpr,
                     SPEC: gl.constexpr, HELD: gl.constexpr, EVEN: gl.constexpr, BLOCK_M: gl.constexpr,
                     BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """rstd of BLOCK_M rows, and what else is wanted of them, BLOCK_K elements at a time.

    HELD: rows stay in registers between the two loops; otherwise they are read again, from L1.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    L: gl.constexpr = tile_layout(BLOCK_M, BLOCK_K, R, C, W)
    t0 = gl.program_id(0).to(gl.int64) * BLOCK_M
    squares = gl.zeros((BLOCK_M, BLOCK_K), gl.float32, layout=L)
    held = ()
    for k0 in gl.static_range(0, H, BLOCK_K):
        rows, cols = tile_indices(t0, k0, BLOCK_M, BLOCK_K, L)
        x = load_or_zero(x_ptr + tile_offsets(rows, cols, stride_t, 1), tile_mask(rows, cols, T, H),
                         EVEN and k0 + BLOCK_K <= H)
        if HELD:
            held = held + (x,)  # noqa: RUF005 (the compiler knows no unpacking here)
        else:
            x = to_f32(x)
            squares += x * x
    for i in gl.static_range(len(held)):
        x = to_f32(held[i])
        squares += x * x
    row, col = (row_ptr, row_scale_ptr, None, row_scale_ld), (None, None, None, 0)
    scale = tensor_scale(scale_ptr, amax_ptr, epsilon, row, col, t0 == 0, SPEC)
    rstd = row_rstd(squares, H, eps)
    rows = t0 + gl.arange(0, BLOCK_M, layout=layout_of(rstd))
    gl.store(rstd_ptr + rows, rstd, mask=rows < T)
    if record_ptr is not None:
        largest = gl.zeros((BLOCK_M, BLOCK_K), rounded(dtype), layout=L)
    if y_ptr is not None or row_ptr is not None or record_ptr is not None:
        for k0 in gl.static_range(0, H, BLOCK_K):
            rows, cols = tile_indices(t0, k0, BLOCK_M, BLOCK_K, L)
            mask = tile_mask(rows, cols, T, H)
            if HELD:
                x = held[k0 // BLOCK_K]
            else:
                x = load_or_zero(x_ptr + tile_offsets(rows, cols, stride_t, 1), mask,
                                 EVEN and k0 + BLOCK_K <= H)
            weight = load_or_zero(weight_ptr + cols, cols < H, k0 + BLOCK_K <= H)
            y = normalize(x, rstd, weight, WEIGHT_OFFSET)
            if y_ptr is not None:
                gl.store(y_ptr + tile_offsets(rows, cols, H, 1), to_compute_dtype(y, dtype), mask=mask)
            y = round_through(y, dtype)
            if record_ptr is not None:
                largest = farther(largest, y)
            if row_ptr is not None:
                emit(y, t0, k0, row, col, scale, epsilon, T, H, SPEC, EVEN and k0 + BLOCK_K <= H)
    if record_ptr is not None:
        record_amax(record_ptr, largest)


@jit
def load_part(x_ptr, t0, h0, T, stride_t, H: gl.constexpr, EVEN: gl.constexpr, LAYOUT: gl.constexpr,
              ROWS: gl.constexpr, BLOCK_K: gl.constexpr):
    rows, cols = tile_indices(t0, h0, ROWS, BLOCK_K, LAYOUT)
    return load_or_zero(x_ptr + tile_offsets(rows, cols, stride_t, 1), tile_mask(rows, cols, T, H), EVEN)


@jit
def norm_tile(x_ptr, weight_ptr, rstd_ptr, done, y_ptr, row, col, tensor, record_ptr, t0, h0, T, stride_t, epsilon,
              H: gl.constexpr, WEIGHT_OFFSET: gl.constexpr, SPEC: gl.constexpr, EVEN: gl.constexpr, PART: gl.constexpr,
              BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """One register tile, PART rows at a time (0: all of them).

    done: (None, 0), or a counter on the device and what it must have reached before rstd is there.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    STEP: gl.constexpr = BLOCK_M if PART == 0 else PART
    L: gl.constexpr = tile_layout(STEP, BLOCK_K, R, C, W)
    if PART != 0:
        ys = gl.allocate_shared_memory(rounded(dtype), (BLOCK_M, BLOCK_K), waiting_layout(BLOCK_M, BLOCK_K))
    rows, cols = tile_indices(t0, h0, STEP, BLOCK_K, L)
    if PART != 0:
        coming = load_part(x_ptr, t0, h0, T, stride_t, H, EVEN, L, STEP, BLOCK_K)
    if done[0] is not None:
        while gl.atomic_add(done[0], 0, sem="acquire") < done[1]:
            pass
        gl.thread_barrier()
    if PART == 0:  # a whole tile that waits here costs registers
        coming = load_part(x_ptr, t0, h0, T, stride_t, H, EVEN, L, STEP, BLOCK_K)
    rstds = ()
    for i in gl.static_range(0, BLOCK_M, STEP):  # not from L1, which may hold what lay there before
        rstd = gl.load(rstd_ptr + rows + i, mask=rows + i < T, other=0.0, cache_modifier=".cg")
        rstds = rstds + (rstd,)  # noqa: RUF005 (the compiler knows no unpacking here)
    weight = load_or_zero(weight_ptr + cols, cols < H, EVEN)
    scale = tensor_scale(tensor[0], tensor[1], epsilon, row, col, t0 + h0 == 0, SPEC)
    if record_ptr is not None:
        largest = gl.zeros((STEP, BLOCK_K), rounded(dtype), layout=L)
    for i in gl.static_range(0, BLOCK_M, STEP):
        x = coming
        if i + STEP < BLOCK_M:  # on their way while these rows are worked on
            coming = load_part(x_ptr, t0 + i + STEP, h0, T, stride_t, H, EVEN, L, STEP, BLOCK_K)
        y = normalize(x, rstds[i // STEP], weight, WEIGHT_OFFSET)
        if y_ptr is not None:
            gl.store(y_ptr + tile_offsets(rows + i, cols, H, 1), to_compute_dtype(y, dtype),
                     mask=tile_mask(rows + i, cols, T, H))
        y = round_through(y, dtype)
        if record_ptr is not None:
            largest = farther(largest, y)
        if PART == 0:
            emit(y, t0, h0, row, col, scale, epsilon, T, H, SPEC, EVEN)
        else:
            emit_part(y, t0 + i, h0, row, scale, epsilon, T, H, SPEC, EVEN)
            ys.slice(i, PART).store(y)
    if PART != 0:
        emit_rest(ys, t0, h0, col, scale, epsilon, T, H, SPEC, EVEN)
    if record_ptr is not None:
        record_amax(record_ptr, largest)


@jit
def norm_tiles_kernel(x_ptr, weight_ptr, rstd_ptr, y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr, scale_ptr,
                      amax_ptr, record_ptr, T, stride_t, row_scale_ld, col_scale_ld, epsilon, H: gl.constexpr,
                      WEIGHT_OFFSET: gl.constexpr, SPEC: gl.constexpr, EVEN: gl.constexpr, PART: gl.constexpr,
                      BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
                      W: gl.constexpr):
    t0, h0 = tile_origin(gl.num_programs(0) - 1 - gl.program_id(0), H, BLOCK_M, BLOCK_K)
    norm_tile(x_ptr, weight_ptr, rstd_ptr, (None, 0), y_ptr, (row_ptr, row_scale_ptr, None, row_scale_ld),
              (col_ptr, col_scale_ptr, None, col_scale_ld), (scale_ptr, amax_ptr), record_ptr, t0, h0, T, stride_t,
              epsilon, H, WEIGHT_OFFSET, SPEC, EVEN, PART, BLOCK_M, BLOCK_K, R, C, W)


@jit
def norm_both_kernel(x_ptr, weight_ptr, rstd_ptr, done_ptr, y_ptr, row_ptr, row_scale_ptr, col_ptr, col_scale_ptr,
                     scale_ptr, record_ptr, T, stride_t, row_scale_ld, col_scale_ld, eps, epsilon, H: gl.constexpr,
                     WEIGHT_OFFSET: gl.constexpr, SPEC: gl.constexpr, EVEN: gl.constexpr, ROWS: gl.constexpr,
                     ROWS_K: gl.constexpr, ROWS_C: gl.constexpr, SLAB: gl.constexpr, PART: gl.constexpr,
                     BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, R: gl.constexpr, C: gl.constexpr, W: gl.constexpr):
    """Both orientations in one launch: x is read from memory once.

    Programs of one kind make rstd of ROWS rows, those of the other kind a register tile. The rstds of a slab of SLAB
    rows come before the tiles of the slab before it, so that what a tile waits for was begun long ago, and its x is
    still in L2. Programs start in the order of their numbers, so nobody waits for one that cannot start.
    """
    STATS: gl.constexpr = SLAB // ROWS
    TILES: gl.constexpr = (SLAB // BLOCK_M) * ((H + BLOCK_K - 1) // BLOCK_K)
    slab = gl.program_id(0) // (STATS + TILES)
    index = gl.program_id(0) % (STATS + TILES)
    if index < STATS:
        t0 = slab.to(gl.int64) * SLAB + index * ROWS
        if t0 < T:
            L: gl.constexpr = tile_layout(ROWS, ROWS_K, 1, ROWS_C, W)
            squares = gl.zeros((ROWS, ROWS_K), gl.float32, layout=L)
            for k0 in gl.static_range(0, H, ROWS_K):
                rows, cols = tile_indices(t0, k0, ROWS, ROWS_K, L)
                x = to_f32(load_or_zero(x_ptr + tile_offsets(rows, cols, stride_t, 1), tile_mask(rows, cols, T, H),
                                        EVEN and k0 + ROWS_K <= H))
                squares += x * x
            rstd = row_rstd(squares, H, eps)
            rows = t0 + gl.arange(0, ROWS, layout=layout_of(rstd))
            gl.store(rstd_ptr + rows, rstd, mask=rows < T)
            gl.thread_barrier()
            gl.atomic_add(done_ptr + t0 // BLOCK_M, 1, sem="release")
    elif slab > 0:
        t0, h0 = tile_origin(index - STATS, H, BLOCK_M, BLOCK_K)
        t0 += (slab - 1).to(gl.int64) * SLAB
        if t0 < T:
            needed = gl.cdiv(gl.minimum(T - t0, BLOCK_M), ROWS)
            norm_tile(x_ptr, weight_ptr, rstd_ptr, (done_ptr + t0 // BLOCK_M, needed), y_ptr,
                      (row_ptr, row_scale_ptr, None, row_scale_ld), (col_ptr, col_scale_ptr, None, col_scale_ld),
                      (scale_ptr, None), record_ptr, t0, h0, T, stride_t, epsilon, H, WEIGHT_OFFSET, SPEC, EVEN, PART,
                      BLOCK_M, BLOCK_K, R, C, W)


class NormQuantized(NamedTuple):
    """rowwise, colwise: (data, scale_inv) or None; rstd: FP32 [T]; y: x's dtype [T, h] or None."""

    rowwise: Stored | None
    colwise: Stored | None
    rstd: Tensor
    y: Tensor | None


def rms_norm_quantize(x: Tensor, weight: Tensor, spec: Spec, *, eps: float = 1e-5, weight_offset: float = 0.0,
                      rowwise: bool = True, colwise: bool = False, high_precision: bool = False,
                      amax: Tensor | None = None, scale: Tensor | None = None, amax_out: Tensor | None = None,
                      share: Share | None = None, rstd: Tensor | None = None) -> NormQuantized:
    """RMSNorm of `x [T, h]` (BF16 or FP16, last dimension contiguous) with weight [h], quantized.

    spec: 1D or tensor tiles. weight_offset: 1.0 for zero-centred weights (`--apply-layernorm-1p`). high_precision: also
    return y. rstd: FP32 [T] of the same x, from an earlier call. amax, scale, amax_out: see `TensorScaling`; share: see
    `Share`. Bytes are those that `quantize(y, spec)` gives. Raises ValueError for other tiles or shapes.
    """
    _check(x, weight)
    check_spec("rms_norm_quantize", spec, amax, scale, amax_out, share)
    T, H = x.shape
    norm = {"eps": eps, "weight_offset": weight_offset}
    y = torch.empty(T, H, dtype=x.dtype, device=x.device) if high_precision else None
    row, col = allocate_pair(T, H, spec, x.device, rowwise, colwise)
    scaling = TensorScaling.of(spec, amax, scale, amax_out, x.device)
    if scaling.measures and (row or col):
        known = rstd
        rstd = _norm_rows(x, weight, None, None, spec, scaling.first_pass(), **norm)
        rstd = known if known is not None else rstd
        scaling = scaling.second_pass(share)
    if col is None:
        made = _norm_rows(x, weight, y, row, spec, scaling, **norm)
        return NormQuantized(row, col, made if rstd is None else rstd, y)
    if rstd is None and scaling.amax is None and _one_launch(H):
        return NormQuantized(row, col, _norm_both(x, weight, y, row, col, spec, scaling, **norm), y)
    if rstd is None:
        rstd = _norm_rows(x, weight, None, None, spec, UNSCALED, **norm)
    _norm_tiles(x, weight, rstd, y, row, col, spec, scaling, weight_offset)
    return NormQuantized(row, col, rstd, y)


def rms_norm_amax(x: Tensor, weight: Tensor, *, eps: float = 1e-5, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(rstd FP32 [T], amax FP32 [1] of RMSNorm's output): what `rms_norm_quantize` takes once ranks have shared it."""
    _check(x, weight)
    amax = zeros(1, torch.float32, x.device)
    rstd = _norm_rows(x, weight, None, None, None, TensorScaling(record=amax), eps=eps, weight_offset=weight_offset)
    return rstd, amax


def norm_columns_quantize(x: Tensor, weight: Tensor, rstd: Tensor, spec: Spec, *, weight_offset: float = 0.0,
                          amax: Tensor | None = None, scale: Tensor | None = None) -> Stored:
    """Colwise copy of RMSNorm's output from its input and saved rstd, in backward; the same bytes as in forward.

    Tensor tiles need the forward's amax or scale.
    """
    _check(x, weight)
    check_spec("norm_columns_quantize", spec, amax, scale, None)
    scaling = TensorScaling.of(spec, amax, scale, None, x.device)
    if scaling.measures:
        raise ValueError("norm_columns_quantize: tensor tiles need the amax or the scale of the forward pass")
    col = allocate_pair(*x.shape, spec, x.device, False, True)[1]
    _norm_tiles(x, weight, rstd, None, None, col, spec, scaling, weight_offset)
    return col


def _norm_rows(x: Tensor, weight: Tensor, y: Tensor | None, row: Stored | None, spec: Spec | None,
               scaling: TensorScaling, *, eps: float, weight_offset: float) -> Tensor:
    """rstd; writes y and row where given."""
    T, H = x.shape
    rstd = torch.empty(T, dtype=torch.float32, device=x.device)
    config = norm_rows_config(H)
    if T:
        facts = spec, config, T, H, x.stride(0), scale_ld(row), eps, weight_offset
        launch(norm_rows_kernel, facts, (x, weight, rstd, y, *(row or (None, None)), *scaling), lambda: (
            (-(-T // config.block_m),),
            (x, weight, rstd, y, *pointers(row), *scaling, T, x.stride(0), scale_ld(row), eps,
             tile_epsilon(spec) if spec is not None else 0.0),
            {"H": H, "WEIGHT_OFFSET": weight_offset, "HELD": config.held, "EVEN": T % config.block_m == 0,
             **(spec_arguments(spec) if spec is not None else {"SPEC": (448.0, 0, 0)}), **config.options()},
        ))  # fmt: skip
    return rstd


def _one_launch(hidden: int) -> bool:
    """Whether `norm_both_kernel` can make rstd in the layout, and so with the bits, of `norm_rows_kernel`."""
    config = chosen("norm both")
    return config.slab > 0 and norm_rows_config(hidden).num_warps <= config.num_warps


def _norm_both(x: Tensor, weight: Tensor, y: Tensor | None, row: Stored | None, col: Stored, spec: Spec,
               scaling: TensorScaling, *, eps: float, weight_offset: float) -> Tensor:
    """rstd; writes y, row and col where given, in one launch."""
    T, H = x.shape
    rstd = torch.empty(T, dtype=torch.float32, device=x.device)
    config, rows = chosen("norm both"), norm_rows_config(H)
    if not T:
        return rstd
    counters = triton.next_power_of_2(-(-T // config.block_m))  # one kind for many sizes
    done = zeros(counters, torch.int32, x.device)
    facts = spec, config, rows, T, H, x.stride(0), scale_ld(row), scale_ld(col), eps, weight_offset
    tensors = x, weight, rstd, done, y, *(row or (None, None)), *col, scaling.scale, scaling.record

    def work_out() -> tuple:
        each = max(1, config.num_warps // rows.num_warps)  # rows a program; as many warps a row as norm_rows_kernel has
        slab = config.slab
        programs = slab // each + slab // config.block_m * -(-H // config.block_k)
        return (
            ((-(-T // slab) + 1) * programs,),
            (x, weight, rstd, done, y, *pointers(row), *pointers(col), scaling.scale, scaling.record, T, x.stride(0),
             scale_ld(row), scale_ld(col), eps, tile_epsilon(spec)),
            {"H": H, "WEIGHT_OFFSET": weight_offset, "EVEN": config.even(T, H), "ROWS": each, "ROWS_K": rows.block_k,
             "ROWS_C": rows.c, "SLAB": slab, "PART": config.rows, **spec_arguments(spec), **config.options()},
        )  # fmt: skip

    launch(norm_both_kernel, facts, tensors, work_out)
    return rstd


def _norm_tiles(x: Tensor, weight: Tensor, rstd: Tensor, y: Tensor | None, row: Stored | None, col: Stored, spec: Spec,
                scaling: TensorScaling, weight_offset: float) -> None:
    T, H = x.shape
    config = chosen("norm both" if row else "norm columns")
    if T:
        facts = spec, config, T, H, x.stride(0), scale_ld(row), scale_ld(col), weight_offset
        launch(norm_tiles_kernel, facts, (x, weight, rstd, y, *(row or (None, None)), *col, *scaling), lambda: (
            config.grid(T, H, x.device),
            (x, weight, rstd, y, *pointers(row), *pointers(col), *scaling, T, x.stride(0), scale_ld(row),
             scale_ld(col), tile_epsilon(spec)),
            {"H": H, "WEIGHT_OFFSET": weight_offset, "EVEN": config.even(T, H), "PART": config.rows,
             **spec_arguments(spec), **config.options()},
        ))  # fmt: skip


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"rms_norm_quantize: x must be BF16 or FP16 [T, h] with contiguous rows, "
                         f"got {x.dtype} {tuple(x.shape)} of strides {x.stride()}")
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"rms_norm_quantize: weight must be contiguous [{x.shape[1]}], got {tuple(weight.shape)}")
