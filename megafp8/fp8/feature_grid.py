"""Features cut over ranks where the cut goes through tiles: each rank works on whole tiles, padded with zeros.

Tiles start at the origin of the whole operand. A rank's features are laid out so that its tiles are tiles of that grid,
with zeros for what other ranks hold of a shared one, and a shared tile's amax is max-reduced. So bytes and scales are
those of the whole operand; zeros add nothing to a product, and padded outputs are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import Quantized
from megafp8.parallel import Axis


@dataclass(frozen=True)
class FeatureGrid:
    """`parts` stacked parts of `size` features each (SwiGLU's fc1 has two), each cut evenly over the ranks of `axis`,
    on a grid of tiles of `block` features."""

    parts: int
    size: int
    axis: Axis
    block: int

    @property
    def aligned(self) -> bool:
        """Whether every cut lies between tiles, so that nothing need be padded or shared."""
        return self.size // self.axis.size % self.block == 0

    def segments(self, rank: int) -> list[range]:
        """A rank's features in the whole operand, one run a part."""
        share = self.size // self.axis.size
        starts = [part * self.size + rank * share for part in range(self.parts)]
        return [range(start, start + share) for start in starts]

    def tiles(self, rank: int) -> list[int]:
        """Numbers of the tiles that a rank works on, in its padded order; one may come twice."""
        tiles = [range(s.start // self.block, -(-s.stop // self.block)) for s in self.segments(rank)]
        return [number for run in tiles for number in run]

    @property
    def places(self) -> list[slice]:
        """Where this rank's runs of features lie in its padded order."""
        places, first = [], 0
        for s in self.segments(self.axis.rank):
            start = first * self.block + s.start % self.block
            places.append(slice(start, start + len(s)))
            first += -(-s.stop // self.block) - s.start // self.block
        return places

    @property
    def width(self) -> int:
        """Features in padded order."""
        return len(self.tiles(self.axis.rank)) * self.block

    def pad(self, x: Tensor, dim: int) -> Tensor:
        """`x`, this rank's features along `dim`, in padded order."""
        shape = list(x.shape)
        shape[dim] = self.width
        out = x.new_zeros(shape)
        for place, part in zip(self.places, x.detach().chunk(self.parts, dim), strict=True):
            out.narrow(dim, place.start, part.shape[dim]).copy_(part)
        return out

    def unpad(self, x: Tensor, dim: int) -> Tensor:
        """Undoes `pad`."""
        return torch.cat([x.narrow(dim, place.start, place.stop - place.start) for place in self.places], dim)

    def share(self, amax: Tensor, dim: int) -> Tensor:
        """Amaxes by tile of padded features along `dim`: the maximum over all ranks that have some of a tile."""
        everyone = [number for rank in range(self.axis.size) for number in self.tiles(rank)]
        shared = sorted({number for number in everyone if everyone.count(number) > 1})
        mine = self.tiles(self.axis.rank)
        amax = amax.movedim(dim, 0).clone()
        packed = amax.new_zeros(len(shared), *amax.shape[1:])
        pairs = [(shared.index(number), place) for place, number in enumerate(mine) if number in shared]
        for at, place in pairs:
            packed[at] = torch.maximum(packed[at], amax[place])
        self.axis.max_(packed)
        for at, place in pairs:
            amax[place] = packed[at]
        return amax.movedim(0, dim).contiguous()


def quantize_features(quantizer: Quantizer, x: Tensor, grid: FeatureGrid, rowwise: bool, colwise: bool) -> Quantized:
    """This rank's features `x [M, K]` of a 1D-tiled operand, quantized as in the whole operand.

    The rowwise copy is padded, `[M, grid.width]`; tiles of the colwise copy lie within one feature.
    """
    row = col = None
    if rowwise:
        padded = grid.pad(x, 1)
        row = quantizer.quantize(padded, rowwise=True, amax=grid.share(quantizer.amax(padded), 1)).rowwise
    if colwise:
        col = quantizer.quantize(x, rowwise=False, colwise=True).colwise
    return Quantized(row, col)
