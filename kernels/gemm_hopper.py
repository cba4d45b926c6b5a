"""Warp-specialized FP8 GEMM for Hopper, in Gluon: one kernel for dense, grouped-M and grouped-K problems.

    C[M, N] (+)= sum over 128-wide blocks k of (A_k @ B_k^T) * scale_inv_a * scale_inv_b

A CTA is one producer warp and one or two consumer warpgroups. The producer walks the CTA's tiles and K blocks and
fills a ring of shared-memory stages by TMA: A, B and the scales that go with them, so that consumers wait on one
`mbarrier` a K block and never on global memory. A consumer multiplies a block on the tensor cores into a fresh FP32
partial tile, then promotes it: `acc += partial * scales`. Hopper's FP8 tensor cores keep few fraction bits while they
accumulate, so the promotion is also what makes a tensorwise product accurate.

Problem kinds (`KIND`): dense; grouped over M: A's rows are sorted by group, `ends[g]` is one past group g's last row,
B is `[G * N, K]` (fprop and dgrad of experts); grouped over K: the contraction runs over a group's tokens, A is
`[M, T]`, B `[N, T]`, C `[G, M, N]` (wgrad). Group sizes are read on the device; they need not be multiples of a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

DENSE, GROUPED_M, GROUPED_K = 0, 1, 2
TENSORWISE, BLOCK_1D2D, BLOCK_1D1D = 0, 1, 2

_DENSE, _GROUPED_M, _GROUPED_K = gl.constexpr(DENSE), gl.constexpr(GROUPED_M), gl.constexpr(GROUPED_K)
_TENSORWISE, _1D2D, _1D1D = gl.constexpr(TENSORWISE), gl.constexpr(BLOCK_1D2D), gl.constexpr(BLOCK_1D1D)
_BN = gl.constexpr(128)  # tile columns, and the width of a 2D scale's block
_BK = gl.constexpr(128)  # K block: the width of a 1D scale's block
_HALF = gl.constexpr(64)  # rows of one product of a warpgroup; accumulators are kept as 64 x 64 pieces


@aggregate
class Operands:
    """Where a problem's operands lie: descriptors, sizes and strides, in elements."""

    a: tma.tensor_descriptor
    b: tma.tensor_descriptor
    scale_a: tma.tensor_descriptor  # flat, FP32
    scale_b: tma.tensor_descriptor
    ends: gl.tensor
    groups: gl.tensor
    M: gl.tensor
    N: gl.tensor
    K: gl.tensor
    scale_a_ld: gl.tensor
    scale_b_ld: gl.tensor
    scale_b_k: gl.tensor
    padding: gl.tensor  # grouped over K: each group's tokens begin at a multiple of it

    @gluon.constexpr_function
    def __init__(self, a, b, scale_a, scale_b, ends, groups, M, N, K, scale_a_ld, scale_b_ld, scale_b_k,
                 padding):  # fmt: skip
        self.a = a
        self.b = b
        self.scale_a = scale_a
        self.scale_b = scale_b
        self.ends = ends
        self.groups = groups
        self.M = M
        self.N = N
        self.K = K
        self.scale_a_ld = scale_a_ld
        self.scale_b_ld = scale_b_ld
        self.scale_b_k = scale_b_k
        self.padding = padding


@aggregate
class Output:
    """Where the result goes."""

    desc: tma.tensor_descriptor
    ptr: gl.tensor
    bias: gl.tensor
    scale_a: gl.tensor  # tensorwise: one scale a group
    scale_b: gl.tensor
    ld: gl.tensor
    group_stride: gl.tensor

    @gluon.constexpr_function
    def __init__(self, desc, ptr, bias, scale_a, scale_b, ld, group_stride):
        self.desc = desc
        self.ptr = ptr
        self.bias = bias
        self.scale_a = scale_a
        self.scale_b = scale_b
        self.ld = ld
        self.group_stride = group_stride


@aggregate
class Ring:
    """The stages of shared memory between producer and consumers, and their barriers."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    scale_a: gl.shared_memory_descriptor
    scale_b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, a, b, scale_a, scale_b, full, empty):
        self.a = a
        self.b = b
        self.scale_a = scale_a
        self.scale_b = scale_b
        self.full = full
        self.empty = empty


@gluon.constexpr_function
def block_bytes(BM, SCALING):
    """Bytes that TMA writes for one K block."""
    a_scales = BM * 4 if SCALING != TENSORWISE else 0
    b_scales = {TENSORWISE: 0, BLOCK_1D2D: 128, BLOCK_1D1D: 128 * 4}[SCALING]
    return (BM + 128) * 128 + a_scales + b_scales


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _group(op, g, start, BM: gl.constexpr, KIND: gl.constexpr, SKIP_EMPTY: gl.constexpr):
    """Group g, whose first row (or token) is `start`: its end, rows that tiles cover, contraction length, tiles.

    Tiles of a group over M begin at `_aligned(start)`, so that the coordinates of scales suit TMA.
    """
    end = op.M
    rows = op.M
    depth = op.K
    if KIND == _GROUPED_M:
        end = gl.load(op.ends + g)
        rows = gl.where(end > start, end - _aligned(start), 0)
    elif KIND == _GROUPED_K:
        end = gl.load(op.ends + g)
        depth = end - start
    tiles = gl.cdiv(rows, BM) * gl.cdiv(op.N, _BN)
    if SKIP_EMPTY:
        tiles = gl.where(depth > 0, tiles, 0)
    return end, rows, depth, tiles


@gluon.jit
def _aligned(coordinate):
    """TMA wants the innermost coordinate at a multiple of 16 bytes: four scales."""
    return coordinate // 4 * 4


@gluon.jit
def _tile(tile, rows, N, BM: gl.constexpr, BAND: gl.constexpr):
    """First row and column of a tile. Bands of BAND tile rows, column by column, so that operands stay in L2."""
    row_tiles = gl.cdiv(rows, BM)
    in_band = BAND * gl.cdiv(N, _BN)
    first = tile // in_band * BAND
    height = gl.minimum(row_tiles - first, BAND)
    tile = tile % in_band
    return (first + tile % height) * BM, tile // height * _BN


@gluon.jit
def _scale_b_2d(op, g, n, KIND: gl.constexpr):
    """Where the 2D scales of B's rows n to n + 127 begin."""
    block = n // _BN
    if KIND == _GROUPED_M:
        block += g * gl.cdiv(op.N, _BN)
    return block * op.scale_b_ld


@gluon.jit
def _produce(op, ring, BM: gl.constexpr, STAGES: gl.constexpr, PER: gl.constexpr, BAND: gl.constexpr, KIND: gl.constexpr,
             SCALING: gl.constexpr, SKIP_EMPTY: gl.constexpr):  # fmt: skip
    nbytes: gl.constexpr = PER * block_bytes(BM, SCALING)
    stage = 0
    phase = 1
    tile = gl.program_id(0)
    first_tile = 0
    start = 0
    column = 0  # grouped over K: where the group's tokens begin, and the first block of its scales
    first_block = 0
    for g in range(op.groups):
        end, rows, depth, tiles = _group(op, g, start, BM, KIND, SKIP_EMPTY)
        blocks = gl.cdiv(depth, _BK)
        while tile < first_tile + tiles:
            m, n = _tile(tile - first_tile, rows, op.N, BM, BAND)
            a_row = m
            b_row = n
            if KIND == _GROUPED_M:
                a_row += _aligned(start)
                b_row += g * op.N
            scale_b = _scale_b_2d(op, g, n, KIND)
            for k in range(0, blocks, PER):
                mbarrier.wait(ring.empty.index(stage), phase)
                bar = ring.full.index(stage)
                mbarrier.expect(bar, nbytes)
                for i in gl.static_range(PER):
                    slot = stage * PER + i
                    at_k = column + (k + i) * _BK
                    tma.async_copy_global_to_shared(op.a, [a_row, at_k], bar, ring.a.index(slot))
                    tma.async_copy_global_to_shared(op.b, [b_row, at_k], bar, ring.b.index(slot))
                    if SCALING != _TENSORWISE:
                        at = (first_block + k + i) * op.scale_a_ld + a_row
                        tma.async_copy_global_to_shared(op.scale_a, [at], bar, ring.scale_a.index(slot))
                        if SCALING == _1D2D:
                            at = _aligned(scale_b + (k + i) * op.scale_b_k)
                        else:
                            at = (first_block + k + i) * op.scale_b_ld + b_row
                        tma.async_copy_global_to_shared(op.scale_b, [at], bar, ring.scale_b.index(slot))
                stage, phase = _next(stage, phase, STAGES)
            tile += gl.num_programs(0)
        first_tile += tiles
        start = end
        if KIND == _GROUPED_K:
            first_block += blocks
            column += gl.cdiv(depth, op.padding) * op.padding


@gluon.jit
def _split(x):
    """Left and right half of the columns. Only registers are renamed."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def _scales(ring, slot, scale_b, like, ROW: gl.constexpr, SCALING: gl.constexpr):
    """The scales that a promotion needs first, read while the product is still being computed: (rows, left columns).

    scale_b: flat index of the 2D scale; its slot holds the ones from `_aligned(scale_b)` on.
    """
    rows: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    columns: gl.constexpr = gl.SliceLayout(0, like.type.layout)
    if SCALING == _TENSORWISE:
        row = gl.full([_HALF], 1.0, gl.float32, rows)
        column = gl.full([_HALF], 1.0, gl.float32, columns)
    elif SCALING == _1D2D:
        one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        scalars = ring.scale_b._reinterpret(gl.float32, [ring.scale_b.shape[0] * 32, 1], one)
        row = ring.scale_a.index(slot).slice(ROW, _HALF).load(rows)
        row *= scalars.index(slot * 32 + scale_b % 4).load(rows)
        column = gl.full([_HALF], 1.0, gl.float32, columns)
    else:
        row = ring.scale_a.index(slot).slice(ROW, _HALF).load(rows)
        column = ring.scale_b.index(slot).slice(0, _HALF).load(columns)
    return row, column


@gluon.jit
def _promote(left, right, partial, ring, slot, row, column, SCALING: gl.constexpr):
    """left, right += partial * scales. Column scales are read half a tile at a time, to save registers."""
    p_left, p_right = _split(partial)
    if SCALING == _TENSORWISE:
        left += p_left
        right += p_right
    elif SCALING == _1D2D:
        left += p_left * gl.expand_dims(row, 1)
        right += p_right * gl.expand_dims(row, 1)
    else:
        columns: gl.constexpr = gl.SliceLayout(0, left.type.layout)
        right_column = ring.scale_b.index(slot).slice(_HALF, _HALF).load(columns)
        left += (p_left * gl.expand_dims(column, 0)) * gl.expand_dims(row, 1)
        right += (p_right * gl.expand_dims(right_column, 0)) * gl.expand_dims(row, 1)
    return left, right


@gluon.jit
def _zero_past(smem, valid):
    """Zeroes the columns of an FP8 tile in shared memory from column `valid` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    x = smem.load(layout)
    column = gl.expand_dims(gl.arange(0, _BK, gl.SliceLayout(0, layout)), 0)
    bits = gl.where(column < valid, x.to(gl.uint8, bitcast=True), 0)
    smem.store(bits.to(gl.uint8).to(x.dtype, bitcast=True))


@gluon.jit
def _mask_tail(a, b, valid, KIND: gl.constexpr):
    """A group's last K block may hold the next group's tokens: both operands are zeroed there, as 0 * NaN is NaN.

    Two consumer warpgroups may both do this to B: they write the same bytes.
    """
    if KIND == _GROUPED_K:
        if valid < _BK:
            _zero_past(a, valid)
            _zero_past(b, valid)
            fence_async_shared()
            gl.thread_barrier()


@gluon.jit
def _store_direct(x, out, g, row, column, row_start, row_end, N, ACCUMULATE: gl.constexpr, KIND: gl.constexpr):
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    inside = rows < row_end
    if KIND == _GROUPED_M:
        inside &= rows >= row_start
    mask = gl.expand_dims(inside, 1) & (gl.expand_dims(columns, 0) < N)
    base = out.ptr
    if KIND == _GROUPED_K:
        base += g.to(gl.int64) * out.group_stride
    ptr = base + gl.expand_dims(rows.to(gl.int64) * out.ld, 1) + gl.expand_dims(columns, 0)
    if ACCUMULATE:
        x += gl.load(ptr, mask=mask, other=0.0).to(gl.float32)
    gl.store(ptr, x.to(out.ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _store_tma(x, out, staging, row, column):
    tma.store_wait(0)
    staging.store(x.to(staging.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out.desc, [row, column], staging)


@gluon.jit
def _store(x, out, staging, scale, g, row, column, row_start, row_end, N, KIND: gl.constexpr, SCALING: gl.constexpr,
           HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr, TMA_STORE: gl.constexpr):  # fmt: skip
    """Writes one 64 x 64 piece. By TMA, which clips at C's edges, unless the piece crosses an end of its group."""
    if SCALING == _TENSORWISE:
        x *= scale
    if HAS_BIAS:
        columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        bias = gl.load(out.bias + columns, mask=columns < N, other=0.0).to(gl.float32)
        x += gl.expand_dims(bias, 0)
    if not TMA_STORE:
        _store_direct(x, out, g, row, column, row_start, row_end, N, ACCUMULATE, KIND)
    elif KIND == _GROUPED_M:
        if (row >= row_start) & (row + _HALF <= row_end):
            _store_tma(x, out, staging, row, column)
        else:
            _store_direct(x, out, g, row, column, row_start, row_end, N, ACCUMULATE, KIND)
    else:
        _store_tma(x, out, staging, row, column)


@gluon.jit
def _multiply(ring, stage, partial, ROW: gl.constexpr, use_acc=False):
    """Starts partial (+)= A[ROW : ROW + 64] @ B^T of one stage on the tensor cores."""
    a = ring.a.index(stage).slice(ROW, _HALF)
    b = ring.b.index(stage).permute([1, 0])
    return warpgroup_mma(a, b, partial, use_acc=use_acc, is_async=True)


@gluon.jit
def _loop_pairs(ring, stage, phase, depth, scale_b, scale_b_k, ROW: gl.constexpr, MMA: gl.constexpr,
                STAGES: gl.constexpr, KIND: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """64 rows a warpgroup, two K blocks a stage and in flight: the second multiplies while the first is promoted."""
    zero = gl.zeros([_HALF, _BN], gl.float32, MMA)
    left, right = _split(zero)
    blocks = gl.cdiv(depth, _BK)
    for k in range(0, blocks - 1, 2):
        slot = stage * 2
        mbarrier.wait(ring.full.index(stage), phase)
        _mask_tail(ring.a.index(slot + 1).slice(ROW, _HALF), ring.b.index(slot + 1), depth - (k + 1) * _BK, KIND)
        partial = _multiply(ring, slot, zero, ROW)
        partial_1 = _multiply(ring, slot + 1, zero, ROW)
        row, column = _scales(ring, slot, scale_b, left, ROW, SCALING)
        partial = warpgroup_mma_wait(1, [partial])
        left, right = _promote(left, right, partial, ring, slot, row, column, SCALING)
        row, column = _scales(ring, slot + 1, scale_b + scale_b_k, left, ROW, SCALING)
        partial_1 = warpgroup_mma_wait(0, [partial_1])
        left, right = _promote(left, right, partial_1, ring, slot + 1, row, column, SCALING)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        scale_b += 2 * scale_b_k
        stage, phase = _next(stage, phase, STAGES)
    if blocks % 2 == 1:
        slot = stage * 2
        mbarrier.wait(ring.full.index(stage), phase)
        _mask_tail(ring.a.index(slot).slice(ROW, _HALF), ring.b.index(slot), depth - (blocks - 1) * _BK, KIND)
        partial = _multiply(ring, slot, zero, ROW)
        row, column = _scales(ring, slot, scale_b, left, ROW, SCALING)
        partial = warpgroup_mma_wait(0, [partial])
        left, right = _promote(left, right, partial, ring, slot, row, column, SCALING)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = _next(stage, phase, STAGES)
    return left, right, stage, phase


@gluon.jit
def _loop_halves(ring, stage, phase, depth, scale_b, scale_b_k, ROW: gl.constexpr, MMA: gl.constexpr,
                 STAGES: gl.constexpr, KIND: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """128 rows a warpgroup as two halves, one product in flight; another warpgroup multiplies meanwhile.

    Accumulators pass through `warpgroup_mma_wait` after a promotion: without it, ptxas delays the promotion past the
    next product, keeps two partial tiles, and spills.
    """
    partial = gl.zeros([_HALF, _BN], gl.float32, MMA)
    left_0, right_0 = _split(partial)
    left_1, right_1 = _split(partial)
    blocks = gl.cdiv(depth, _BK)
    for k in range(blocks):
        mbarrier.wait(ring.full.index(stage), phase)
        _mask_tail(ring.a.index(stage).slice(ROW, 2 * _HALF), ring.b.index(stage), depth - k * _BK, KIND)
        partial = _multiply(ring, stage, partial, ROW)
        row, column = _scales(ring, stage, scale_b, left_0, ROW, SCALING)
        partial = warpgroup_mma_wait(0, [partial])
        left_0, right_0 = _promote(left_0, right_0, partial, ring, stage, row, column, SCALING)
        left_0, right_0 = warpgroup_mma_wait(0, [left_0, right_0])
        partial = _multiply(ring, stage, partial, ROW + _HALF)
        row, column = _scales(ring, stage, scale_b, left_1, ROW + _HALF, SCALING)
        partial = warpgroup_mma_wait(0, [partial])
        left_1, right_1 = _promote(left_1, right_1, partial, ring, stage, row, column, SCALING)
        left_1, right_1 = warpgroup_mma_wait(0, [left_1, right_1])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        scale_b += scale_b_k
        stage, phase = _next(stage, phase, STAGES)
    return left_0, right_0, left_1, right_1, stage, phase


@gluon.jit
def _loop_fast(ring, stage, phase, depth, ROW: gl.constexpr, MMA: gl.constexpr, STAGES: gl.constexpr,
               KIND: gl.constexpr):  # fmt: skip
    """Fast accumulation: 128 rows a warpgroup, the tensor cores accumulate over all of K, nothing is promoted."""
    zero = gl.zeros([_HALF, _BN], gl.float32, MMA)
    upper = zero
    lower = zero
    blocks = gl.cdiv(depth, _BK)
    for k in range(blocks):
        mbarrier.wait(ring.full.index(stage), phase)
        _mask_tail(ring.a.index(stage).slice(ROW, 2 * _HALF), ring.b.index(stage), depth - k * _BK, KIND)
        upper = _multiply(ring, stage, upper, ROW, use_acc=k > 0)
        lower = _multiply(ring, stage, lower, ROW + _HALF, use_acc=k > 0)
        upper, lower = warpgroup_mma_wait(2, [upper, lower])  # the previous stage's products are done
        mbarrier.arrive(ring.empty.index((stage + STAGES - 1) % STAGES), count=1, pred=k > 0)
        stage, phase = _next(stage, phase, STAGES)
    upper, lower = warpgroup_mma_wait(0, [upper, lower])
    mbarrier.arrive(ring.empty.index((stage + STAGES - 1) % STAGES), count=1, pred=blocks > 0)
    left_0, right_0 = _split(upper)
    left_1, right_1 = _split(lower)
    return left_0, right_0, left_1, right_1, stage, phase


@gluon.jit
def _consume(op, out, ring, staging, WARPGROUP: gl.constexpr, ROWS: gl.constexpr, BM: gl.constexpr,
             STAGES: gl.constexpr, BAND: gl.constexpr, KIND: gl.constexpr, SCALING: gl.constexpr, FAST: gl.constexpr,
             HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr, TMA_STORE: gl.constexpr):  # fmt: skip
    """One warpgroup: rows [WARPGROUP * ROWS, + ROWS) of each of the CTA's tiles."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = WARPGROUP * ROWS
    stage = 0
    phase = 0
    tile = gl.program_id(0)
    first_tile = 0
    start = 0
    scale = 1.0
    piece = staging.index(WARPGROUP)
    for g in range(op.groups):
        end, rows, depth, tiles = _group(op, g, start, BM, KIND, ACCUMULATE)
        while tile < first_tile + tiles:
            m, n = _tile(tile - first_tile, rows, op.N, BM, BAND)
            m += ROW
            row_start = 0
            row_end = op.M
            if KIND == _GROUPED_M:
                m += _aligned(start)
                row_start = start
                row_end = end
            scale_b = _scale_b_2d(op, g, n, KIND)
            if SCALING == _TENSORWISE:
                scale = gl.load(out.scale_a + g) * gl.load(out.scale_b + g)
            if ROWS == 64:
                left_0, right_0, stage, phase = _loop_pairs(
                    ring, stage, phase, depth, scale_b, op.scale_b_k, ROW, MMA, STAGES, KIND, SCALING)  # fmt: skip
            else:
                if FAST:
                    left_0, right_0, left_1, right_1, stage, phase = _loop_fast(
                        ring, stage, phase, depth, ROW, MMA, STAGES, KIND)  # fmt: skip
                else:
                    left_0, right_0, left_1, right_1, stage, phase = _loop_halves(
                        ring, stage, phase, depth, scale_b, op.scale_b_k, ROW, MMA, STAGES, KIND, SCALING)  # fmt: skip
                _store(left_1, out, piece, scale, g, m + _HALF, n, row_start, row_end, op.N, KIND, SCALING, HAS_BIAS, ACCUMULATE, TMA_STORE)
                _store(right_1, out, piece, scale, g, m + _HALF, n + _HALF, row_start, row_end, op.N, KIND, SCALING, HAS_BIAS, ACCUMULATE, TMA_STORE)
            _store(left_0, out, piece, scale, g, m, n, row_start, row_end, op.N, KIND, SCALING, HAS_BIAS, ACCUMULATE, TMA_STORE)
            _store(right_0, out, piece, scale, g, m, n + _HALF, row_start, row_end, op.N, KIND, SCALING, HAS_BIAS, ACCUMULATE, TMA_STORE)
            tile += gl.num_programs(0)
        first_tile += tiles
        start = end
    tma.store_wait(0)


# Not specialized on what changes from call to call: a new number of tokens must not compile a new kernel.
@gluon.jit(do_not_specialize=["groups", "M", "K", "scale_a_ld", "scale_b_ld", "scale_b_k", "padding", "c_group"])
def gemm_kernel(a_desc, b_desc, scale_a_desc, scale_b_desc, c_desc, c, bias, scale_a, scale_b, ends, groups, M, N, K,
                scale_a_ld, scale_b_ld, scale_b_k, padding, c_ld, c_group,
                WARPGROUPS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
                KIND: gl.constexpr, SCALING: gl.constexpr, FAST: gl.constexpr, HAS_BIAS: gl.constexpr,
                ACCUMULATE: gl.constexpr, TMA_STORE: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    """Persistent: launched with num_warps=4 on as many CTAs as fit. REGISTERS is a consumer thread's."""
    BM: gl.constexpr = WARPGROUPS * ROWS
    flat: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    PER: gl.constexpr = 2 if ROWS == 64 else 1  # K blocks a stage
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * PER, BM, _BK], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES * PER, _BN, _BK], b_desc.layout)
    a_scales = gl.allocate_shared_memory(gl.float32, [STAGES * PER, BM], flat)
    b_scales = gl.allocate_shared_memory(gl.float32, [STAGES * PER, _BN if SCALING == _1D1D else 32], flat)
    staging = gl.allocate_shared_memory(gl.bfloat16, [WARPGROUPS, _HALF if TMA_STORE else 8, _HALF], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    op = Operands(a_desc, b_desc, scale_a_desc, scale_b_desc, ends, groups, M, gl.to_tensor(N), K, scale_a_ld,
                  scale_b_ld, scale_b_k, padding)  # fmt: skip
    # `to_tensor`: an argument that equals 1 arrives as a constant
    out = Output(c_desc, c, bias, scale_a, scale_b, gl.to_tensor(c_ld), c_group)
    ring = Ring(a_smem, b_smem, a_scales, b_scales, full, empty)
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (_consume, (op, out, ring, staging, 0, ROWS, BM, STAGES, BAND, KIND, SCALING, FAST, HAS_BIAS, ACCUMULATE, TMA_STORE)),
            (_produce, (op, ring, BM, STAGES, PER, BAND, KIND, SCALING, ACCUMULATE)),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (op, out, ring, staging, 0, ROWS, BM, STAGES, BAND, KIND, SCALING, FAST, HAS_BIAS, ACCUMULATE, TMA_STORE)),
            (_consume, (op, out, ring, staging, 1, ROWS, BM, STAGES, BAND, KIND, SCALING, FAST, HAS_BIAS, ACCUMULATE, TMA_STORE)),
            (_produce, (op, ring, BM, STAGES, PER, BAND, KIND, SCALING, ACCUMULATE)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
