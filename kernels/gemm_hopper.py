"""Warp-specialized FP8 GEMM for Hopper, in Gluon: one kernel for dense, grouped-M and grouped-K problems.

    C[M, N] (+)= sum over 128-wide blocks k of (A_k @ B_k^T) * scale_inv_a * scale_inv_b

A CTA is one producer warp and two consumer warpgroups, and walks over tiles of C. The producer fills a ring of
shared-memory stages by TMA: A, B and the scales that go with them, so that consumers wait on one `mbarrier` a stage and
never on global memory. It runs ahead into the next tile while consumers store the last one. Consumers multiply and
promote (gemm_hopper_contract.py): Hopper's FP8 tensor cores keep few fraction bits while they accumulate, so that
promotion is also what makes a tensorwise product accurate. Problem kinds: see gemm_hopper_problem.py.
"""

# ruff: noqa: SIM300 - options are constants, but not the ones to compare with
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .gemm_hopper_contract import contract_fast, contract_halves, contract_pairs
from .gemm_hopper_problem import (
    BK,
    BLOCK_1D1D,
    BLOCK_1D2D,
    BN,
    FIRST_BARRIER,
    HALF,
    TENSORWISE,
    Operands,
    Options,
    Output,
    Ring,
    aligned,
    bar_sync,
    block_1d1d,
    block_1d2d,
    c_buffer,
    group_of,
    grouped_k,
    grouped_m,
    next_stage,
    one_of_stack,
    release,
    scales_2d_at,
    tensorwise,
    tile_at,
)


@gluon.constexpr_function
def block_bytes(BM, SCALING):
    """Bytes that TMA writes for one K block."""
    a_scales = BM * 4 if SCALING != TENSORWISE else 0
    b_scales = {TENSORWISE: 0, BLOCK_1D2D: 128, BLOCK_1D1D: 128 * 4}[SCALING]
    return (BM + 128) * 128 + a_scales + b_scales


@gluon.jit
def _await_empty(ring, stage, phase, filled, o):
    if o.NAMED:
        if filled >= o.STAGES:
            bar_sync(gl.to_tensor(FIRST_BARRIER) + stage, gl.to_tensor(288))
    else:
        mbarrier.wait(ring.empty.index(stage), phase)


@gluon.jit
def _prefetch_c(op, out, g, m, n, o):
    """Starts to bring a tile of C into L2, from where it is added to after the tile's products."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0])
    rows = gl.minimum(m + gl.arange(0, o.BM, gl.SliceLayout(1, layout)), op.M - 1).to(gl.int64)
    columns = gl.minimum(n + gl.arange(0, BN // 32, gl.SliceLayout(0, layout)) * 32, op.N - 1)  # 128 bytes apart
    base = out.ptr
    if o.KIND == grouped_k:
        base += g.to(gl.int64) * out.group_stride
    lines = base + gl.expand_dims(rows * out.ld, 1) + gl.expand_dims(columns, 0)
    gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(gl.int64)], dtype=gl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _produce(op, out, ring, o):
    """The producer warp: fills stages, tile after tile; after a tile's K blocks the tile of C, if that is added to."""
    nbytes: gl.constexpr = o.PER_STAGE * block_bytes(o.BM, o.SCALING)
    stage = 0
    phase = 1
    filled = 0
    tile = gl.program_id(0)
    first_tile = 0
    start = 0
    column = 0  # grouped over K: where the group's tokens begin, and the first block of its scales
    first_block = 0
    for g in range(op.groups):
        end, rows, depth, tiles = group_of(op, g, start, o)
        blocks = gl.cdiv(depth, BK)
        while tile < first_tile + tiles:
            m, n = tile_at(tile - first_tile, rows, op.N, o)
            a_row = m
            if o.KIND == grouped_m:
                a_row += aligned(start)
            scale_b = scales_2d_at(op, g, n, o)
            if o.PREFETCH:
                _prefetch_c(op, out, g, m, n, o)
            for k in range(0, blocks, o.PER_STAGE):
                _await_empty(ring, stage, phase, filled, o)
                filled += 1
                bar = ring.full.index(stage)
                mbarrier.expect(bar, nbytes)
                for i in gl.static_range(o.PER_STAGE):
                    slot = stage * o.PER_STAGE + i
                    at_k = column + (k + i) * BK
                    tma.async_copy_global_to_shared(op.a, [a_row, at_k], bar, ring.a.index(slot))
                    if o.KIND == grouped_m:
                        tma.async_copy_global_to_shared(op.b, [g, n, at_k], bar, one_of_stack(ring.b, slot))
                    else:
                        tma.async_copy_global_to_shared(op.b, [n, at_k], bar, ring.b.index(slot))
                    if o.SCALING != tensorwise:
                        at = (first_block + k + i) * op.scale_a_ld + a_row
                        tma.async_copy_global_to_shared(op.scale_a, [at], bar, ring.scale_a.index(slot))
                        if o.SCALING == block_1d2d:
                            at = aligned(scale_b + (k + i) * op.scale_b_k)
                        else:
                            at = (first_block + k + i) * op.scale_b_ld + n
                        tma.async_copy_global_to_shared(op.scale_b, [at], bar, ring.scale_b.index(slot))
                stage, phase = next_stage(stage, phase, o)
            if o.C_BY_RING:
                _await_empty(ring, stage, phase, filled, o)
                filled += 1
                bar = ring.full.index(stage)
                mbarrier.expect(bar, 4 * HALF * HALF * 4)
                c_row = m
                if o.KIND == grouped_k:
                    c_row += g * op.M
                for i in gl.static_range(2):
                    at = n + i * HALF
                    tma.async_copy_global_to_shared(out.desc, [c_row, at], bar, c_buffer(ring.a, stage, i))
                    tma.async_copy_global_to_shared(out.desc, [c_row + HALF, at], bar, c_buffer(ring.b, stage, i))
                stage, phase = next_stage(stage, phase, o)
            tile += gl.num_programs(0)
        first_tile += tiles
        start = end
        if o.KIND == grouped_k:
            first_block += blocks
            column += gl.cdiv(depth, op.padding) * op.padding
    if o.NAMED:  # no barrier may be left half full
        for i in gl.static_range(o.STAGES):
            if filled > i:
                bar_sync(gl.to_tensor(FIRST_BARRIER) + i, gl.to_tensor(288))


@gluon.jit
def _store_direct(x, out, g, row, column, row_start, row_end, N, o):
    """From registers, inside [row_start, row_end) only; adds to what is there if asked."""
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    inside = rows < row_end
    if o.KIND == grouped_m:
        inside &= rows >= row_start
    mask = gl.expand_dims(inside, 1) & (gl.expand_dims(columns, 0) < N)
    base = out.ptr
    if o.KIND == grouped_k:
        base += g.to(gl.int64) * out.group_stride
    ptr = base + gl.expand_dims(rows.to(gl.int64) * out.ld, 1) + gl.expand_dims(columns, 0)
    if o.ACCUMULATE:
        x += gl.load(ptr, mask=mask, other=0.0).to(gl.float32)
    gl.store(ptr, x.to(out.ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _store_tma(x, out, staging, row, column, o):
    if o.STAGING == 1:
        tma.store_wait(0)
    staging.store(x.to(staging.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out.desc, [row, column], staging)


@gluon.jit
def _add_in_ring(x, out, buffer, scale, row, column, o):
    """Adds one 64 x 64 piece to C's, which the producer has put into `buffer`, and sends it back from there."""
    if o.SCALING == tensorwise:
        x *= scale
    buffer.store(buffer.load(x.type.layout) + x)
    fence_async_shared()
    tma.async_copy_shared_to_global(out.desc, [row, column], buffer)


@gluon.jit
def _store(x, out, staging, scale, g, row, column, row_start, row_end, N, o):
    """Writes one 64 x 64 piece. By TMA, which clips at C's edges, unless the piece crosses an end of its group."""
    if o.SCALING == tensorwise:
        x *= scale
    if o.HAS_BIAS:
        columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        bias = gl.load(out.bias + columns, mask=columns < N, other=0.0).to(gl.float32)
        x += gl.expand_dims(bias, 0)
    if not o.TMA_STORE:
        _store_direct(x, out, g, row, column, row_start, row_end, N, o)
    elif o.KIND == grouped_m:
        if (row >= row_start) & (row + HALF <= row_end):
            _store_tma(x, out, staging, row, column, o)
        else:
            _store_direct(x, out, g, row, column, row_start, row_end, N, o)
    else:
        _store_tma(x, out, staging, row, column, o)


@gluon.jit
def _consume(op, out, ring, staging, WARPGROUP: gl.constexpr, o):
    """One consumer warpgroup: rows [WARPGROUP * ROWS, + ROWS) of each of the CTA's tiles."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = WARPGROUP * o.ROWS
    stage = 0
    phase = 0
    tile = gl.program_id(0)
    first_tile = 0
    start = 0
    scale = 1.0
    for g in range(op.groups):
        end, rows, depth, tiles = group_of(op, g, start, o)
        while tile < first_tile + tiles:
            m, n = tile_at(tile - first_tile, rows, op.N, o)
            m += ROW
            row_start = 0
            row_end = op.M
            if o.KIND == grouped_m:
                m += aligned(start)
                row_start = start
                row_end = end
            b_at = scales_2d_at(op, g, n, o)
            if o.SCALING == tensorwise:
                scale = gl.load(out.scale_a + g) * gl.load(out.scale_b + g)
            if o.ROWS == 64:
                left, right, stage, phase = contract_pairs(ring, stage, phase, depth, b_at, op.scale_b_k, ROW, MMA, o)
                if o.STAGING > 1:
                    tma.store_wait(0)  # of the tile before
            else:
                if o.FAST:
                    left, right, left_1, right_1, stage, phase = contract_fast(ring, stage, phase, depth, ROW, MMA, o)
                else:
                    left, right, left_1, right_1, stage, phase = contract_halves(
                        ring, stage, phase, depth, b_at, op.scale_b_k, ROW, MMA, o
                    )
                if o.STAGING > 1:
                    tma.store_wait(0)  # of the tile before
                piece = staging.index(WARPGROUP * o.STAGING + 2 % o.STAGING)
                _store(left_1, out, piece, scale, g, m + HALF, n, row_start, row_end, op.N, o)
                piece = staging.index(WARPGROUP * o.STAGING + 3 % o.STAGING)
                _store(right_1, out, piece, scale, g, m + HALF, n + HALF, row_start, row_end, op.N, o)
            if o.C_BY_RING:
                mbarrier.wait(ring.full.index(stage), phase)
                c_row = m
                if o.KIND == grouped_k:
                    c_row += g * op.M
                operand = ring.a
                if WARPGROUP == 1:
                    operand = ring.b
                _add_in_ring(left, out, c_buffer(operand, stage, 0), scale, c_row, n, o)
                _add_in_ring(right, out, c_buffer(operand, stage, 1), scale, c_row, n + HALF, o)
                tma.store_wait(0)
                release(ring, stage, o)
                stage, phase = next_stage(stage, phase, o)
            else:
                piece = staging.index(WARPGROUP * o.STAGING)
                _store(left, out, piece, scale, g, m, n, row_start, row_end, op.N, o)
                piece = staging.index(WARPGROUP * o.STAGING + 1 % o.STAGING)
                _store(right, out, piece, scale, g, m, n + HALF, row_start, row_end, op.N, o)
            tile += gl.num_programs(0)
        first_tile += tiles
        start = end
    tma.store_wait(0)


# Not specialized on what changes from call to call: a new number of tokens must not compile a new kernel.
@gluon.jit(do_not_specialize=["groups", "M", "K", "scale_a_ld", "scale_b_ld", "scale_b_k", "scale_b_group",
                               "padding", "c_group"])
def gemm_kernel(a_desc, b_desc, scale_a_desc, scale_b_desc, c_desc, c, bias, scale_a, scale_b, ends, groups, M, N, K,
                scale_a_ld, scale_b_ld, scale_b_k, scale_b_group, padding, c_ld, c_group,
                ROWS: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
                KIND: gl.constexpr, SCALING: gl.constexpr, FAST: gl.constexpr, HAS_BIAS: gl.constexpr,
                ACCUMULATE: gl.constexpr, TMA_STORE: gl.constexpr, C_BY_RING: gl.constexpr, PREFETCH: gl.constexpr,
                STAGING: gl.constexpr, NAMED: gl.constexpr, ORDER: gl.constexpr):  # fmt: skip
    """Persistent, one CTA a multiprocessor. Launched with num_warps=4 (one consumer warpgroup; Gluon adds the other and
    the producer) and maxnreg=168, of which consumers get 240 registers a thread and the producer 24."""
    o: gl.constexpr = Options(ROWS, STAGES, BAND, KIND, SCALING, FAST, HAS_BIAS, ACCUMULATE, TMA_STORE, C_BY_RING,
                              PREFETCH, STAGING, NAMED, ORDER)  # fmt: skip
    SLOTS: gl.constexpr = STAGES * o.PER_STAGE
    flat: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [SLOTS, o.BM, BK], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [SLOTS, BN, BK], a_desc.layout)
    a_scales = gl.allocate_shared_memory(gl.float32, [SLOTS, o.BM], flat)
    b_scales = gl.allocate_shared_memory(gl.float32, [SLOTS, BN if SCALING == block_1d1d else 32], flat)
    piece: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    staging = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGING, HALF if TMA_STORE else 8, HALF], piece)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    # `to_tensor`: an argument that equals 1 arrives as a constant.
    op = Operands(a_desc, b_desc, scale_a_desc, scale_b_desc, ends, groups, M, gl.to_tensor(N), K, scale_a_ld,
                  scale_b_ld, scale_b_k, scale_b_group, padding)  # fmt: skip
    out = Output(c_desc, c, bias, scale_a, scale_b, gl.to_tensor(c_ld), c_group)
    ring = Ring(a_smem, b_smem, a_scales, b_scales, full, empty)
    gl.warp_specialize([
        (_consume, (op, out, ring, staging, 0, o)),
        (_consume, (op, out, ring, staging, 1, o)),
        (_produce, (op, out, ring, o)),
    ], [4, 1], [240, 24])  # fmt: skip
