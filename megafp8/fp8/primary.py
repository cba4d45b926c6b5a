"""FP8 primary weights: a weight that consists of its FP8 bytes and scales, with no high-precision copy.

Ranks hold pieces of the weight in high precision (shards of the optimizer's masters), cut anywhere: through rows and
through tiles. Each takes the amaxes of its piece, tile by tile (`piece_amax`); their maximum over the ranks gives the
scales of the whole weight; each quantizes its piece with them (`quantize_piece`), and the bytes are gathered. So bytes
and scales are those of the whole weight's quantization, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.fp8.formats import NAN_BYTE, OperandSpec, Tile
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.reference import transpose
from megafp8.fp8.storage import QuantizedStorage
from megafp8.params import range_boxes


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


@dataclass
class PrimaryBytes:
    """What an FP8 primary weight `[N, K]` consists of.

    data: orientation -> FP8 `[N, K]`, a view of a flat buffer; colwise bytes are not transposed. scale_inv: as stored.
    amax: of the whole weight, under tensor tiles. scale: that of a history, if it was quantized with one.
    """

    quantizer: Quantizer
    data: dict[str, Tensor]
    scale_inv: dict[str, Tensor] = field(default_factory=dict)
    amax: Tensor | None = None
    scale: Tensor | None = None

    def set_scales(self, amaxes: dict[str, Tensor], scale_inv: dict[str, Tensor], scale: Tensor | None) -> None:
        """Takes the whole weight's amaxes and scales, by orientation. scale: a history's, if they come from one."""
        self.scale = scale
        self.amax = amaxes["rowwise"] if self.quantizer.spec.tile.kind == "tensor" else None
        self.scale_inv = dict(scale_inv)

    def storage(self, orientation: str) -> QuantizedStorage:
        """The operand in one orientation: rowwise a view of the stored bytes, colwise a transposed copy."""
        if orientation not in self.data:
            return self.storage("rowwise").flipped()
        data = self.data[orientation]
        data = data if orientation == "rowwise" else transpose(data)
        return self.quantizer.store((data, self.scale_inv[orientation]), orientation)
