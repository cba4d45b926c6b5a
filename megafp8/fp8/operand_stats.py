"""What quantization did to one operand, in numbers that add up over microbatches and ranks.

All is computed on the operand's device and nothing waits for it, on GPUs by `kernels/operand_stats.py`, whose twin is
here. Scales are all looked at; of the elements at most `SAMPLED`, in whole blocks of 128 rows spread evenly, because
their fractions and energies need no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.fp8 import backend
from megafp8.fp8.formats import FORMATS, Format, Tile, decode_scale
from megafp8.fp8.storage import Quantized, QuantizedStorage

SAMPLED = 1 << 22
"""Elements of an operand that are compared with their FP8 values, at most."""
ROWS = 128  # of a sampled block: a multiple of every tile
BINS_AN_OCTAVE, LOWEST, HIGHEST = 4, -128, 128
BINS = (HIGHEST - LOWEST) * BINS_AN_OCTAVE
"""Of the histogram of log2(scale_inv)."""
_QUARTERS = (1587185, 3474676, 5719293)  # the smallest FP32 mantissas of at least 2^(1/4), 2^(2/4), 2^(3/4)
HALF_STEP = {"e4m3": 16.0, "e5m2": 4096.0}
"""Half the distance between the largest finite values of a format."""
COLUMNS = ("elements", "underflow", "saturated", "signal", "noise", "compared")


def beyond(form: Format) -> float:
    """What is larger, after scaling, has saturated: it lost more than rounding takes."""
    return form.fmax + HALF_STEP[form.name]


def _kernels_for(data: Tensor) -> ModuleType | None:
    return backend.kernels("operand_stats") if data.is_cuda else None


@dataclass
class OperandStats:
    """sums: FP64 [6], see COLUMNS: elements looked at; of them nonzero ones that became 0; those beyond the format's
    range; sum of squares, and of squared errors (finite elements); elements that both were taken from.
    largest: FP32 [3]: amax, scale_inv, and -scale_inv. histogram: int64 [BINS] of the scales, by log2(scale_inv).
    """

    sums: Tensor
    largest: Tensor
    histogram: Tensor

    @staticmethod
    def empty(count: int, device: torch.device | str = "cpu") -> OperandStats:
        """Of `count` operands that nobody has looked at: each field has a leading dimension."""
        return OperandStats(
            torch.zeros(count, len(COLUMNS), dtype=torch.float64, device=device),
            torch.full((count, 4), -math.inf, device=device)[:, :3],  # rows are aligned to 16 bytes
            torch.zeros(count, BINS, dtype=torch.int64, device=device),
        )

    @torch.no_grad()
    def add(self, row: int, x: Tensor | None, quantized: Quantized) -> None:
        """Adds an operand to row `row`. x: what was quantized, `[M, K]`; None where nobody has it any more."""
        storage = quantized.rowwise if quantized.rowwise is not None else quantized.colwise
        if storage.data.numel() == 0:
            return
        if x is not None:
            x = x.detach() if storage.orientation == "rowwise" else x.detach().t()
        elif not (storage := _filled(storage)).scale_inv.numel():
            return
        kernels = _kernels_for(storage.data)
        if kernels is None or not kernels.supports(x, storage):
            self._add_plainly(row, x, storage)
            return
        for part, values in _parts(storage, x):
            if part.scale_inv.numel():
                kernels.look(self._place(kernels, row), values, part, beyond(part.format), SAMPLED)

    @torch.no_grad()
    def add_errors(self, row: int, x: Tensor, storage: QuantizedStorage, start: int) -> None:
        """Adds elements `start` and on, flat, of an operand whose scales have been added: x [n], in high precision."""
        kernels = _kernels_for(storage.data)
        if kernels is not None and storage.data.is_contiguous() and kernels.supports(None, storage):
            kernels.look_at_errors(self._place(kernels, row), x, storage, beyond(storage.format), start)
            return
        place = slice(start, start + x.numel())
        values, top = storage.dequantize().view(-1)[place], _at_top(storage.data).view(-1)[place]
        self.sums[row] += compare(x, values, top, storage.format)

    def _place(self, kernels: ModuleType, row: int) -> tuple[Tensor, Tensor, Tensor]:
        return kernels.Row(self.sums[row], self.largest[row], self.histogram[row])

    def _add_plainly(self, row: int, x: Tensor | None, storage: QuantizedStorage) -> None:
        """The kernels' twin."""
        self._add_scales(row, storage, x)
        for part, values in _parts(storage, x):
            if values is not None and values.numel():
                sample, values = _sample(part, values)
                self.sums[row] += compare(values, sample.dequantize(), _at_top(sample.data), sample.format)

    def _add_scales(self, row: int, storage: QuantizedStorage, x: Tensor | None) -> None:
        bits = decode_scale(storage.scale_inv).flatten().view(torch.int32)
        low, high = (end.view(torch.float32) for end in bits.aminmax())
        if x is not None:
            below, above = x.aminmax()
            amax = torch.maximum(-below, above).float()
            amax = amax.where(amax == amax, math.inf)
        else:  # of a current scale, that is the amax; of one from a history, a bound
            amax = high * storage.format.fmax
        self.largest[row] = torch.maximum(self.largest[row], torch.stack([amax, high, -low]))
        self.histogram[row] += _histogram(bits)


def _filled(storage: QuantizedStorage) -> QuantizedStorage:
    """The same data with the scales alone of tiles that are not all zeros, one behind the other: rows that fill an
    expert's up to whole tiles are zeros, whose scale of 1 says nothing. The host waits for their number."""
    parts = [storage] if storage.counts is None else storage.experts()
    scales = torch.cat([_raw(part.scale_inv)[_used(part)] for part in parts]).view(storage.scale_inv.dtype)
    return QuantizedStorage(storage.data, scales, Tile("tensor"), storage.scale, storage.orientation)


def _used(storage: QuantizedStorage) -> Tensor:
    """bool, of the scales' shape: whose tile has an element that is not 0."""
    (rows, width), shape = storage.data.shape, storage.scale_inv.shape
    if not storage.data.numel():
        return storage.scale_inv.new_zeros(shape, dtype=torch.bool)
    high, wide = storage.tile.shape(rows, width)
    used = F.pad((storage.data.view(torch.uint8) & 0x7F) != 0, (0, -width % wide, 0, -rows % high))
    return used.view(-(-rows // high), high, -(-width // wide), wide).any(3).any(1).reshape(shape)


def _raw(scale_inv: Tensor) -> Tensor:
    return scale_inv.view(torch.uint8) if scale_inv.element_size() == 1 else scale_inv


def _parts(storage: QuantizedStorage, x: Tensor | None) -> Iterator[tuple[QuantizedStorage, Tensor | None]]:
    """The operand and its values; where tiles restart at each expert, each expert's."""
    if storage.counts is None or x is None:
        return iter([(storage, x)])
    token_dim = 0 if storage.orientation == "rowwise" else 1
    return zip(storage.experts(), x.split(storage.counts, token_dim), strict=True)


def _histogram(bits: Tensor) -> Tensor:
    """int64 [BINS]: how many scales, given as the bits of FP32 numbers, lie in each quarter of an octave. By sorting: a
    scatter's order is no matter, but deterministic mode refuses it."""
    edges = torch.arange(BINS + 1, dtype=torch.int32, device=bits.device)
    return torch.searchsorted(_bins(bits).sort().values, edges).diff()


def _bins(bits: Tensor) -> Tensor:
    """int32: which bin scales lie in. From exponent and mantissa: exact, of subnormal numbers too."""
    shift = (bits < 1 << 22).int() + (bits < 1 << 23).int()  # of subnormal numbers down to 2^-128
    mantissa = (bits << shift) & ((1 << 23) - 1)
    octave = torch.where(shift > 0, 1 - shift, bits >> 23) - 127 - LOWEST
    place = octave * BINS_AN_OCTAVE + sum((mantissa >= least).int() for least in _QUARTERS)
    return place.clamp(max=BINS - 1).where(bits >= 1 << 21, 0)


def _sample(storage: QuantizedStorage, x: Tensor) -> tuple[QuantizedStorage, Tensor]:
    """The operand, or evenly spread blocks of its rows when it is large, as it is stored."""
    rows, width = storage.data.shape
    blocks, wanted = rows // ROWS, max(1, SAMPLED // (ROWS * width))
    if blocks <= wanted:
        return storage, x
    chosen = torch.arange(wanted, device=x.device) * blocks // wanted
    index, scales = _rows_of(chosen, ROWS), storage.scale_inv
    if storage.tile.kind != "tensor":
        scales = _take(scales, _rows_of(chosen, ROWS // storage.tile.shape(rows, width)[0]))
    data = _take(storage.data, index)
    return QuantizedStorage(data, scales, storage.tile, storage.scale, storage.orientation), x[index]


def _rows_of(blocks: Tensor, size: int) -> Tensor:
    """Numbers of the rows of blocks of `size`."""
    return (blocks[:, None] * size + torch.arange(size, device=blocks.device)).flatten()


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor of any dtype, 8-bit ones too."""
    if x.element_size() > 1:
        return x[index]
    return x.view(torch.uint8)[index].view(x.dtype)


def _at_top(data: Tensor) -> Tensor:
    """Where FP8 elements have their format's largest finite magnitude."""
    top = 0x7E if data.dtype == FORMATS["e4m3"].dtype else 0x7B
    return (data.view(torch.uint8) & 0x7F) == top


def compare(x: Tensor, values: Tensor, top: Tensor, form: Format) -> Tensor:
    """FP64 [6]: the sums of COLUMNS for elements `x`, stored as `values`; `top`: those at the format's maximum."""
    x, values = x.double(), values.double()
    finite = x.isfinite()
    x, values = x.where(finite, 0.0), values.where(finite, 0.0)
    # Both products are exact.
    saturated = top & (x.abs() * form.fmax > values.abs() * beyond(form))
    error = x - values
    sums = (
        x.new_full((), x.numel()),
        ((x != 0) & (values == 0)).sum(),
        saturated.sum(),
        x.square().sum(),
        error.square().sum(),
        finite.sum(),
    )
    return torch.stack([s.double() for s in sums])


NUMBERS = (
    *("amax", "scale_inv_min", "scale_inv_median", "scale_inv_max", "underflow", "saturated", "sqnr_db", "nonfinite"),
)


def describe(sums: Iterable[float], largest: Iterable[float], histogram: dict[int, int]) -> dict[str, float | None]:
    """The numbers of one operand for a log, from the fields of its stats.

    amax; scale_inv_{min,median,max} over tiles (the median to a quarter of an octave); underflow and saturated:
    fractions of the elements; sqnr_db: 10 log10(signal / noise), None where there is no noise or no signal. All None
    where nobody has seen the operand.
    """
    s = dict(zip(COLUMNS, sums, strict=True))
    amax, high, minus_low = largest
    if not histogram:
        return dict.fromkeys(NUMBERS)
    noisy = s["noise"] > 0 and s["signal"] > 0
    return {
        "amax": amax,
        "scale_inv_min": -minus_low,
        "scale_inv_median": min(max(median(histogram), -minus_low), high),
        "scale_inv_max": high,
        "underflow": s["underflow"] / s["elements"] if s["elements"] else None,
        "saturated": s["saturated"] / s["elements"] if s["elements"] else None,
        "sqnr_db": 10 * math.log10(s["signal"] / s["noise"]) if noisy else None,
        "nonfinite": int(s["elements"] - s["compared"]),
    }


def median(histogram: dict[int, int]) -> float:
    """Lower edge of the bin that holds the middle scale: exact for powers of two."""
    half, seen = (sum(histogram.values()) + 1) // 2, 0
    for place in sorted(histogram):
        seen += histogram[place]
        if seen >= half:
            break
    return 2.0 ** (LOWEST + place / BINS_AN_OCTAVE)


def drift(before: dict[int, int], now: dict[int, int]) -> float:
    """How far the scales' distribution moved, in octaves: the earth mover's distance of the normalized histograms."""
    total_before, total_now = sum(before.values()), sum(now.values())
    moved, behind, last = 0.0, 0.0, None
    for place in sorted(before.keys() | now.keys()):
        if last is not None:
            moved += abs(behind) * (place - last)
        behind += before.get(place, 0) / total_before - now.get(place, 0) / total_now
        last = place
    return moved / BINS_AN_OCTAVE
