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


def _expert_of_rows(x: Tensor, ends: Tensor) -> Tensor:
    """int64 [R]; G for rows past the last end."""
    return torch.searchsorted(ends, torch.arange(x.shape[0], dtype=ends.dtype, device=x.device), right=True)


def amax(quantizer: Quantizer, x: Tensor, ends: Tensor) -> Tensor:
    """FP32 [G]: the largest finite magnitude of each expert's rows."""
    found = torch.zeros(ends.numel() + 1, dtype=torch.float32, device=x.device)
    of_rows = _by_row(quantizer.spec).amax(x).amax(1)
    return found.scatter_reduce_(0, _expert_of_rows(x, ends), of_rows, "amax")[:-1]


def amax_for(quantizer: Quantizer, scales: Tensor) -> Tensor:
    """FP32 [G]: amaxes from which the quantizer makes exactly these scales.

    Rounded quotients come back: of every FP32 a, fmax / (fmax / (fmax / a)) is fmax / a. A test tries all mantissas.
    """
    return torch.div(torch.full_like(scales, quantizer.spec.format.fmax), scales)


def quantize(
    quantizer: Quantizer,
    x: Tensor,
    ends: Tensor,
    rowwise: bool = True,
    colwise: bool = False,
    given: Tensor | None = None,
) -> Quantized:
    """Quantizes `x [R, K]`, expert g's rows ending before `ends[g]` (int32 [G]), with scales [G].

    quantizer: of tensor tiles. given: amaxes, FP32 [G], instead of these rows' own. Rows past the last end may hold
    anything, and get any bytes.
    """
    assert quantizer.spec.tile.kind == "tensor"
    given = amax(quantizer, x, ends) if given is None else given
    of_rows = torch.nn.functional.pad(given, (0, 1))[_expert_of_rows(x, ends)]
    tiles = of_rows[:, None].repeat(1, _TILE.scale_shape(*x.shape)[1])
    data = _by_row(quantizer.spec).quantize(x, amax=tiles).rowwise.data
    stored = QuantizedStorage(data, quantizer.scales(given)[1], quantizer.spec.tile, quantizer.spec.scale, "rowwise")
    return Quantized(stored if rowwise else None, stored.flipped() if colwise else None)
