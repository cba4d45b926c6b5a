"""What the host side of fused producers (norm, SwiGLU and its gradient) has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .quantize import BLOCK, Stored, allocate
from .zeros import zeros

if TYPE_CHECKING:
    from .quantize import Spec

Share = Callable[[Tensor], object]
"""Overwrites this rank's amaxes with what the ranks' values together have: called once, between the two passes,
with any number of rows; not called where no orientation is asked for."""


class TensorScaling(NamedTuple):
    """Where the scale of a tensor tile comes from, as kernel arguments. Empty under 1D tiles.

    Of rows by expert, where each has a scale: FP32 [G] instead of [1].

    scale: FP32 [1], given (delayed scaling: one pass). amax: FP32 [1], from which the scale is made (current scaling:
    the result's own, which takes a first pass, or one that ranks have shared). record: FP32 [1], raised to the result's
    amax.
    """

    scale: Tensor | None = None
    amax: Tensor | None = None
    record: Tensor | None = None

    @classmethod
    def of(cls, spec: Spec, amax: Tensor | None, scale: Tensor | None, amax_out: Tensor | None,
           device: torch.device, groups: int = 1) -> TensorScaling:
        """From the arguments of a producer.

        amax: instead of the result's own. scale: instead of one from an amax. amax_out: is raised to the result's amax:
        from zero, or with `scale` from what else is there (a slot of a history that several microbatches share).
        """
        if spec.tile.kind != "tensor":
            return cls()
        if scale is not None:
            return cls(scale, None, amax_out)
        if amax is not None:
            return cls(None, amax, amax_out)
        return cls(None, None, zeros(groups, torch.float32, device) if amax_out is None else amax_out)

    @property
    def measures(self) -> bool:
        """Whether a first pass has to find the amax."""
        return self.scale is None and self.amax is None and self.record is not None

    def first_pass(self) -> TensorScaling:
        return TensorScaling(record=self.record)

    def second_pass(self, share: Share | None) -> TensorScaling:
        """From what the first pass found, which ranks share before: all alike, whatever rows they have."""
        if share is not None:
            share(self.record)
        return TensorScaling(amax=self.record)


UNSCALED = TensorScaling()


def allocate_pair(rows: int, columns: int, spec: Spec, device: torch.device, rowwise: bool,
                  colwise: bool, groups: int = 1) -> tuple[Stored | None, Stored | None]:
    """Uninitialized copies of a `[rows, columns]` operand; those of a tensor tile share their scale_inv, [groups]."""
    row = allocate(rows, columns, spec, device, groups) if rowwise else None
    col = allocate(columns, rows, spec, device, groups) if colwise else None
    if row and col and spec.tile.kind == "tensor":
        col = (col[0], row[1])
    return row, col


def check_spec(name: str, spec: Spec, amax: Tensor | None, scale: Tensor | None, amax_out: Tensor | None,
               share: Share | None = None) -> None:
    """Raises ValueError for tiles that fused producers don't know, and for scaling arguments that tiles don't take."""
    if share is not None and (amax is not None or scale is not None):
        raise ValueError(f"{name}: share is for the result's own amax, not for a given one or a scale")
    if spec.tile.kind == "tensor":
        return
    if spec.tile.kind != "1d" or BLOCK % spec.tile.block:
        raise ValueError(f"{name}: needs tensor tiles, or 1D tiles of a size that divides {BLOCK}, got {spec.tile}; "
                         "keep the result in high precision, then call quantize")
    if any(t is not None for t in (amax, scale, amax_out, share)):
        raise ValueError(f"{name}: amax, scale, amax_out and share are for tensor tiles, got {spec.tile}")
