"""One scale an expert: rows that lie by expert in one buffer, whose numbers only the device knows.

The bytes are those of quantizing each expert's rows by themselves. Where experts begin at multiples of 128 rows, as in
training, no register tile lies in two of them, and kernels of their own (`kernels/quantize_experts.py`) make both
copies in one pass, picking rows from where tokens lie, if they are told to. Elsewhere, and without a GPU, bytes come
from 1 x 128 tiles, each with its expert's amax for its own; in unaligned rows the colwise copy is made by
transposing bytes. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from megafp8.fp8 import backend
from megafp8.fp8.formats import OperandSpec, Tile
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import Quantized, QuantizedStorage

ALIGNMENT = 128  # of experts' rows, that one pass makes both copies
_TILE, _SQUARE = Tile("1d", ALIGNMENT), Tile("2d", ALIGNMENT)


@dataclass(frozen=True)
class Groups:
    """Where experts lie in `rows` rows. ends: int32 [G] on the device, one past each one's last row, multiples of
    `alignment`; rows past the last end are nobody's."""

    ends: Tensor
    rows: int
    alignment: int = 1

    @property
    def count(self) -> int:
        """Experts."""
        return self.ends.numel()

    @property
    def block(self) -> int:
        """Rows in a row that belong to one expert, all in all."""
        return ALIGNMENT if self.alignment % ALIGNMENT == 0 else 1

    @cached_property
    def of_blocks(self) -> Tensor:
        """The expert of each block of rows, int64; G for nobody's."""
        first = torch.arange(0, self.rows, self.block, dtype=self.ends.dtype, device=self.ends.device)
        return torch.searchsorted(self.ends, first, right=True)


@cache
def _tiled(spec: OperandSpec, tile: Tile) -> Quantizer:
    """The same operand under tiles."""
    return Quantizer(OperandSpec(spec.format, tile, spec.scale, spec.amax_epsilon))


def _amax_of_blocks(quantizer: Quantizer, x: Tensor, groups: Groups) -> Tensor:
    found = torch.zeros(groups.count + 1, dtype=torch.float32, device=x.device)
    of_blocks = _tiled(quantizer.spec, _TILE if groups.block == 1 else _SQUARE).amax(x).amax(1)
    return found.scatter_reduce_(0, groups.of_blocks, of_blocks, "amax")[:-1]


def amax(
    quantizer: Quantizer, x: Tensor, groups: Groups, index: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """FP32 [G]: the largest finite magnitude of each expert's rows; these are rows `index` of x, if that is given.

    out: receives it.
    """
    kernels = backend.expert_kernels(x, groups.block)
    if kernels is not None:
        return kernels.expert_amaxes(kernels.row_amaxes(x), groups.ends, index, out)
    found = _amax_of_blocks(quantizer, x if index is None else backend.pick(x, index), groups)
    return found if out is None else out.copy_(found)


def amax_for(quantizer: Quantizer, scales: Tensor) -> Tensor:
    """FP32 [G]: amaxes from which the quantizer makes exactly these scales.

    Rounded quotients come back: of every FP32 a, fmax / (fmax / (fmax / a)) is fmax / a. A test tries all mantissas.
    """
    return torch.div(torch.full_like(scales, quantizer.spec.format.fmax), scales)


def quantize(
    quantizer: Quantizer,
    x: Tensor,
    groups: Groups,
    rowwise: bool = True,
    colwise: bool = False,
    given: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
    index: Tensor | None = None,
) -> Quantized:
    """Quantizes `x [R, K]`, rows by expert, with scales [G]; with `index` (int64 [R]) rows `index` of `x [T, K]`, zeros
    where it is negative.

    quantizer: of tensor tiles. given: amaxes, FP32 [G], instead of these rows' own; or scale: FP32 [G], the scales.
    amax_out: FP32 [G], receives the rows' own amaxes. Rows past the last end may hold anything, and get any bytes.
    """
    spec = quantizer.spec
    assert spec.tile.kind == "tensor"
    kernels = backend.expert_kernels(x, groups.block)
    if kernels is None and index is not None:
        x, index = backend.pick(x, index), None
    if amax_out is not None or (given is None and scale is None):
        own = amax(quantizer, x, groups, index, amax_out)
        given = own if given is None and scale is None else given
    if kernels is not None:
        options = {"amax": given, "scale": scale, "index": index}
        return quantizer.store_pair(*kernels.quantize_experts(x, groups.ends, spec, rowwise, colwise, **options))
    given = given if scale is None else amax_for(quantizer, scale)
    return _quantize_tiles(quantizer, x, groups, rowwise, colwise, given)


def _quantize_tiles(
    quantizer: Quantizer, x: Tensor, groups: Groups, rowwise: bool, colwise: bool, given: Tensor
) -> Quantized:
    """The same by 1 x 128 tiles."""
    spec = quantizer.spec
    of_blocks, (rows, columns) = given[groups.of_blocks.clamp(max=len(given) - 1)], x.shape
    of_rows = of_blocks if groups.block == 1 else of_blocks[:, None].expand(-1, groups.block).reshape(-1)[:rows]
    options = {"amax": of_rows.expand(_TILE.scale_shape(rows, columns)[1], -1).t()}
    both = colwise and groups.block == ALIGNMENT
    if both:
        options["amax_colwise"] = of_blocks.expand(columns, -1)
    made = _tiled(spec, _TILE).quantize(x, rowwise or not both, both, **options)
    scale_inv = quantizer.scales(given)[1]

    def stored(part: QuantizedStorage | None, orientation: str) -> QuantizedStorage | None:
        return None if part is None else QuantizedStorage(part.data, scale_inv, spec.tile, spec.scale, orientation)

    row, col = stored(made.rowwise, "rowwise"), stored(made.colwise, "colwise")
    if colwise and not both:
        row, col = row if rowwise else None, row.flipped()
    return Quantized(row, col)
