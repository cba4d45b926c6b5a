"""Operands of which each rank holds some rows: quantizing such a shard, and putting shards together again.

Tiles start at the origin of the whole operand. A tensorwise scale, and a colwise tile that lies across the rows of two
ranks, are shared: their amaxes are max-reduced first. So the shards' bytes and scales are those of the whole operand,
whatever the number of local rows.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Starts to gather the ranks' rows; call the result to wait for the whole operand. FP8 data and scales go together.

    A colwise shard must come from `quantize_rows`.
    """
    if axis.size == 1:
        return lambda: x
    if isinstance(x, Tensor):
        return _after([axis.post_gather(x.contiguous())], lambda whole: whole)
    scales = [] if x.tile.kind == "tensor" else [axis.post_gather(_tiles_first(x, axis))]

    def assemble(data: Tensor, scale_inv: Tensor | None = None) -> QuantizedStorage:
        if x.orientation == "colwise":
            data = _side_by_side(data, axis.size)
        scale_inv = x.scale_inv if scale_inv is None else gemm_layout(_whole_scales(x, scale_inv, axis), x.tile)
        return replace(x, data=data, scale_inv=scale_inv)

    return _after([axis.post_gather(x.data), *scales], assemble)


def _after(posted: list[tuple[Tensor, Pending]], assemble: Callable[..., Operand]) -> Callable[[], Operand]:
    def wait() -> Operand:
        for _, pending in posted:
            pending.wait()
        return assemble(*(tensor for tensor, _ in posted))

    return wait


def _side_by_side(data: Tensor, ranks: int) -> Tensor:
    """`[ranks * K, rows]` as `[K, ranks * rows]`."""
    parts = data.view(torch.uint8).view(ranks, -1, data.shape[1])
    return parts.transpose(0, 1).reshape(parts.shape[1], -1).view(data.dtype)


def _tiles_first(x: QuantizedStorage, axis: Axis) -> Tensor:
    """The scales of a 1D-tiled shard so that ranks follow each other in dimension 0: a row's, or a tile's."""
    if x.orientation == "rowwise":
        return x.scale_inv.contiguous()
    missing = RowTiles(x.data.shape[1], x.tile.block, axis).most - x.scale_inv.shape[1]
    scales = x.scale_inv.contiguous().view(torch.uint8 if x.scale is Scale.E8M0 else torch.float32)
    return F.pad(scales, (0, missing)).t().contiguous().view(x.scale_inv.dtype)


def _whole_scales(x: QuantizedStorage, gathered: Tensor, axis: Axis) -> Tensor:
    if x.orientation == "rowwise":
        return gathered
    tiles = RowTiles(x.data.shape[1], x.tile.block, axis)
    raw = gathered.view(torch.uint8) if x.scale is Scale.E8M0 else gathered
    if not tiles.aligned:
        raw = raw[_places_on(raw.device, tiles.rows, tiles.block, axis.size)]
    return raw.t().contiguous().view(gathered.dtype)


@cache
def _places_on(device: torch.device, rows: int, block: int, ranks: int) -> Tensor:
    """`RowTiles.places` on the device, copied there once: each copy would wait for it, which a CUDA graph can't."""
    return torch.tensor(RowTiles(rows, block, Axis(ranks)).places(), device=device)
