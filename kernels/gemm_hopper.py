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
    HALF,
    TENSORWISE,
    Operands,
    Options,
    Ring,
    add_ring,
    aligned,
    block_1d1d,
    block_1d2d,
    by_tma,
    group_of,
    grouped_k,
    grouped_m,
    next_stage,
    one_of_stack,
    scales_2d_at,
    tensorwise,
    tile_at,
)
from .gemm_hopper_store import Output, add_stage, load_stage, store


@gluon.constexpr_function
def block_bytes(BM, SCALING):
    """Bytes that TMA writes for one K block."""
    a_scales = BM * 4 if SCALING != TENSORWISE else 0
    b_scales = {TENSORWISE: 0, BLOCK_1D2D: 128, BLOCK_1D1D: 128 * 4}[SCALING]
    return (BM + 128) * 128 + a_scales + b_scales


@gluon.jit
def _produce(op, out, ring, o):
    """The producer warp: fills stages, tile after tile."""
    nbytes: gl.constexpr = o.PER_STAGE * block_bytes(o.BM, o.SCALING)
    stage = 0
    phase = 1
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
            for k in range(0, blocks, o.PER_STAGE):
                mbarrier.wait(ring.empty.index(stage), phase)
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
            if o.STORE == add_ring:
                mbarrier.wait(ring.empty.index(stage), phase)
                load_stage(out, ring, stage, g, m, n, o)
                stage, phase = next_stage(stage, phase, o)
            tile += gl.num_programs(0)
        first_tile += tiles
        start = end
        if o.KIND == grouped_k:
            first_block += blocks
            column += gl.cdiv(depth, op.padding) * op.padding


@gluon.jit
def _consume(op, out, ring, WARPGROUP: gl.constexpr, o):
    """One consumer warpgroup: rows [WARPGROUP * ROWS, + ROWS) of each of the CTA's tiles."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROW: gl.constexpr = WARPGROUP * o.ROWS
    FIRST: gl.constexpr = WARPGROUP * o.BUFFERS
    stage = 0
    phase = 0
    late = -1
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
                left, right, stage, phase = contract_pairs(
                    ring, stage, phase, late, depth, b_at, op.scale_b_k, ROW, MMA, o
                )
            elif o.FAST:
                left_0, right_0, left, right, stage, phase = contract_fast(ring, stage, phase, depth, ROW, MMA, o)
            else:
                left_0, right_0, left, right, stage, phase = contract_halves(
                    ring, stage, phase, depth, b_at, op.scale_b_k, ROW, MMA, o
                )
            if o.STORE == by_tma and o.BUFFERS > 2:
                tma.store_wait(0)  # of the tile before
            row = m + o.ROWS - HALF
            if o.STORE == add_ring:
                add_stage(left, right, out, ring, stage, phase, WARPGROUP, scale, g, row, n, o)
                late = stage
                stage, phase = next_stage(stage, phase, o)
            else:
                B: gl.constexpr = o.BUFFERS
                store(left, out, FIRST, scale, g, row, n, row_start, row_end, op.N, o)
                store(right, out, FIRST + 1 % B, scale, g, row, n + HALF, row_start, row_end, op.N, o)
                if o.ROWS == 128:
                    store(left_0, out, FIRST + 2 % B, scale, g, m, n, row_start, row_end, op.N, o)
                    store(right_0, out, FIRST + 3 % B, scale, g, m, n + HALF, row_start, row_end, op.N, o)
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
                ACCUMULATE: gl.constexpr, STORE: gl.constexpr, BUFFERS: gl.constexpr):  # fmt: skip
    """Persistent, one CTA a multiprocessor. Launched with num_warps=4 (one consumer warpgroup; Gluon adds the other and
    the producer) and maxnreg=168, of which consumers get 240 registers a thread and the producer 24."""
    o: gl.constexpr = Options(ROWS, STAGES, BAND, KIND, SCALING, FAST, HAS_BIAS, ACCUMULATE, STORE, BUFFERS)
    SLOTS: gl.constexpr = STAGES * o.PER_STAGE
    SCALES: gl.constexpr = 1 if SCALING == tensorwise else SLOTS  # what is not used takes little room
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [SLOTS, o.BM, BK], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [SLOTS, BN, BK], a_desc.layout)
    flat: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    a_scales = gl.allocate_shared_memory(gl.float32, [SCALES, o.BM], flat)
    b_scales = gl.allocate_shared_memory(gl.float32, [SCALES, BN if SCALING == block_1d1d else 32], flat)
    c_type: gl.constexpr = c.dtype.element_ty
    c_layout: gl.constexpr = gl.NVMMASharedLayout(128, c_type.primitive_bitwidth, 2)
    buffers = gl.allocate_shared_memory(c_type, [2 * BUFFERS, HALF if STORE == by_tma else 8, HALF], c_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    # `to_tensor`: an argument that equals 1 arrives as a constant.
    op = Operands(a_desc, b_desc, scale_a_desc, scale_b_desc, ends, groups, M, gl.to_tensor(N), K, scale_a_ld,
                  scale_b_ld, scale_b_k, scale_b_group, padding)  # fmt: skip
    out = Output(c_desc, c, bias, scale_a, scale_b, gl.to_tensor(c_ld), c_group, buffers)
    ring = Ring(a_smem, b_smem, a_scales, b_scales, full, empty)
    gl.warp_specialize([
        (_consume, (op, out, ring, 0, o)),
        (_consume, (op, out, ring, 1, o)),
        (_produce, (op, out, ring, o)),
    ], [4, 1], [240, 24])  # fmt: skip
