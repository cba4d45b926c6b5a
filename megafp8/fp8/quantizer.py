"""High precision -> storage, one interface for all recipes. Pure: a quantizer has no state.

Where a tile is shared with other ranks, call `amax`, reduce it (max), and pass it to `quantize`. Where scales come
from a history (delayed scaling), pass `scale`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megafp8.fp8 import backend, reference
from megafp8.fp8.formats import OperandSpec, Scale
from megafp8.fp8.storage import Quantized, QuantizedStorage, gemm_layout


def _backend(device: torch.device, spec: OperandSpec) -> ModuleType:
    """The module whose `amax` and `quantize` run on `device`: same bytes everywhere, so this is a matter of speed."""
    kernels = backend.kernels("quantize") if device.type == "cuda" else None
    return kernels if kernels is not None and kernels.supports(spec) else reference


@dataclass(frozen=True)
class Quantizer:
    """Quantizes `[M, K]` operands as `spec` says. Inputs may have any strides, and are never modified."""

    spec: OperandSpec

    def amax(self, x: Tensor, orientation: str = "rowwise") -> Tensor:
        """Largest absolute finite value a tile: FP32, in the shape of that orientation's scales."""
        _check(x)
        return _backend(x.device, self.spec).amax(x, self.spec.tile, orientation)

    def scales(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """From amaxes: FP32 multipliers, and scale_inv as stored (FP32, or E8M0 bytes for MXFP8)."""
        return self.spec.scale_and_inverse(amax)

    def quantize(
        self,
        x: Tensor,
        rowwise: bool = True,
        colwise: bool = False,
        *,
        amax: Tensor | None = None,
        amax_colwise: Tensor | None = None,
        scale: Tensor | None = None,
        amax_out: Tensor | None = None,
        share: Callable[[Tensor], object] | None = None,
        out: Quantized | None = None,
    ) -> Quantized:
        """Quantizes `x [M, K]` (floating point; 0 rows allowed) in the orientations asked for.

        amax, amax_colwise: FP32, in the shape of `amax(x, orientation)`, instead of this tensor's own. Tensor and
            2D tiles use `amax` for both orientations.
        scale: FP32, one element, instead of one from an amax; tensor tiles only.
        amax_out: FP32 [1], receives this tensor's own amax, for who quantizes it again; with `scale` it is only ever
            raised to it, as a history's slot is. Tensor tiles without another amax only.
        share: called once with this tensor's own amax, FP32 [1], to overwrite it with the maximum over ranks that hold
            parts of the whole tensor; `amax_out` receives that. Tensor tiles, without another amax or scale.
        out: what an earlier call returned for a tensor of this shape; kernels write it over, others ignore it.
        Raises ValueError for an input that is not a 2-D floating point tensor, or if no orientation is asked for.
        """
        _check(x)
        if not (rowwise or colwise):
            raise ValueError("quantize: ask for rowwise=True, colwise=True or both")
        if scale is not None and self.spec.tile.kind != "tensor":
            raise ValueError("quantize: scale= is for tensorwise operands; pass amax= for tiles")
        if share is not None and (self.spec.tile.kind != "tensor" or amax is not None or scale is not None):
            raise ValueError("quantize: share= is for a tensorwise operand's own amax, not a given one or a scale")
        kernels, more = _backend(x.device, self.spec), {}
        measures = amax_out is not None or share is not None
        if measures and kernels is not reference:
            more = {"amax_out": amax_out, "share": share}
        elif measures:
            amax = self.amax(x)
            if amax_out is not None:
                amax = amax_out.copy_(amax if scale is None else torch.maximum(amax_out, amax))
            if share is not None:
                share(amax)
        if out is not None and kernels is not reference:
            more["out"] = tuple(s if s is None else (s.data, s.scale_inv) for s in (out.rowwise, out.colwise))
        pair = kernels.quantize(x, self.spec, rowwise, colwise, amax, amax_colwise, scale, **more)
        if kernels is reference:
            return Quantized(self.store(pair[0], "rowwise"), self.store(pair[1], "colwise"))
        return self.store_pair(*pair)

    def store_pair(self, row: tuple[Tensor, Tensor] | None, col: tuple[Tensor, Tensor] | None) -> Quantized:
        """(data, scale_inv) of each orientation as storage: from kernels, which lay scales out as GEMMs want them."""
        tile, scale = self.spec.tile, self.spec.scale
        if row is not None:
            row = QuantizedStorage(row[0], row[1], tile, scale, "rowwise")
        if col is not None:
            col = QuantizedStorage(col[0], col[1], tile, scale, "colwise")
        return Quantized(row, col)

    def store(
        self, stored: tuple[Tensor, Tensor] | None, orientation: str, counts: tuple[int, ...] | None = None
    ) -> QuantizedStorage | None:
        """(data, scale_inv) as storage, its scales in the layout of GEMMs."""
        if stored is None:
            return None
        data, scale_inv = stored
        tile = self.spec.tile
        return QuantizedStorage(data, gemm_layout(scale_inv, tile), tile, self.spec.scale, orientation, counts)

    def quantize_grouped(self, x: Tensor, counts: list[int], rowwise: bool = True, colwise: bool = True) -> Quantized:
        """Quantizes tokens sorted by expert, `x [sum(counts), K]`; tiles restart at each expert's first row."""
        _check(x)
        row, col = reference.quantize_grouped(x, counts, self.spec, rowwise, colwise)
        return Quantized(self.store(row, "rowwise", tuple(counts)), self.store(col, "colwise", tuple(counts)))

    def derive_colwise(self, rowwise: QuantizedStorage) -> QuantizedStorage:
        """The colwise copy of an operand of which only rowwise bytes exist (received in FP8).

        Raises ValueError under FP32 scales, where it would round every value a second time.
        """
        if self.spec.tile.symmetric:
            return rowwise.flipped()
        if self.spec.scale is Scale.FP32:
            raise ValueError(
                "a colwise copy can be derived from rowwise bytes only under power-of-two scales: "
                "use power_of_two_scales=True"
            )
        return self.store(backend.derive_colwise(rowwise.data, rowwise.scale_inv, self.spec), "colwise")


def _check(x: Tensor) -> None:
    if x.dim() != 2 or not x.dtype.is_floating_point:
        raise ValueError(f"quantize: expected a 2-D floating point tensor, got {x.dtype} {tuple(x.shape)}")
