"""One scale an expert: rows that lie by expert in one buffer, whose numbers only the device knows.

The bytes are those of quantizing each expert's rows by themselves. They come from the kernels of 1 x 128 tiles, each
with its expert's amax for its own; the colwise copy holds the same bytes, transposed. Nothing waits for the device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megafp8.fp8.formats import OperandSpec, Tile
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import Quantized, QuantizedStorage

_TILE = Tile("1d", 128)


@cache
def _by_row(spec: OperandSpec) -> Quantizer:
    """The same operand under tiles of one row."""
    return Quantizer(OperandSpec(spec.format, _TILE, spec.scale, spec.amax_epsilon))


def amaxes(rows: Quantizer, x: Tensor, expert: Tensor, count: int) -> Tensor:
    """FP32 [count]: the largest finite magnitude of each expert's rows. expert: int64 [R], of no expert: `count`."""
    found = torch.zeros(count + 1, dtype=torch.float32, device=x.device)
    return found.scatter_reduce_(0, expert, rows.amax(x).amax(1), "amax")[:count]


def quantize(quantizer: Quantizer, x: Tensor, ends: Tensor, rowwise: bool = True, colwise: bool = False) -> Quantized:
    """Quantizes `x [R, K]`, expert g's rows ending before `ends[g]` (int32 [G]), with scales [G].

    quantizer: of tensor tiles. Rows past the last end may hold anything, and get any bytes.
    """
    assert quantizer.spec.tile.kind == "tensor"
    by_row, count = _by_row(quantizer.spec), ends.numel()
    rows = torch.arange(x.shape[0], dtype=ends.dtype, device=x.device)
    expert = torch.searchsorted(ends, rows, right=True)
    amax = amaxes(by_row, x, expert, count)
    of_rows = torch.nn.functional.pad(amax, (0, 1))[expert]
    tiles = of_rows[:, None].repeat(1, _TILE.scale_shape(*x.shape)[1])
    data = by_row.quantize(x, amax=tiles).rowwise.data
    stored = QuantizedStorage(data, quantizer.scales(amax)[1], quantizer.spec.tile, quantizer.spec.scale, "rowwise")
    return Quantized(stored if rowwise else None, stored.flipped() if colwise else None)
