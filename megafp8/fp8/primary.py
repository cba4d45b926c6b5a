"""FP8 primary weights: a weight that consists of its FP8 bytes and scales, with no high-precision copy.

Ranks hold pieces of the weight in high precision (shards of the optimizer's masters), cut anywhere: through rows and
through tiles. Each takes the amaxes of its piece, tile by tile (`piece_amax`); their maximum over the ranks gives the
scales of the whole weight; each quantizes its piece with them (`quantize_piece`), and the bytes are gathered. So bytes
and scales are those of the whole weight's quantization, whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.fp8 import backend
from megafp8.fp8.formats import NAN_BYTE, OperandSpec, Tile
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import QuantizedStorage
from megafp8.params import range_boxes

_FLOATS = 4
"""That GEMMs want rows of scales padded to a multiple of: 16 bytes."""


def orientations(quantizer: Quantizer) -> tuple[str, ...]:
    """The orientations whose bytes have to be stored: one where the other is a transposition of it."""
    return ("rowwise",) if quantizer.spec.tile.symmetric else ("rowwise", "colwise")


def _tile_shape(tile: Tile, shape: tuple[int, int], orientation: str) -> tuple[int, int]:
    """Rows and columns of a tile of the weight `[N, K]`."""
    return tile.shape(*shape) if orientation == "rowwise" else tile.shape(*shape[::-1])[::-1]


def _grid(scales: Tensor, tile: Tile, orientation: str) -> Tensor:
    """Values in the shape of an orientation's scales as a grid over `[N, K]`; a view."""
    if tile.kind == "tensor":
        return scales.view(1, 1)
    return scales if orientation == "rowwise" else scales.t()


def scale_shape(quantizer: Quantizer, shape: tuple[int, int], orientation: str) -> tuple[int, ...]:
    """Shape of the scales of a weight `[N, K]`, as they are stored."""
    return quantizer.spec.tile.scale_shape(*(shape if orientation == "rowwise" else shape[::-1]))


def piece_amax(
    quantizer: Quantizer, values: Tensor, start: int, shape: tuple[int, int], orientation: str, out: Tensor
) -> None:
    """Max-accumulates the amaxes of a piece of a weight into `out`.

    Args:
        values: the piece, flat, in the compute dtype: elements `start` and on of the weight.
        shape: the weight's (N, K).
        out: FP32 amaxes of the whole weight, in the shape of that orientation's scales.

    """
    tile = quantizer.spec.tile
    rows_a_tile, columns_a_tile = _tile_shape(tile, shape, orientation)
    grid = _grid(out, tile, orientation)
    for (row, row_end), (column, column_end), box in _boxes(values, start, shape):
        magnitude = box.masked_fill(~box.isfinite(), 0.0).abs().float()
        above, left = row % rows_a_tile, column % columns_a_tile
        below, right = -row_end % rows_a_tile, -column_end % columns_a_tile
        padded = F.pad(magnitude, (left, right, above, below))
        tiles = padded.view(padded.shape[0] // rows_a_tile, rows_a_tile, -1, columns_a_tile).amax((1, 3))
        place = grid[row // rows_a_tile :, column // columns_a_tile :][: tiles.shape[0], : tiles.shape[1]]
        place.copy_(torch.maximum(place, tiles))


def quantize_piece(
    spec: OperandSpec,
    values: Tensor,
    start: int,
    shape: tuple[int, int],
    orientation: str,
    multiplier: Tensor,
    out: Tensor,
) -> None:
    """Writes the FP8 bytes of a piece of a weight into `out` (uint8, flat, as many as `values`).

    multiplier: FP32 scales of the whole weight, in the shape of that orientation's scales.
    """
    rows_a_tile, columns_a_tile = _tile_shape(spec.tile, shape, orientation)
    grid, written = _grid(multiplier, spec.tile, orientation), 0
    for (row, row_end), (column, column_end), box in _boxes(values, start, shape):
        rows = torch.arange(row, row_end, device=box.device) // rows_a_tile
        columns = torch.arange(column, column_end, device=box.device) // columns_a_tile
        strange = ~box.isfinite()
        scaled = box.masked_fill(strange, 0.0).float() * grid[rows][:, columns]
        data = scaled.clamp_(-spec.format.fmax, spec.format.fmax).to(spec.format.dtype).view(torch.uint8)
        out[written : written + box.numel()] = data.masked_fill_(strange, NAN_BYTE).view(-1)
        written += box.numel()


def _boxes(values: Tensor, start: int, shape: tuple[int, int]):
    """(rows, columns, values `[rows, columns]`) of the up to three boxes of a flat piece."""
    taken = 0
    for rows, columns in range_boxes(start, start + values.numel(), shape):
        size = (rows[1] - rows[0], columns[1] - columns[0])
        yield rows, columns, values[taken : taken + size[0] * size[1]].view(size)
        taken += size[0] * size[1]


class ScaleLayouts:
    """FP32 scales of 2D tiles of many weights, brought into the layout of GEMMs together: one launch for all of them.

    That layout has rows of scales one after the other, padded with zeros to 16 bytes (`storage.gemm_layout`). Rowwise
    ones that lie so already stay where they are; colwise ones are the transposed.
    """

    def __init__(self, places: Mapping[str, tuple[int, tuple[int, int]]], device: torch.device):
        """places: name -> where its rowwise scales begin in a packed buffer, and their shape."""
        self._places: dict[tuple[str, str], tuple[int, int, int, int]] = {}  # offset, rows, padded columns, columns
        index, offset = [], 0
        for name, (start, shape) in places.items():
            number = torch.arange(start, start + math.prod(shape)).view(shape)
            for orientation, wanted in (("rowwise", number), ("colwise", number.t())):
                rows, columns = wanted.shape
                missing = -columns % _FLOATS
                if orientation == "rowwise" and not missing:
                    continue
                self._places[name, orientation] = offset, rows, columns + missing, columns
                block = F.pad(wanted, (0, missing), value=-1).flatten()
                index.append(F.pad(block, (0, -block.numel() % _FLOATS), value=-1))
                offset += index[-1].numel()
        whole = torch.cat(index) if index else torch.empty(0, dtype=torch.int64)
        self._index, blank = whole.clamp(min=0).to(device), whole < 0
        self._blank = blank.to(device) if blank.any() else None

    def arrange(self, packed: Tensor) -> Callable[[str, str], Tensor | None]:
        """(name, orientation) -> its scales of those packed, where they have to be moved; moved when the first is asked
        for."""

        @cache
        def moved() -> Tensor:
            out = packed.index_select(0, self._index)
            return out if self._blank is None else out.masked_fill_(self._blank, 0.0)

        def find(name: str, orientation: str) -> Tensor | None:
            place = self._places.get((name, orientation))
            if place is None:
                return None
            offset, rows, padded, columns = place
            return moved()[offset : offset + rows * padded].view(rows, padded)[:, :columns]

        return find


@dataclass
class PrimaryBytes:
    """What an FP8 primary weight `[N, K]` consists of.

    data: orientation -> FP8 `[N, K]`, a view of a flat buffer; colwise bytes are not transposed. scale_inv: as stored.
    amax: of the whole weight, under tensor tiles. scale: that of a history, if it was quantized with one.
    arranged: orientation -> the scales as GEMMs want them, where somebody has brought them into that layout; or None.
    """

    quantizer: Quantizer
    data: dict[str, Tensor]
    scale_inv: dict[str, Tensor] = field(default_factory=dict)
    amax: Tensor | None = None
    scale: Tensor | None = None
    arranged: Callable[[str], Tensor | None] = field(default=lambda orientation: None)

    def set_scales(
        self,
        amaxes: dict[str, Tensor],
        scale_inv: dict[str, Tensor],
        scale: Tensor | None,
        arranged: Callable[[str], Tensor | None] = lambda orientation: None,
    ) -> None:
        """Takes the whole weight's amaxes and scales, by orientation. scale: a history's, if they come from one."""
        self.scale, self.arranged = scale, arranged
        self.amax = amaxes["rowwise"] if self.quantizer.spec.tile.kind == "tensor" else None
        self.scale_inv = dict(scale_inv)

    def storage(self, orientation: str) -> QuantizedStorage:
        """The operand in one orientation: rowwise a view of the stored bytes, colwise a transposed copy."""
        scales = self.arranged(orientation)
        if orientation not in self.data and scales is None:
            return self.storage("rowwise").flipped()
        data = self.data.get(orientation, self.data["rowwise"])
        data = data if orientation == "rowwise" else backend.transpose(data)
        scales = self.scale_inv[orientation] if scales is None else scales
        return self.quantizer.store((data, scales), orientation)
