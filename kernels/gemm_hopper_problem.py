"""What the partitions of the Hopper GEMM share: the problem, its walk over tiles, and the ring between them.

Problem kinds: dense; grouped over M: A's rows are sorted by group, `ends[g]` is one past group g's last row, B is
`[G, N, K]` (fprop and dgrad of experts); grouped over K: the contraction runs over a group's tokens, A is `[M, T]`, B
`[N, T]`, C `[G, M, N]` (wgrad). Group sizes are read on the device; they need not be multiples of a tile.
"""

# ruff: noqa: SIM300 - options are constants, but not the ones to compare with
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate

DENSE, GROUPED_M, GROUPED_K = 0, 1, 2
TENSORWISE, BLOCK_1D2D, BLOCK_1D1D = 0, 1, 2
# C is written (or added to) from registers; through shared memory by TMA; or added to in a stage of the ring.
DIRECT, BY_TMA, ADD_RING = 0, 1, 2

# The same for kernels, which may read globals only if they are constexprs.
dense, grouped_m, grouped_k = gl.constexpr(DENSE), gl.constexpr(GROUPED_M), gl.constexpr(GROUPED_K)
tensorwise, block_1d2d, block_1d1d = gl.constexpr(TENSORWISE), gl.constexpr(BLOCK_1D2D), gl.constexpr(BLOCK_1D1D)
direct, by_tma, add_ring = gl.constexpr(DIRECT), gl.constexpr(BY_TMA), gl.constexpr(ADD_RING)
BN = gl.constexpr(128)  # tile columns, and the width of a 2D scale's block
BK = gl.constexpr(128)  # K block: the width of a 1D scale's block
HALF = gl.constexpr(64)  # rows of one product of a warpgroup; accumulators are kept as 64 x 64 pieces


@aggregate
class Options:
    """What is known at compile time. Each of the two consumer warpgroups computes ROWS rows of a tile."""

    ROWS: gl.constexpr
    STAGES: gl.constexpr
    BAND: gl.constexpr  # tile rows that are walked together
    KIND: gl.constexpr
    SCALING: gl.constexpr
    FAST: gl.constexpr  # accumulate on the tensor cores
    HAS_BIAS: gl.constexpr
    ACCUMULATE: gl.constexpr  # add to C
    STORE: gl.constexpr  # how C is written
    BUFFERS: gl.constexpr  # of a warpgroup, for pieces of C on their way
    BM: gl.constexpr
    PER_STAGE: gl.constexpr  # K blocks a stage

    @gluon.constexpr_function
    def __init__(self, ROWS, STAGES, BAND, KIND, SCALING, FAST, HAS_BIAS, ACCUMULATE, STORE, BUFFERS):
        self.ROWS = gl.constexpr(ROWS)
        self.STAGES = gl.constexpr(STAGES)
        self.BAND = gl.constexpr(BAND)
        self.KIND = gl.constexpr(KIND)
        self.SCALING = gl.constexpr(SCALING)
        self.FAST = gl.constexpr(FAST)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.ACCUMULATE = gl.constexpr(ACCUMULATE)
        self.STORE = gl.constexpr(STORE)
        self.BUFFERS = gl.constexpr(BUFFERS)
        self.BM = gl.constexpr(2 * ROWS)
        self.PER_STAGE = gl.constexpr(2 if ROWS == 64 else 1)


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
    scale_b_group: gl.tensor
    padding: gl.tensor  # grouped over K: each group's tokens begin at a multiple of it

    @gluon.constexpr_function
    def __init__(self, a, b, scale_a, scale_b, ends, groups, M, N, K, scale_a_ld, scale_b_ld, scale_b_k,
                 scale_b_group, padding):  # fmt: skip
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
        self.scale_b_group = scale_b_group
        self.padding = padding


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


@gluon.jit
def one_of_stack(operand, slot):
    """A slot of A or of B as a `[1, rows, columns]` block, which is how TMA reads from a stack of matrices."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3)
    shape: gl.constexpr = [operand.shape[0], 1, operand.shape[1], operand.shape[2]]
    return operand._reinterpret(operand.dtype, shape, layout).index(slot)


@gluon.jit
def next_stage(stage, phase, o):
    stage += 1
    wrapped = stage == o.STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def group_of(op, g, start, o):
    """Group g, whose first row (or token) is `start`: its end, rows that tiles cover, contraction length, tiles.

    Tiles of a group over M begin at `aligned(start)`, so that the coordinates of scales suit TMA.
    """
    end = op.M
    rows = op.M
    depth = op.K
    if o.KIND == grouped_m:
        end = gl.load(op.ends + g)
        rows = gl.where(end > start, end - aligned(start), 0)
    elif o.KIND == grouped_k:
        end = gl.load(op.ends + g)
        depth = end - start
    tiles = gl.cdiv(rows, o.BM) * gl.cdiv(op.N, BN)
    if o.ACCUMULATE:  # an empty group adds nothing
        tiles = gl.where(depth > 0, tiles, 0)
    return end, rows, depth, tiles


@gluon.jit
def aligned(coordinate):
    """TMA wants the innermost coordinate at a multiple of 16 bytes: four scales."""
    return coordinate // 4 * 4


@gluon.jit
def tile_at(tile, rows, N, o):
    """First row and column of a tile. Bands of o.BAND tile rows, column by column, so that operands stay in L2."""
    row_tiles = gl.cdiv(rows, o.BM)
    in_band = o.BAND * gl.cdiv(N, BN)
    first = tile // in_band * o.BAND
    height = gl.minimum(row_tiles - first, o.BAND)
    tile = tile % in_band
    return (first + tile % height) * o.BM, tile // height * BN


@gluon.jit
def scales_2d_at(op, g, n, o):
    """Where the 2D scales of B's rows n to n + 127 begin."""
    at = n // BN * op.scale_b_ld
    if o.KIND == grouped_m:
        at += g * op.scale_b_group
    return at
