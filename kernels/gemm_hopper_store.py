"""How the Hopper GEMM's consumers write their tiles: 64 x 64 pieces, from registers or through shared memory by TMA.

Where C is added to (FP32 wgrads), there are two ways. 256 x 128 tiles: TMA adds pieces to C in L2, so that nobody waits
for C; as there, subnormal sums become zero. 128 x 128 tiles: C comes by TMA too. A tile of C is exactly a stage of the
ring, and follows the tile's K blocks there; consumers add to it where it lies and send it back.
"""

# ruff: noqa: SIM300 - options are constants, but not the ones to compare with
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from .gemm_hopper_problem import HALF, direct, grouped_k, grouped_m, tensorwise


@aggregate
class Output:
    """Where the result goes. buffers: 64 x 64 pieces on their way, those of a warpgroup in a row."""

    desc: tma.tensor_descriptor
    ptr: gl.tensor
    bias: gl.tensor
    scale_a: gl.tensor  # tensorwise: one scale a group
    scale_b: gl.tensor
    ld: gl.tensor
    group_stride: gl.tensor
    buffers: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, desc, ptr, bias, scale_a, scale_b, ld, group_stride, buffers):
        self.desc = desc
        self.ptr = ptr
        self.bias = bias
        self.scale_a = scale_a
        self.scale_b = scale_b
        self.ld = ld
        self.group_stride = group_stride
        self.buffers = buffers


@gluon.jit
def _piece(operand, index):
    """A slot of A or of B, 128 x 128 bytes, as 64 x 64 FP32 numbers."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    return operand._reinterpret(gl.float32, [operand.shape[0], HALF, HALF], layout).index(index)


@gluon.jit
def _stacked_piece(operand, index):
    """The same as a `[1, 64, 64]` block, which is how TMA addresses a stack of matrices."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 3)
    return operand._reinterpret(gl.float32, [operand.shape[0], 1, HALF, HALF], layout).index(index)


@gluon.jit
def _load_c(out, bar, memory, index, g, row, column, o):
    if o.KIND == grouped_k:
        tma.async_copy_global_to_shared(out.desc, [g, row, column], bar, _stacked_piece(memory, index))
    else:
        tma.async_copy_global_to_shared(out.desc, [row, column], bar, _piece(memory, index))


@gluon.jit
def load_stage(out, ring, stage, g, row, column, o):
    """Starts the way of a 128 x 128 tile of C into a stage: the first warpgroup's part lies where A does."""
    bar = ring.full.index(stage)
    mbarrier.expect(bar, 4 * HALF * HALF * 4)
    for i in gl.static_range(2):
        _load_c(out, bar, ring.a, 2 * stage + i, g, row, column + i * HALF, o)
        _load_c(out, bar, ring.b, 2 * stage + i, g, row + HALF, column + i * HALF, o)


@gluon.jit
def _scaled(x, scale, o):
    """x under tensorwise scales; rounded before it is added to C, as if it were added later."""
    if o.SCALING == tensorwise:
        if o.ACCUMULATE:
            scales = gl.full(x.shape, 1.0, gl.float32, x.type.layout) * scale
            x = gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, scales], dtype=gl.float32,
                                          is_pure=True, pack=1)  # fmt: skip
        else:
            x *= scale
    return x


@gluon.jit
def _add(x, out, memory, index, scale, g, row, column, o):
    """Adds to a piece of C that has come, and sends it back."""
    x = _scaled(x, scale, o)
    piece = _piece(memory, index)
    piece.store(piece.load(x.type.layout) + x)
    fence_async_shared()
    if o.KIND == grouped_k:
        tma.async_copy_shared_to_global(out.desc, [g, row, column], _stacked_piece(memory, index))
    else:
        tma.async_copy_shared_to_global(out.desc, [row, column], piece)


@gluon.jit
def add_stage(left, right, out, ring, stage, phase, WARPGROUP: gl.constexpr, scale, g, row, column, o):
    """Adds a warpgroup's part of a tile to what `load_stage` sent for."""
    mbarrier.wait(ring.full.index(stage), phase)
    memory = ring.a
    if WARPGROUP == 1:
        memory = ring.b
    _add(left, out, memory, 2 * stage, scale, g, row, column, o)
    _add(right, out, memory, 2 * stage + 1, scale, g, row, column + HALF, o)


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


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Adds an FP32 block of shared memory to the tensor's, in L2. (What Gluon's `tma` lacks.)"""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@gluon.jit
def _store_tma(x, out, buffer, g, row, column, o):
    if o.BUFFERS <= 2:  # until this buffer has been read; with four, all of the tile before are waited for at once
        tma.store_wait(o.BUFFERS - 1)
    piece = out.buffers.index(buffer)
    piece.store(x.to(piece.dtype))
    fence_async_shared()
    if o.ACCUMULATE:
        if o.KIND == grouped_k:
            async_add_shared_to_global(out.desc, [g, row, column], _stacked_piece(out.buffers, buffer))
        else:
            async_add_shared_to_global(out.desc, [row, column], piece)
    elif o.KIND == grouped_k:
        tma.async_copy_shared_to_global(out.desc, [g, row, column], _stacked_piece(out.buffers, buffer))
    else:
        tma.async_copy_shared_to_global(out.desc, [row, column], piece)


@gluon.jit
def store(x, out, buffer, scale, g, row, column, row_start, row_end, N, o):
    """Writes one 64 x 64 piece. By TMA, which clips at C's edges, unless the piece crosses an end of its group."""
    x = _scaled(x, scale, o)
    if o.HAS_BIAS:
        columns = column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        bias = gl.load(out.bias + columns, mask=columns < N, other=0.0).to(gl.float32)
        x += gl.expand_dims(bias, 0)
    if o.STORE == direct:
        _store_direct(x, out, g, row, column, row_start, row_end, N, o)
    elif o.KIND == grouped_m:
        if (row >= row_start) & (row + HALF <= row_end):
            _store_tma(x, out, buffer, g, row, column, o)
        else:
            _store_direct(x, out, g, row, column, row_start, row_end, N, o)
    else:
        _store_tma(x, out, buffer, g, row, column, o)
