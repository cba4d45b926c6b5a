"""AdamW in one launch a buffer, from gradient sums to new weights: the GPU's version of `megafp8/optimizer/adamw.py`.

What a launch needs to know of the buffer is in two tables on the device, made once: `pieces`, a row for each parameter
that the rank holds some of, and `tasks`, a row for each program. What changes in every step (gradient scale, bias
corrections, rates of the groups, the skip flag) are tensors on the device as well, so no launch waits for anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from .adamw_device import chunk_layout, step_chunks
from .adamw_tiles import adamw_tiles_kernel
from .quantize import Spec
from .quantize_device import cast_fp8, nonfinite_to_nan, scale_from_amax, to_compute_dtype

CHUNK = gl.constexpr(64)


class PieceRow(NamedTuple):
    """A piece of a parameter; places and sizes in chunks of 64 elements, gaps of alignment rounded up.

    local: in the rank's state. start: in the buffer. chunks: how many. index: where it begins in the parameter.
    group: row of the rates. key: of its random bits. Of FP8 primary weights: amax: where the weight's amaxes begin in
    the packed buffer; columns: chunks a row of the weight; rows: of the weight; column_amax: where the amaxes of its
    B x 1 tiles begin.
    """

    local: int
    start: int
    chunks: int
    index: int
    group: int
    key: int = 0
    amax: int = 0
    columns: int = 1
    rows: int = 0
    column_amax: int = 0


FIELDS = gl.constexpr(len(PieceRow._fields))
LOCAL, START, CHUNKS, INDEX, GROUP, KEY, AMAX, COLUMNS = (gl.constexpr(i) for i in range(8))


class Launch(NamedTuple):
    """rows: chunks a program, or rows a strip. num_warps: of a program. maxnreg: register cap a thread, 0 for none.

    Measured on an H200, see docs/optimizer.md.
    """

    rows: int = 16
    num_warps: int = 4
    maxnreg: int = 0


DEFAULT = Launch()
FP8_MOMENTS = Launch(8, 4)
TILES, TALL_TILES = Launch(16, 8), Launch(16, 16)


@dataclass(frozen=True)
class Tables:
    """What a launch's programs do. pieces: int32 [pieces, 10]; tasks: int32 [programs, 2], a piece, a chunk in it."""

    pieces: Tensor
    tasks: Tensor
    launch: Launch

    @staticmethod
    def of(rows: Iterable[PieceRow], device: torch.device, launch: Launch = DEFAULT) -> Tables:
        pieces = _as_tensor(rows)
        return Tables.dealt(pieces, -(-pieces[:, CHUNKS.value] // launch.rows), launch.rows, device, launch)

    @staticmethod
    def of_tiles(
        rows: Iterable[PieceRow], spec: Spec, device: torch.device, launch: Launch | None = None
    ) -> Tables:
        """For `adamw_tiles`: tasks are pairs of a piece and a number of `tile.block` rows x 128 columns in it."""
        pieces = _as_tensor(rows)
        columns = pieces[:, COLUMNS.value]
        height = pieces[:, CHUNKS.value] // columns
        launch = launch or (TALL_TILES if spec.tile.block > 32 else TILES)
        return Tables.dealt(pieces, -(-height // spec.tile.block) * -(-columns // 2), 1, device, launch)

    @staticmethod
    def dealt(pieces: Tensor, counts: Tensor, step: int, device: torch.device, launch: Launch) -> Tables:
        """counts: programs of each piece; their second number counts up by `step`."""
        piece = torch.repeat_interleave(torch.arange(len(pieces)), counts)
        first = torch.cumsum(counts, 0) - counts
        number = (torch.arange(len(piece)) - first[piece]) * step
        return Tables(pieces.to(device), torch.stack([piece, number], 1).int().contiguous().to(device), launch)


def _as_tensor(rows: Iterable[PieceRow]) -> Tensor:
    signed = [row._replace(key=row.key - (row.key >> 31 << 32)) for row in rows]  # 32 bits as int32
    return torch.tensor(signed, dtype=torch.int32).view(-1, len(PieceRow._fields))


Moment = tuple[Tensor, Tensor | None, Tensor | None]
"""A stored moment: FP32, BF16, or FP8 bytes (uint8) with an FP32 amax and a code (uint8) a chunk."""


class Scalars(NamedTuple):
    """Of a step, on the device: FP32 gradient scale and second correction, int64 step, skip flag (uint8), and FP32
    rates [groups, 2]: step size (corrected learning rate) and learning rate x decay."""

    grad_scale: Tensor
    correction2: Tensor
    step: Tensor
    skip: Tensor
    rates: Tensor


def adamw(
    tables: Tables,
    master: Tensor,
    weight: Tensor | None,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    grad: Tensor,
    scalars: Scalars,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    decoding: Tensor | None = None,
    amax: Tensor | None = None,
    block: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Updates a rank's shard of a buffer in place.

    Args:
        master: FP32, or the lower halves (int16) of masters whose upper halves are the BF16 weights.
        weight: the whole buffer of weights, of which the rank's part is written (BF16 or FP32); None: none are held.
        grad: the whole buffer of FP32 gradient sums, only read.
        decoding: FP32 [codes * 128], values of FP8 moments' magnitudes (`codecs.decoding_table`).
        amax: FP32, zeroed: receives the amaxes of the new weights, rounded to `dtype`, in tiles of `block` x `block`.

    """
    launch = tables.launch
    adamw_kernel[(len(tables.tasks),)](
        master, weight, *exp_avg, *exp_avg_sq, decoding, grad, amax, scalars.grad_scale, scalars.correction2,
        scalars.step, scalars.skip, scalars.rates, tables.pieces, tables.tasks, 1 - beta1, 1 - beta2, eps,
        REMAINDER=master.dtype == torch.int16, B=block, ROUND=_DTYPES[dtype], R=launch.rows, W=launch.num_warps,
        num_warps=launch.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def cast(tables: Tables, master: Tensor, data: Tensor, multipliers: Tensor, *, fmax: float, block: int,
         dtype: torch.dtype) -> None:
    """Writes a rank's part of the FP8 bytes `data` (uint8, the whole buffer), from its FP32 masters rounded to `dtype`.

    multipliers: FP32, packed as the amaxes of `adamw` are.
    """
    launch = tables.launch
    cast_kernel[(len(tables.tasks),)](
        master, data, multipliers, tables.pieces, tables.tasks, FMAX=fmax, B=block, ROUND=_DTYPES[dtype],
        R=launch.rows, W=launch.num_warps, num_warps=launch.num_warps,
    )  # fmt: skip


def adamw_tiles(
    tables: Tables,
    master: Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    grad: Tensor,
    scalars: Scalars,
    data: dict[str, Tensor],
    amax: Tensor,
    spec: Spec,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    decoding: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """`adamw` and `cast` of FP8 primary weights where whole tiles are local, as `spec` says: 2D, or 1D of 16 or 32.

    Args:
        tables: of `Tables.of_tiles`.
        data: "rowwise", and under 1D tiles "colwise": FP8 bytes [N, K] (uint8, the whole buffer).
        amax: FP32, receives the amaxes of all these tiles.
        Others: see `adamw`.

    """
    launch, tile = tables.launch, spec.tile
    options = {"maxnreg": launch.maxnreg} if launch.maxnreg else {}
    adamw_tiles_kernel[(len(tables.tasks),)](
        master, *exp_avg, *exp_avg_sq, decoding, grad, amax, data["rowwise"], data.get("colwise"), scalars.grad_scale,
        scalars.correction2, scalars.step, scalars.skip, scalars.rates, tables.pieces, tables.tasks, 1 - beta1,
        1 - beta2, eps, spec.amax_epsilon, FMAX=spec.format.fmax, SCALE=_SCALES[spec.scale.value], B=tile.block,
        TWO_D=tile.kind == "2d", ROUND=_DTYPES[dtype], SR=min(launch.rows, tile.block), W=launch.num_warps,
        num_warps=launch.num_warps, enable_fp_fusion=False, **options,
    )  # fmt: skip


def scales(amax: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """From packed FP32 amaxes the FP32 multipliers of the elements, and scale_inv as `spec` stores it."""
    dtype = torch.float8_e8m0fnu if spec.scale.value == "e8m0" else torch.float32
    multiplier, stored = torch.empty_like(amax), torch.empty(amax.shape, dtype=dtype, device=amax.device)
    raw = stored.view(torch.uint8) if spec.scale.value == "e8m0" else stored
    scales_kernel[(-(-amax.numel() // 1024),)](
        amax, multiplier, raw, spec.amax_epsilon, amax.numel(), FMAX=spec.format.fmax,
        SCALE=_SCALES[spec.scale.value], N=1024, W=4, num_warps=4,
    )  # fmt: skip
    return multiplier, stored


def knows_tiles(spec: Spec) -> bool:
    """Whether `adamw_tiles` does."""
    tile = spec.tile
    return (tile.kind == "2d" and tile.block in (16, 32, 64, 128)) or (tile.kind == "1d" and tile.block in (16, 32))


_SCALES = {"fp32": 0, "pow2": 1, "e8m0": 2}
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@jit
def adamw_kernel(master_ptr, weight_ptr, m_ptr, m_amax_ptr, m_code_ptr, v_ptr, v_amax_ptr, v_code_ptr, table_ptr,
                 grad_ptr, packed_ptr, grad_scale_ptr, correction2_ptr, step_ptr, skip_ptr, rates_ptr, pieces_ptr,
                 tasks_ptr, rest1, rest2, eps, REMAINDER: gl.constexpr, B: gl.constexpr,
                 ROUND: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """B: edge of the FP8 tiles whose amaxes are taken of the new weights, rounded to ROUND (0: whole tensors).

    Skipped, only amaxes are taken, of masters as they are.
    """
    L: gl.constexpr = chunk_layout(W)
    skip = gl.load(skip_ptr) != 0
    if packed_ptr is None:  # noqa: SIM102 (the first `if` is decided at compile time)
        if skip:
            return
    task = tasks_ptr + gl.program_id(0).to(gl.int64) * 2
    piece = pieces_ptr + gl.load(task).to(gl.int64) * FIELDS
    first = gl.load(task + 1)
    chunk = first + gl.arange(0, R, layout=gl.SliceLayout(1, L))
    live = chunk < gl.load(piece + CHUNKS)
    local = gl.load(piece + LOCAL) + chunk
    start = gl.load(piece + START) + chunk
    index = gl.load(piece + INDEX) + chunk
    rates = rates_ptr + gl.load(piece + GROUP) * 2
    p = step_chunks(master_ptr, weight_ptr, m_ptr, m_amax_ptr, m_code_ptr, v_ptr, v_amax_ptr, v_code_ptr, table_ptr,
                    grad_ptr, local, start, index, live, skip,
                    gl.load(piece + KEY), gl.load(step_ptr), gl.load(grad_scale_ptr), gl.load(rates),
                    gl.load(rates + 1), gl.load(correction2_ptr), rest1, rest2, eps, REMAINDER, L)
    if packed_ptr is not None:
        amax_of_chunks(packed_ptr + gl.load(piece + AMAX), p, index, live, gl.load(piece + COLUMNS), B, ROUND, R)


@jit
def scales_kernel(amax_ptr, multiplier_ptr, stored_ptr, epsilon, count, FMAX: gl.constexpr, SCALE: gl.constexpr,
                  N: gl.constexpr, W: gl.constexpr):
    i = gl.program_id(0) * N + gl.arange(0, N, layout=gl.BlockedLayout([4], [32], [W], [0]))
    multiplier, stored = scale_from_amax(gl.load(amax_ptr + i, mask=i < count, other=0.0), epsilon, FMAX, SCALE)
    gl.store(multiplier_ptr + i, multiplier, mask=i < count)
    gl.store(stored_ptr + i, stored, mask=i < count)


@jit
def tile_of(index, columns, B: gl.constexpr):
    """Number of the B x B tile in which chunk `index` of a weight begins."""
    row = index // columns
    column = index % columns
    if B >= 64:
        tile = row // B * ((columns * 64 + B - 1) // B) + column // (B // 64)
    else:
        tile = (row // B * columns + column) * (64 // B)
    return tile


@jit
def amax_of_chunks(out_ptr, p, index, live, columns, B: gl.constexpr, ROUND: gl.constexpr, R: gl.constexpr):
    """Raises the tiles' amaxes: an integer maximum, whose order doesn't matter."""
    size = gl.abs(nonfinite_to_nan(to_compute_dtype(p, ROUND).to(gl.float32)))
    size = gl.where(gl.expand_dims(live, 1), size, 0.0)
    out = out_ptr.to(gl.pointer_type(gl.int32))
    if B == 0:
        amax = gl.maximum(gl.max(gl.max(size, axis=1), axis=0), 0.0)
        gl.atomic_max(out, amax.to(gl.int32, bitcast=True), sem="relaxed")
    elif B >= 64:
        amax = gl.maximum(gl.max(size, axis=1), 0.0).to(gl.int32, bitcast=True)
        ptrs = out + tile_of(index, columns, B)
        # Many chunks share a tile: most needn't wait for their turn to raise what is high enough already.
        raises = live & (amax > gl.load(ptrs, mask=live, other=0, volatile=True))
        gl.atomic_max(ptrs, amax, mask=raises, sem="relaxed")
    else:
        amax = gl.max(gl.reshape(size, (R, 64 // B, B)), axis=2)
        amax = gl.maximum(amax, 0.0).to(gl.int32, bitcast=True)
        L: gl.constexpr = amax.type.layout
        tile = gl.convert_layout(tile_of(index, columns, B), gl.SliceLayout(1, L))
        part = gl.arange(0, 64 // B, layout=gl.SliceLayout(0, L))
        mask = gl.expand_dims(gl.convert_layout(live, gl.SliceLayout(1, L)), 1)
        gl.atomic_max(out + gl.expand_dims(tile, 1) + gl.expand_dims(part, 0), amax, mask=mask, sem="relaxed")


@jit
def cast_kernel(master_ptr, bytes_ptr, multiplier_ptr, pieces_ptr, tasks_ptr, FMAX: gl.constexpr, B: gl.constexpr,
                ROUND: gl.constexpr, R: gl.constexpr, W: gl.constexpr):
    """FP8 bytes of weights, rounded from masters, with one multiplier a tile."""
    L: gl.constexpr = chunk_layout(W)
    task = tasks_ptr + gl.program_id(0).to(gl.int64) * 2
    piece = pieces_ptr + gl.load(task).to(gl.int64) * FIELDS
    chunk = gl.load(task + 1) + gl.arange(0, R, layout=gl.SliceLayout(1, L))
    live = chunk < gl.load(piece + CHUNKS)
    mask = gl.expand_dims(live, 1)
    columns = gl.expand_dims(gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L)), 0)
    local = gl.expand_dims(gl.load(piece + LOCAL) + chunk, 1).to(gl.int64) * CHUNK + columns
    p = gl.load(master_ptr + local, mask=mask, other=0.0)
    multiplier = multiplier_ptr + gl.load(piece + AMAX)
    if B == 0:
        scale = gl.load(multiplier)
    else:
        tile = tile_of(gl.load(piece + INDEX) + chunk, gl.load(piece + COLUMNS), B)
        if B >= 64:
            scale = gl.expand_dims(gl.load(multiplier + tile, mask=live, other=0.0), 1)
        else:
            scale = gl.load(multiplier + gl.expand_dims(tile, 1) + columns // B, mask=mask, other=0.0)
    x = nonfinite_to_nan(to_compute_dtype(p, ROUND).to(gl.float32)) * scale
    start = gl.expand_dims(gl.load(piece + START) + chunk, 1).to(gl.int64) * CHUNK + columns
    gl.store(bytes_ptr + start, cast_fp8(x, FMAX), mask=mask)
