"""The inner loops of the Hopper GEMM's consumers: multiply K blocks on the tensor cores, promote with their scales.

A product of one 128-wide K block goes into a fresh FP32 partial tile, and is then promoted: `acc += partial * scales`.
Two ways of keeping the tensor cores busy meanwhile, chosen by measurement (docs/gemm_kernels.md):
* `contract_pairs`: 64 rows a warpgroup, two K blocks in flight;
* `contract_halves`: 128 rows a warpgroup as two halves, one product in flight; the other warpgroup multiplies.

Accumulators are 64 x 64 pieces. Each loop returns them with the ring's next stage and phase.
"""

# ruff: noqa: SIM300 - options are constants, but not the ones to compare with
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gemm_hopper_problem import BK, BN, HALF, add_ring, block_1d1d, block_1d2d, grouped_k, next_stage, tensorwise


@gluon.jit
def split_columns(x):
    """Left and right half of the columns. Only registers are renamed."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def _row_scales(ring, slot, scale_b, like, ROW: gl.constexpr, o):
    """What a product's rows are multiplied by, read while it is still being computed.

    scale_b: flat index of the 2D scale; its slot holds the ones from `aligned(scale_b)` on.
    """
    rows: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    if o.SCALING == tensorwise:
        row = gl.full([HALF], 1.0, gl.float32, rows)
    else:
        row = ring.scale_a.index(slot).slice(ROW, HALF).load(rows)
        if o.SCALING == block_1d2d:
            one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
            scalars = ring.scale_b._reinterpret(gl.float32, [ring.scale_b.shape[0] * 32, 1], one)
            row *= scalars.index(slot * 32 + scale_b % 4).load(rows)
    return row


@gluon.jit
def _column_scales(ring, slot, FIRST: gl.constexpr, like, o):
    """What 64 of a product's columns are multiplied by under 1D1D scales, 16 numbers a thread."""
    columns: gl.constexpr = gl.SliceLayout(0, like.type.layout)
    if o.SCALING == block_1d1d:
        column = ring.scale_b.index(slot).slice(FIRST, HALF).load(columns)
    else:
        column = gl.full([HALF], 1.0, gl.float32, columns)
    return column


@gluon.jit
def _promote(acc, partial, row, column, o):
    """acc += partial * scales, 64 x 64."""
    if o.SCALING == tensorwise:
        acc += partial
    elif o.SCALING == block_1d2d:
        acc += partial * gl.expand_dims(row, 1)
    else:
        acc += (partial * gl.expand_dims(column, 0)) * gl.expand_dims(row, 1)
    return acc


@gluon.jit
def _promote_tile(left, right, partial, row, column, right_column, o):
    """The same for a whole product; column: of its left half."""
    p_left, p_right = split_columns(partial)
    return _promote(left, p_left, row, column, o), _promote(right, p_right, row, right_column, o)


@gluon.jit
def _promote_sparingly(left, right, partial, ring, slot, row, column, o):
    """The same; the right half's column scales are read only when they are needed, to save registers."""
    p_left, p_right = split_columns(partial)
    left = _promote(left, p_left, row, column, o)
    return left, _promote(right, p_right, row, _column_scales(ring, slot, HALF, left, o), o)


@gluon.jit
def _zero_past(smem, valid):
    """Zeroes the columns of an FP8 tile in shared memory from column `valid` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    x = smem.load(layout)
    column = gl.expand_dims(gl.arange(0, BK, gl.SliceLayout(0, layout)), 0)
    bits = gl.where(column < valid, x.to(gl.uint8, bitcast=True), 0)
    smem.store(bits.to(gl.uint8).to(x.dtype, bitcast=True))


@gluon.jit
def _mask_tail(a, b, valid, o):
    """A group's last K block may hold the next group's tokens: both operands are zeroed there, as 0 * NaN is NaN.

    Two consumer warpgroups may both do this to B: they write the same bytes.
    """
    if o.KIND == grouped_k and valid < BK:
        _zero_past(a, valid)
        _zero_past(b, valid)
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _multiply(ring, stage, partial, ROW: gl.constexpr, use_acc=False):
    """Starts partial (+)= A[ROW : ROW + 64] @ B^T of one stage on the tensor cores."""
    a = ring.a.index(stage).slice(ROW, HALF)
    b = ring.b.index(stage).permute([1, 0])
    return warpgroup_mma(a, b, partial, use_acc=use_acc, is_async=True)


@gluon.jit
def _release_late(ring, late, o):
    """Releases stage `late` (-1: none), from which the last tile's C is on its way."""
    if o.STORE == add_ring and late >= 0:
        tma.store_wait(0)
        mbarrier.arrive(ring.empty.index(late), count=1)


@gluon.jit
def contract_pairs(ring, stage, phase, late, depth, scale_b, scale_b_k, ROW: gl.constexpr, MMA: gl.constexpr, o):
    """64 rows a warpgroup, two K blocks a stage and in flight: the second multiplies while the first is promoted.

    late: a stage to release once the first of this tile's is done; waiting for it before would idle the tensor cores.
    """
    zero = gl.zeros([HALF, BN], gl.float32, MMA)
    left, right = split_columns(zero)
    blocks = gl.cdiv(depth, BK)
    for k in range(0, blocks - 1, 2):
        slot = stage * 2
        mbarrier.wait(ring.full.index(stage), phase)
        _mask_tail(ring.a.index(slot + 1).slice(ROW, HALF), ring.b.index(slot + 1), depth - (k + 1) * BK, o)
        partial = _multiply(ring, slot, zero, ROW)
        partial_1 = _multiply(ring, slot + 1, zero, ROW)
        row = _row_scales(ring, slot, scale_b, left, ROW, o)
        column = _column_scales(ring, slot, 0, left, o)
        partial = warpgroup_mma_wait(1, [partial])
        left, right = _promote_sparingly(left, right, partial, ring, slot, row, column, o)
        row = _row_scales(ring, slot + 1, scale_b + scale_b_k, left, ROW, o)
        column = _column_scales(ring, slot + 1, 0, left, o)
        partial_1 = warpgroup_mma_wait(0, [partial_1])
        left, right = _promote_sparingly(left, right, partial_1, ring, slot + 1, row, column, o)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        _release_late(ring, late, o)
        late = -1
        scale_b += 2 * scale_b_k
        stage, phase = next_stage(stage, phase, o)
    if blocks % 2 == 1:
        slot = stage * 2
        mbarrier.wait(ring.full.index(stage), phase)
        _mask_tail(ring.a.index(slot).slice(ROW, HALF), ring.b.index(slot), depth - (blocks - 1) * BK, o)
        partial = _multiply(ring, slot, zero, ROW)
        row = _row_scales(ring, slot, scale_b, left, ROW, o)
        column = _column_scales(ring, slot, 0, left, o)
        partial = warpgroup_mma_wait(0, [partial])
        left, right = _promote_sparingly(left, right, partial, ring, slot, row, column, o)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        _release_late(ring, late, o)
        stage, phase = next_stage(stage, phase, o)
    return left, right, stage, phase


@gluon.jit
def contract_halves(ring, stage, phase, depth, scale_b, scale_b_k, ROW: gl.constexpr, MMA: gl.constexpr, o):
    """128 rows a warpgroup as two halves, one product in flight; another warpgroup multiplies meanwhile.

    Both halves share their column scales, which cost shared memory as much bandwidth as a product does otherwise.

    Accumulators pass through `warpgroup_mma_wait` after a promotion: without it, ptxas delays the promotion past the
    next product, keeps two partial tiles, and spills.
    """
    partial = gl.zeros([HALF, BN], gl.float32, MMA)
    left_0, right_0 = split_columns(partial)
    left_1, right_1 = split_columns(partial)
    blocks = gl.cdiv(depth, BK)
    for k in range(blocks):
        mbarrier.wait(ring.full.index(stage), phase)
        _mask_tail(ring.a.index(stage).slice(ROW, 2 * HALF), ring.b.index(stage), depth - k * BK, o)
        partial = _multiply(ring, stage, partial, ROW)
        row = _row_scales(ring, stage, scale_b, left_0, ROW, o)
        column = _column_scales(ring, stage, 0, left_0, o)
        right_column = _column_scales(ring, stage, HALF, left_0, o)
        partial = warpgroup_mma_wait(0, [partial])
        left_0, right_0 = _promote_tile(left_0, right_0, partial, row, column, right_column, o)
        left_0, right_0 = warpgroup_mma_wait(0, [left_0, right_0])
        partial = _multiply(ring, stage, partial, ROW + HALF)
        row = _row_scales(ring, stage, scale_b, left_1, ROW + HALF, o)
        partial = warpgroup_mma_wait(0, [partial])
        left_1, right_1 = _promote_tile(left_1, right_1, partial, row, column, right_column, o)
        left_1, right_1 = warpgroup_mma_wait(0, [left_1, right_1])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        scale_b += scale_b_k
        stage, phase = next_stage(stage, phase, o)
    return left_0, right_0, left_1, right_1, stage, phase


@gluon.jit
def contract_fast(ring, stage, phase, depth, ROW: gl.constexpr, MMA: gl.constexpr, o):
    """Fast accumulation: 128 rows a warpgroup, the tensor cores accumulate over all of K, nothing is promoted."""
    zero = gl.zeros([HALF, BN], gl.float32, MMA)
    upper = zero
    lower = zero
    blocks = gl.cdiv(depth, BK)
    for k in range(blocks):
        mbarrier.wait(ring.full.index(stage), phase)
        _mask_tail(ring.a.index(stage).slice(ROW, 2 * HALF), ring.b.index(stage), depth - k * BK, o)
        upper = _multiply(ring, stage, upper, ROW, use_acc=k > 0)
        lower = _multiply(ring, stage, lower, ROW + HALF, use_acc=k > 0)
        upper, lower = warpgroup_mma_wait(2, [upper, lower])  # the previous stage's products are done
        mbarrier.arrive(ring.empty.index((stage + o.STAGES - 1) % o.STAGES), count=1, pred=k > 0)
        stage, phase = next_stage(stage, phase, o)
    upper, lower = warpgroup_mma_wait(0, [upper, lower])
    mbarrier.arrive(ring.empty.index((stage + o.STAGES - 1) % o.STAGES), count=1, pred=blocks > 0)
    left_0, right_0 = split_columns(upper)
    left_1, right_1 = split_columns(lower)
    return left_0, right_0, left_1, right_1, stage, phase
