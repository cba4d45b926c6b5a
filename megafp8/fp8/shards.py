"""Operands of which each rank holds some rows: quantizing such a shard, and putting shards together again.

Tiles start at the origin of the whole operand. A tensorwise scale, and a colwise tile that lies across the rows of two
ranks, are shared: their amaxes are max-reduced first. So the shards' bytes and scales are those of the whole operand,
whatever the number of local rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.fp8.formats import Scale
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import Quantized, QuantizedStorage, gemm_layout
from megafp8.parallel import Axis, Pending

Operand = Tensor | QuantizedStorage
"""High precision `[rows, features]`, or one FP8 orientation of it."""


def travels_in_fp8(quantizer: Quantizer) -> bool:
    """Whether shards of such an operand are gathered in FP8, in both orientations.

    Square tiles would need the rows of several ranks for one byte. FP32-scale tiles go in high precision, as every
    other exchange of such bytes does, so that one rule holds: only power-of-two scales outlive their tensor.
    """
    spec = quantizer.spec
    return spec.tile.kind == "tensor" or (spec.tile.kind == "1d" and spec.scale is not Scale.FP32)


@dataclass(frozen=True)
class RowTiles:
    """Tiles of `block` rows on the grid of the whole operand, of which each rank holds `rows` rows in turn."""

    rows: int
    block: int
    axis: Axis

    @property
    def aligned(self) -> bool:
        """Whether no tile lies across two ranks."""
        return self.rows % self.block == 0

    @property
    def offset(self) -> int:
        """Where this rank's first row lies in its tile."""
        return self.axis.rank * self.rows % self.block

    @property
    def total(self) -> int:
        return -(-self.rows * self.axis.size // self.block)

    def touched(self, rank: int) -> range:
        """Numbers of the tiles that hold rows of `rank`."""
        start, stop = rank * self.rows, (rank + 1) * self.rows
        return range(start // self.block, -(-stop // self.block))

    def share(self, amax: Tensor) -> Tensor:
        """This rank's colwise amaxes `[features, tiles]`, a shared tile's over the ranks that share it."""
        owners = [tile for rank in range(self.axis.size) for tile in self.touched(rank)]
        shared = sorted({tile for tile in owners if owners.count(tile) > 1})
        here = self.touched(self.axis.rank)
        mine = [(at, tile - here.start) for at, tile in enumerate(shared) if tile in here]
        packed = amax.new_zeros(len(shared), amax.shape[0])
        for at, local in mine:
            packed[at] = amax[:, local]
        self.axis.max_(packed)
        amax = amax.clone()
        for at, local in mine:
            amax[:, local] = packed[at]
        return amax

    @property
    def most(self) -> int:
        """The largest number of tiles that a rank touches."""
        return max(len(self.touched(rank)) for rank in range(self.axis.size))

    def places(self) -> list[int]:
        """For each tile of the whole operand, its place among the ranks' tiles, `most` a rank."""
        place = {}
        for rank in range(self.axis.size):
            for at, tile in enumerate(self.touched(rank)):
                place.setdefault(tile, rank * self.most + at)
        return [place[tile] for tile in range(self.total)]


def quantize_rows(quantizer: Quantizer, x: Tensor, axis: Axis, rowwise: bool, colwise: bool) -> Quantized:
    """This rank's rows `x [rows, K]` of a 1D-tiled operand, quantized as in the whole operand.

    The colwise copy has the scales of all tiles that this rank's rows touch.
    """
    tiles = RowTiles(x.shape[0], quantizer.spec.tile.block, axis)
    if tiles.aligned or not colwise:
        return quantizer.quantize(x, rowwise, colwise)
    padded = F.pad(x.detach(), (0, 0, tiles.offset, 0))  # on the grid
    amax = tiles.share(quantizer.amax(padded, "colwise"))
    whole = quantizer.quantize(padded, rowwise=False, colwise=True, amax_colwise=amax).colwise
    data = whole.data.view(torch.uint8)[:, tiles.offset :].contiguous().view(whole.data.dtype)
    row = quantizer.quantize(x, rowwise=True).rowwise if rowwise else None
    return Quantized(row, replace(whole, data=data))


def post_gather(x: Operand, axis: Axis) -> Callable[[], Operand]:
    """Starts to gather the ranks' rows; call the result to wait for the whole operand. FP8 data and scales go together,
    in one message.

    A colwise shard must come from `quantize_rows`.
    """
    if axis.size == 1:
        return lambda: x
    if isinstance(x, Tensor) or x.tile.kind == "tensor":
        return _post_rows(x, axis)
    parts = [x.data, _tiles_first(x, axis)]
    arriving, pending = axis.post_gathers(parts)

    def wait() -> QuantizedStorage:
        pending.wait()
        parts.clear()  # until now they had to be there
        scales, data = arriving.pop(), arriving.pop()  # not to be held here while the whole is
        whole = _side_by_side(data, axis.size) if x.orientation == "colwise" else data
        return _like(x, whole, _whole_scales(x, scales, axis))

    return wait


def _post_rows(x: Operand, axis: Axis) -> Callable[[], Operand]:
    """`post_gather` of what has no scales of its own for each row."""
    sent = x.contiguous() if isinstance(x, Tensor) else x.data
    gathered, pending = axis.post_gather(sent)
    arriving = [gathered]

    def wait() -> Operand:
        pending.wait()
        data = arriving.pop()  # not to be held here while the whole is
        if isinstance(x, Tensor):
            return data
        whole = _side_by_side(data, axis.size) if x.orientation == "colwise" else data
        return _like(x, whole, x.scale_inv)

    return wait


def post_gather_pieces(x: Operand, pieces: list[slice], axis: Axis) -> Iterator[Callable[[], Operand]]:
    """Starts to gather the ranks' rows piece by piece, each when it is asked for; every one is to be waited for, in
    turn. All scales of 1D tiles, which are few, travel with the first piece's data."""
    if isinstance(x, Tensor) or x.tile.kind == "tensor" or len(pieces) == 1:
        for piece in pieces:
            yield post_gather(take(x, piece, 1), axis)
        return
    assert x.orientation == "rowwise", x.orientation
    scales: list[Tensor] = []
    parts = [x.data[pieces[0]], _tiles_first(x, axis)]
    (data, gathered), first = axis.post_gathers(parts)

    def wait_first() -> QuantizedStorage:
        first.wait()
        parts.clear()
        scales.extend(cut_scales(_whole_scales(x, gathered, axis), x, pieces, axis.size))
        return _like(x, data, scales[0])

    yield wait_first
    for number, piece in enumerate(pieces[1:], 1):
        out, pending = axis.post_gather(x.data[piece])

        def wait(out: Tensor = out, pending: Pending = pending, number: int = number) -> QuantizedStorage:
            pending.wait()
            return _like(x, out, scales[number])

        yield wait


def cut_rows(x: Operand, pieces: list[slice], ranks: int) -> list[Operand]:
    """The pieces of each rank's part of `x`'s rows (rowwise storage), ranks in turn: equal ones in one copy of all."""
    if len(pieces) == 1:
        return [x]
    if not _equal(pieces):
        return [take(x, piece, ranks) for piece in pieces]
    if isinstance(x, Tensor):
        return _cut_rows(x, len(pieces), ranks)
    assert x.orientation == "rowwise", x.orientation
    data = _cut_rows(x.data, len(pieces), ranks)
    if x.tile.kind == "tensor":
        return [replace(x, data=part) for part in data]
    scales = cut_scales(x.scale_inv, x, pieces, ranks)
    return [_like(x, part, scale) for part, scale in zip(data, scales, strict=True)]


def cut_scales(scale_inv: Tensor, x: QuantizedStorage, pieces: list[slice], ranks: int) -> list[Tensor]:
    """The scales [rows, tiles] of the pieces of a rowwise operand of 1D tiles, like `x`, in the layout of GEMMs."""
    if not _equal(pieces):
        return [gemm_layout(take_bytes(scale_inv, piece, ranks), x.tile) for piece in pieces]
    if x.scale is Scale.E8M0:
        return _cut_rows(scale_inv, len(pieces), ranks)
    rows = pieces[0].stop
    by_tile = scale_inv.t().reshape(-1, ranks, len(pieces), rows)  # the rows of a tile lie together
    parts = by_tile.permute(2, 0, 1, 3).flatten(2)
    return [gemm_layout(part.t(), x.tile) for part in parts]


def _equal(pieces: list[slice]) -> bool:
    return len({piece.stop - piece.start for piece in pieces}) == 1


def _cut_rows(x: Tensor, count: int, ranks: int) -> list[Tensor]:
    wide = _wide(x.contiguous())
    parts = wide.view(ranks, count, len(x) // (ranks * count), wide.shape[1]).transpose(0, 1).contiguous()
    return [part.flatten(0, 1).view(x.dtype) for part in parts]


def take(x: Operand, piece: slice, ranks: int) -> Operand:
    """One piece of each rank's part of `x`'s rows (rowwise storage), ranks in turn."""
    if piece == slice(0, rows_of(x) // ranks):
        return x
    if isinstance(x, Tensor):
        return x.reshape(ranks, -1, *x.shape[1:])[:, piece].flatten(0, 1)
    assert x.orientation == "rowwise", x.orientation
    data = take_bytes(x.data, piece, ranks)
    if x.tile.kind == "tensor":
        return replace(x, data=data)
    return replace(x, data=data, scale_inv=gemm_layout(take_bytes(x.scale_inv, piece, ranks), x.tile))


def take_bytes(x: Tensor, piece: slice, ranks: int) -> Tensor:
    """`take` of FP8 or scales; few operators know 8-bit floats."""
    return take(_bytes(x), piece, ranks).contiguous().view(x.dtype)


def _like(x: QuantizedStorage, data: Tensor, scale_inv: Tensor) -> QuantizedStorage:
    """`dataclasses.replace`, which takes the host far longer."""
    return QuantizedStorage(data, scale_inv, x.tile, x.scale, x.orientation)


def rows_of(x: Operand) -> int:
    return (x if isinstance(x, Tensor) else x.data).shape[0]


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _wide(x: Tensor) -> Tensor:
    """Contiguous rows as the widest integers that they are made of: PyTorch copies what it has to rearrange element by
    element, so single bytes would take four times as long."""
    counts = [size * x.element_size() for size in (x.shape[1], x.stride(0), x.storage_offset())]
    for dtype in (torch.int64, torch.int32, torch.int16):
        if x.numel() and not any(count % dtype.itemsize for count in counts):
            return x.view(dtype)
    return _bytes(x)


def _side_by_side(data: Tensor, ranks: int) -> Tensor:
    """`[ranks * K, rows]` as `[K, ranks * rows]`."""
    wide = _wide(data)
    parts = wide.view(ranks, len(data) // ranks, wide.shape[1]).transpose(0, 1)
    return parts.contiguous().view(len(parts), ranks * wide.shape[1]).view(data.dtype)


def _tiles_first(x: QuantizedStorage, axis: Axis) -> Tensor:
    """The scales of a 1D-tiled shard, contiguous, so that ranks follow each other in dimension 0: by row, or by tile.

    GEMMs' layout has the FP32 scales of a tile together, of all rows: it travels as it is, unless rows fill it up.
    """
    if x.orientation == "rowwise":
        return x.scale_inv.t() if _by_tile(x) else x.scale_inv.contiguous()
    missing = RowTiles(x.data.shape[1], x.tile.block, axis).most - x.scale_inv.shape[1]
    scales = _bytes(x.scale_inv).t()
    scales = F.pad(scales, (0, 0, 0, missing)) if missing else scales
    return scales.contiguous().view(x.scale_inv.dtype)


def _by_tile(x: QuantizedStorage) -> bool:
    """Whether the scales of rows travel tile by tile: of all ranks, which have as many rows."""
    return x.scale is not Scale.E8M0 and x.scale_inv.t().is_contiguous()


def _whole_scales(x: QuantizedStorage, gathered: Tensor, axis: Axis) -> Tensor:
    """In the layout of GEMMs."""
    if x.orientation == "rowwise":
        if not _by_tile(x):
            return gemm_layout(gathered, x.tile)
        by_rank = gathered.view(axis.size, gathered.shape[0] // axis.size, gathered.shape[1])
        return gemm_layout(by_rank.transpose(0, 1).flatten(1).t(), x.tile)
    tiles, raw = RowTiles(x.data.shape[1], x.tile.block, axis), _bytes(gathered)
    if not tiles.aligned:  # else they are in order
        raw = raw[_places_on(raw.device, tiles.rows, tiles.block, axis.size)]
    if x.scale is Scale.E8M0:
        return raw.t().contiguous().view(gathered.dtype)
    return gemm_layout(raw.t(), x.tile)


@cache
def _places_on(device: torch.device, rows: int, block: int, ranks: int) -> Tensor:
    """`RowTiles.places` on the device, copied there once: each copy would wait for it, which a CUDA graph can't."""
    return torch.tensor(RowTiles(rows, block, Axis(ranks)).places(), device=device)
