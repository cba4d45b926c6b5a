"""How an FP8 GEMM is launched: operands as TMA wants them, the kernel of the device, its configuration.

Everything here is host code over plain tensors and returns without waiting for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import gemm_hopper, gemm_regroup, gemm_tl
from .gemm_hopper_problem import (
    ADD_RING,
    BLOCK_1D1D,
    BLOCK_1D2D,
    BY_TMA,
    DIRECT,
    GROUPED_K,
    GROUPED_M,
    TENSORWISE,
)
from .launch import keep, launch_first, recall, start

BLOCK = 128
_OPERAND = gl.NVMMASharedLayout(128, 8, 2)
_STACKED = gl.NVMMASharedLayout(128, 8, 3)
_SCALES = gl.NVMMASharedLayout(0, 32, 1)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Problem(NamedTuple):
    """One (grouped) GEMM, C = A @ B^T with scales. See `gemm_hopper.py` for the kinds.

    a, b: FP8, `[rows, K]`, b grouped over M `[groups, rows, K]`; scale_a, scale_b: FP32, 1D scales `[rows, blocks]`, 2D
    `[row blocks, blocks]` or `[groups, row blocks, blocks]`, tensorwise `[groups]`; ends: int32 `[groups]` on the
    device, or None; padding: grouped over K, each group's tokens begin at the next multiple of it.
    """

    kind: int
    scaling: int
    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    out: Tensor
    ends: Tensor | None = None
    bias: Tensor | None = None
    accumulate: bool = False
    fast: bool = False
    padding: int = 1

    @property
    def groups(self) -> int:
        return 1 if self.ends is None else self.ends.numel()

    @property
    def M(self) -> int:  # noqa: N802
        return self.a.shape[0]

    @property
    def N(self) -> int:  # noqa: N802
        return self.b.shape[-2]

    @property
    def K(self) -> int:  # noqa: N802
        return self.a.shape[1]


@dataclass(frozen=True)
class HopperConfig:
    """Rows a consumer warpgroup (tiles are twice that), stages of the ring, tile rows a band (L2 reuse), buffers of a
    warpgroup for results on their way (1, 2, or 4: each of a tile's pieces has its own)."""

    rows: int
    stages: int
    band: int = 8
    buffers: int = 1


LARGE = HopperConfig(rows=128, stages=3, buffers=4)  # 256 x 128 tiles
SMALL = HopperConfig(rows=64, stages=3)  # 128 x 128 tiles, two K blocks a stage
ADDING = HopperConfig(rows=128, stages=3, buffers=2)  # 256 x 128 tiles of FP32 results, which TMA writes or adds
FAST = HopperConfig(rows=128, stages=4)  # 256 x 128 tiles, and nothing to promote meanwhile
SMALL_COST = 1.07  # time of a 256 x 128 tile's work in two small ones
DEEP = 2048  # where a contraction as long as this hides that TMA adds to C


def hopper_config(problem: Problem, programs: int = 132) -> HopperConfig:
    """The configuration of the Gluon kernel for a problem: measured, see docs/gemm_kernels.md.

    Large tiles read less and are faster where they fill the device as well. FP32 results go through small ones under
    tensorwise scales, which gain little from large ones and add a tile of C in their ring; and where a short
    contraction is added to C.
    """
    if problem.fast:
        return FAST
    large = LARGE
    if problem.accumulate or problem.kind == GROUPED_K or problem.scaling == BLOCK_1D1D:
        if problem.scaling != BLOCK_1D1D or problem.out.dtype != torch.float32:
            return SMALL
        depth = problem.K // (problem.groups if problem.kind == GROUPED_K else 1)
        if problem.accumulate and depth < DEEP:
            return SMALL
        large = ADDING
    return SMALL if SMALL_COST * _rounds(problem, SMALL, programs) < _rounds(problem, large, programs) else large


def _rounds(problem: Problem, config: HopperConfig, programs: int) -> int:
    """Rows of tiles that a program works on, one after the other, if groups are alike."""
    groups = problem.groups if problem.kind == GROUPED_M else 1
    row_tiles = groups * triton.cdiv(triton.cdiv(problem.M, groups), 2 * config.rows)
    tiles = row_tiles * triton.cdiv(problem.N, BLOCK) * (problem.groups if problem.kind == GROUPED_K else 1)
    return triton.cdiv(tiles, programs) * config.rows


@cache
def multiprocessors(index: int | None) -> int:
    """Multiprocessors of CUDA device `index`; without one (compiling ahead of time) an H200's."""
    return 132 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


@cache
def _is_hopper(index: int | None) -> bool:
    return index is None or torch.cuda.get_device_capability(index) == (9, 0)


A, B, SCALE_A, SCALE_B, OUT, ENDS, BIAS = (
    Problem._fields.index(name) for name in ("a", "b", "scale_a", "scale_b", "out", "ends", "bias")
)


class Described(NamedTuple):
    """What a launch reads of a tensor descriptor: one that Triton has checked before, of another tensor.

    round_f32_to_tf32: what Triton 3.7 reads besides.
    """

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


class Repeat(NamedTuple):
    """The launch of a problem, for problems that differ in addresses only.

    described: (tensor's place in `Problem`, shape, strides) of each descriptor. pointers: places of the pointers. rest:
    sizes and constants.
    """

    compiled: CompiledKernel
    grid: tuple[int, int, int]
    described: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    pointers: tuple[int, ...]
    rest: tuple

    def __call__(self, problem: Problem, device: int) -> None:
        arguments = [Described(problem[place], shape, strides) for place, shape, strides in self.described]
        arguments += [problem[place].data_ptr() for place in self.pointers]
        start(self.compiled, self.grid, device, [*arguments, *self.rest])


repeats: dict[tuple, Repeat] = {}
older: dict[tuple, Repeat] = {}


def repeated(problem: Problem, backend: str | None = None) -> bool:
    """Runs a problem if one of its kind has been run, and so checked, before; False: it has not."""
    key = _facts(problem, backend)
    repeat = repeats.get(key) or recall(key, repeats, older)
    if repeat is not None:
        repeat(problem, key[0])
    return repeat is not None


def launch(problem: Problem, backend: str | None = None) -> None:
    """Runs a problem. backend: "gluon", "tl", or None for the one that suits the device."""
    key = _facts(problem, backend)
    if is_empty(problem):
        return
    whole = regrouped(problem)
    index = problem.a.get_device() if problem.a.is_cuda else None
    if backend is None:
        backend = "gluon" if _is_hopper(index) else "tl"
    repeat = {"gluon": _launch_gluon, "tl": _launch_tl}[backend](whole, index)
    if repeat is not None and whole is problem:
        keep(key, repeat, repeats, older)


def _facts(p: Problem, backend: str | None) -> tuple:
    """All that a problem's launch follows from besides addresses; the device first."""
    tensors = p[A : BIAS + 1]
    alike = [None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() & 15) for x in tensors]
    return p.a.get_device(), backend, hopper_config, p.kind, p.scaling, p.accumulate, p.fast, p.padding, *alike


def is_empty(p: Problem) -> bool:
    """Whether there is nothing to multiply; then C is already what it should be."""
    if p.out.numel() == 0 or p.groups == 0:
        return True
    if p.K == 0:
        if not p.accumulate:
            p.out.zero_()
        if p.bias is not None:
            p.out += p.bias
    return p.K == 0


def regrouped(p: Problem) -> Problem:
    """The problem with groups of tokens where TMA can read them: at multiples of 16 bytes."""
    if p.kind != GROUPED_K or p.padding % 16 == 0:
        return p
    a, b = (gemm_regroup.regroup(aligned(x), p.ends, p.padding, 16) for x in (p.a, p.b))
    return p._replace(a=a, b=b, padding=16)


def _launch_gluon(p: Problem, index: int | None) -> Repeat | None:
    config = hopper_config(p, multiprocessors(index))
    BM = 2 * config.rows
    scale_a, scale_a_ld, *_ = flat_scales(p.scale_a, p.scaling != TENSORWISE)
    scale_b, scale_b_ld, scale_b_k, scale_b_group = flat_scales(p.scale_b, p.scaling == BLOCK_1D1D)
    a_desc = GluonDescriptor.from_tensor(aligned(p.a), [BM, BLOCK], _OPERAND)
    if p.kind == GROUPED_M:
        b_desc = GluonDescriptor.from_tensor(aligned(p.b), [1, BLOCK, BLOCK], _STACKED)
    else:
        b_desc = GluonDescriptor.from_tensor(aligned(p.b), [BLOCK, BLOCK], _OPERAND)
    scale_a_desc = scale_b_desc = a_desc  # unused by tensorwise
    if p.scaling != TENSORWISE:
        scale_a_desc = GluonDescriptor(scale_a, [scale_a.numel()], [1], [BM], _SCALES)
        width = 32 if p.scaling == BLOCK_1D2D else BLOCK
        scale_b_desc = GluonDescriptor(scale_b, [scale_b.numel()], [1], [width], _SCALES)
    mode = _store_mode(p, config)
    c_desc = a_desc  # unused unless C goes by TMA
    if mode != DIRECT:
        piece = gl.NVMMASharedLayout(128, 8 * p.out.itemsize, p.out.dim())
        c_desc = GluonDescriptor.from_tensor(p.out, [1, 64, 64][-p.out.dim() :], piece)
    sizes = (p.groups, p.M, p.N, p.K, scale_a_ld, scale_b_ld, scale_b_k, scale_b_group, p.padding, p.out.stride(-2),
             p.out.stride(0))  # fmt: skip
    constants = {
        "ROWS": config.rows, "STAGES": config.stages, "BAND": config.band,
        "KIND": p.kind, "SCALING": p.scaling, "FAST": p.fast, "HAS_BIAS": p.bias is not None,
        "ACCUMULATE": p.accumulate, "STORE": mode,
        "BUFFERS": config.buffers if mode == BY_TMA else 1,
    }  # fmt: skip
    scales = (A, A) if p.scaling == TENSORWISE else (SCALE_A, SCALE_B)
    return _run(p, gemm_hopper.gemm_kernel, index, grid(p, BM, multiprocessors(index)),
                (a_desc, b_desc, scale_a_desc, scale_b_desc, c_desc), (A, B, *scales, A if mode == DIRECT else OUT),
                _pointers(p, scale_a, scale_b), sizes, constants, {"num_warps": 4, "maxnreg": 168})  # fmt: skip


def _launch_tl(p: Problem, index: int | None) -> Repeat | None:
    BM, BN = 128, 64 if p.kind == GROUPED_K else 128  # the masked last block of a group spills at 128
    scale_a, scale_a_ld, *_ = flat_scales(p.scale_a, p.scaling != TENSORWISE)
    scale_b, scale_b_ld, scale_b_k, scale_b_group = flat_scales(p.scale_b, p.scaling == BLOCK_1D1D)
    a_desc = TensorDescriptor.from_tensor(aligned(p.a), [BM, BLOCK])
    b_desc = TensorDescriptor.from_tensor(aligned(p.b), [1, BN, BLOCK] if p.kind == GROUPED_M else [BN, BLOCK])
    sizes = (p.groups, p.M, p.N, p.K, scale_a_ld, scale_b_ld, scale_b_k, scale_b_group, p.padding, p.out.stride(-2),
             p.out.stride(0))  # fmt: skip
    constants = {
        "BM": BM, "BN": BN, "BAND": 8, "KIND": p.kind, "SCALING": p.scaling, "FAST": p.fast,
        "HAS_BIAS": p.bias is not None, "ACCUMULATE": p.accumulate,
    }  # fmt: skip
    return _run(p, gemm_tl.gemm_kernel, index, grid(p, BM, multiprocessors(index)), (a_desc, b_desc), (A, B),
                _pointers(p, scale_a, scale_b), sizes, constants, {"num_warps": 8, "num_stages": 4})  # fmt: skip


def _run(
    p: Problem, kernel: Any, index: int | None, grid: tuple[int], descriptors: tuple, places: tuple[int, ...],
    pointers: tuple[Tensor, ...], sizes: tuple[int, ...], constants: dict[str, Any], options: dict[str, int],
) -> Repeat | None:  # fmt: skip
    """`run`, and how to do it again; None where operands were copied. places: of the descriptors' tensors in `p`."""
    compiled = run(kernel, index, grid, descriptors, pointers, sizes, constants, options)
    of_pointers = OUT, OUT if p.bias is None else BIAS, SCALE_A, SCALE_B, SCALE_A if p.ends is None else ENDS
    used = (*(d.base for d in descriptors), *pointers)
    as_given = all(p[i].data_ptr() == x.data_ptr() for i, x in zip((*places, *of_pointers), used, strict=True))
    if compiled is None or not as_given:
        return None
    described = tuple((place, d.shape, d.strides) for place, d in zip(places, descriptors, strict=True))
    return Repeat(compiled, (*grid, 1, 1), described, of_pointers, (*sizes, *constants.values()))


_compiled: dict[tuple, CompiledKernel] = {}


def run(kernel: Any, index: int | None, grid: tuple[int], descriptors: tuple, pointers: tuple[Tensor, ...],
         sizes: tuple[int, ...], constants: dict[str, Any],
         options: dict[str, int]) -> CompiledKernel | None:  # fmt: skip
    """Launches; from the second time on without Triton's own argument inspection, which costs the host about 0.1 ms.

    The key holds all that Triton specializes these kernels on: pointers by alignment, the sizes N and C's row stride
    by divisibility, the others by their width only.
    """
    specialized = (sizes[2], sizes[-2])
    key = (
        kernel, index, tuple(d.base.dtype for d in descriptors), tuple((t.dtype, t.data_ptr() % 16) for t in pointers),
        tuple((n == 1, n % 16 == 0) for n in specialized), tuple(n >= 2**31 for n in sizes), *constants.values(),
    )  # fmt: skip
    compiled = _compiled.get(key)
    arguments = (*descriptors, *pointers, *sizes)
    if compiled is not None:
        start(compiled, (*grid, 1, 1), -1 if index is None else index, [*arguments, *constants.values()])
        return compiled
    compiled = launch_first(kernel, grid, arguments, {**constants, **options})
    if compiled is not None:
        _compiled[key] = compiled
    return compiled


def _pointers(p: Problem, scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, ...]:
    """c, bias, scale_a, scale_b, ends: what is absent is a tensor that the kernel does not touch."""
    ends = p.ends if p.ends is not None else scale_a.view(torch.int32)
    return p.out, p.bias if p.bias is not None else p.out, scale_a, scale_b, ends


def grid(p: Problem, BM: int, programs: int) -> tuple[int]:
    """Never more programs than there can be tiles; with groups their number is known on the device only."""
    row_tiles = triton.cdiv(p.M, BM) + (p.groups if p.kind == GROUPED_M else 0)
    tiles = row_tiles * triton.cdiv(p.N, BLOCK) * (p.groups if p.kind == GROUPED_K else 1)
    return (min(programs, tiles),)


def _store_mode(p: Problem, config: HopperConfig) -> int:
    """How C is written: by TMA where that can address it and the epilogue knows the case."""
    if tma_ready(p.out):
        if p.accumulate and p.out.dtype == torch.float32 and config.rows == 64 and p.bias is None:
            return ADD_RING
        if not p.accumulate and p.out.dtype == torch.bfloat16 and p.kind != GROUPED_K:
            return BY_TMA
        if config.buffers == 2 and p.out.dtype == torch.float32:
            return BY_TMA
    return DIRECT


def tma_ready(x: Tensor) -> bool:
    """Whether TMA can address a matrix, or a stack of them: contiguous rows, 16-byte aligned base and strides."""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(n * x.itemsize % 16 for n in x.stride()[:-1])


def aligned(x: Tensor) -> Tensor:
    """x if TMA can address it, else a copy with padded rows."""
    if tma_ready(x):
        return x
    step = 16 // x.itemsize
    copy = x.new_empty(*x.shape[:-1], -(-x.shape[-1] // step) * step)[..., : x.shape[-1]]
    return copy.copy_(x)


def flat_scales(scale: Tensor, one_dimensional: bool) -> tuple[Tensor, int, int, int]:
    """(memory as one flat tensor, strides between rows of blocks, along K, between groups), for the kernels.

    1D scales `[rows, blocks]` must be contiguous along rows (the first stride is then along K), 2D ones `[row blocks,
    blocks]` or `[groups, row blocks, blocks]` any strides. What is not so is copied. 16-byte alignment is kept.
    """
    if scale.dim() == 1:
        return scale, 0, 0, 0
    group = 0
    if one_dimensional:
        if scale.stride(0) != 1 or scale.stride(1) % 4 or scale.data_ptr() % 16:
            rows = -(-scale.shape[0] // 4) * 4
            scale = scale.new_empty(scale.shape[1], rows)[:, : scale.shape[0]].t().copy_(scale)
        ld, k_stride = scale.stride(1), scale.stride(1)
    else:
        if scale.data_ptr() % 16:
            scale = scale.clone(memory_format=torch.contiguous_format)  # `contiguous` leaves one row where it is
        ld, k_stride = scale.stride(-2), scale.stride(-1)
        group = scale.stride(0) if scale.dim() == 3 else 0
    size = 1 + sum((n - 1) * s for n, s in zip(scale.shape, scale.stride(), strict=True))
    if size >= 2**31:
        raise ValueError(f"{size} scales are more than TMA's 32-bit coordinates reach: split the GEMM's rows")
    return scale.as_strided((size,), (1,)), ld, k_stride, group
