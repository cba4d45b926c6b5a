"""Quantized operands as plain data: what the engine passes around.

`QuantizedStorage` is one orientation, `Quantized` the pair. Users and parameters see `QuantizedTensor`
(`tensor.py`), which wraps a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.fp8 import backend
from megafp8.fp8.formats import Format, Scale, Tile, format_of

_ALIGN_BYTES = 16  # GEMMs load scales through descriptors, whose strides must be multiples of this


@dataclass(eq=False, slots=True)
class QuantizedStorage:
    """One orientation of a quantized `[M, K]` operand. Not changed once it is built (`frozen` would make that slower).

    data: FP8, rowwise `[M, K]`, colwise `[K, M]`, contiguous.
    scale_inv: FP32 (E8M0 for MXFP8), `tile.scale_shape(*data.shape)`; `value = data * scale_inv`.
    counts: rows an expert where tiles restart at each expert's first row (grouped operands).
    """

    data: Tensor
    scale_inv: Tensor
    tile: Tile
    scale: Scale
    orientation: str
    counts: tuple[int, ...] | None = None

    @property
    def format(self) -> Format:
        return format_of(self.data.dtype)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale_inv.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values in the stored orientation (colwise: `[K, M]`)."""
        if self.counts is None:
            return backend.dequantize(self.data, self.scale_inv, self.tile, dtype)
        return torch.cat([part.dequantize(dtype) for part in self.experts()], self._token_dim)

    @property
    def _token_dim(self) -> int:
        return 0 if self.orientation == "rowwise" else 1

    def experts(self) -> list[QuantizedStorage]:
        """Views, one an expert, of a grouped operand."""
        data = self.data.split(self.counts, self._token_dim)
        if self.tile.kind == "tensor":
            scales = self.scale_inv.split(1)
        else:
            rows = self.counts
            if self.orientation == "colwise":
                rows = tuple(-(-count // self.tile.block) for count in self.counts)
            scales = self.scale_inv.split(rows, self._token_dim)
        return [
            QuantizedStorage(d, s, self.tile, self.scale, self.orientation) for d, s in zip(data, scales, strict=True)
        ]

    def flipped(self) -> QuantizedStorage:
        """The other orientation of a tensor- or 2D-tiled operand: the same bytes, transposed."""
        data, scale_inv = backend.flip(self.data, self.scale_inv, self.tile)
        other = "colwise" if self.orientation == "rowwise" else "rowwise"
        return QuantizedStorage(data, gemm_layout(scale_inv, self.tile), self.tile, self.scale, other)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Quantized:
    """A quantized `[M, K]` operand: rowwise and colwise copies, each of which may be absent (None)."""

    rowwise: QuantizedStorage | None = None
    colwise: QuantizedStorage | None = None

    def __post_init__(self) -> None:
        assert self.rowwise is not None or self.colwise is not None

    @property
    def shape(self) -> tuple[int, int]:
        """Logical shape (M, K)."""
        if self.rowwise is not None:
            return tuple(self.rowwise.data.shape)
        return tuple(self.colwise.data.shape[::-1])

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in (self.rowwise, self.colwise) if s is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values `[M, K]`, from the rowwise copy where there is one."""
        if self.rowwise is not None:
            return self.rowwise.dequantize(dtype)
        return self.colwise.dequantize(dtype).t().contiguous()


def gemm_layout(scale_inv: Tensor, tile: Tile) -> Tensor:
    """The same FP32 scales with the strides GEMMs want; values and indices do not change.

    1D `[R, C]`: R contiguous (M-major), 2D `[R, C]`: C contiguous; the other stride padded to 16 bytes with
    zeros. Tensorwise scales and E8M0 bytes stay as they are.
    """
    if tile.kind == "tensor" or scale_inv.dtype != torch.float32:
        return scale_inv
    rows, cols = shape = scale_inv.shape
    if not rows or not cols:
        return scale_inv
    step = _ALIGN_BYTES // 4
    contiguous, padded = (0, 1) if tile.kind == "1d" else (1, 0)
    strides = scale_inv.stride()
    if strides[contiguous] == 1 and strides[padded] == -(-shape[contiguous] // step) * step:
        return scale_inv
    length = -(-shape[contiguous] // step) * step
    make = scale_inv.new_empty if length == shape[contiguous] else scale_inv.new_zeros  # zeros only to fill up
    view = make(cols, length)[:, :rows].t() if tile.kind == "1d" else make(rows, length)[:, :cols]
    return view.copy_(scale_inv)
