"""Norms and zero counts over all parameters: exact sums, so the same bits in every layout.

Squares are added in FP64, first within aligned chunks of 64 elements, in a fixed order; neither a parameter nor a shard
begins inside a chunk. The sums of chunks are then split into parts on grids that all ranks share (Demmel and Nguyen,
"Parallel reproducible summation", 2015): parts on one grid add up without rounding, so neither order nor number of
ranks matters, and their total is rounded once, more exactly than a plain FP64 sum.

What several ranks hold is counted on the first of them, but looked at on all, so that all see a non-finite value alike.
Two small messages over all ranks; nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megafp8.optimizer.layout import ALIGNMENT, Shard
from megafp8.parallel import Axis, ParallelContext
from megafp8.params import ParamSpec

CHUNK = 1 << 20
"""Elements converted to FP64 at once."""
GRIDS, GRID_BITS = 4, 22
"""Each grid is 2^22 times as fine as the one before; up to 2^30 chunks add up exactly on each."""


def chunk_squares(x: Tensor) -> Tensor:
    """FP64 sums of squares `[n]` of the chunks of a flat FP32 tensor `[64 n]`; non-finite where an element is."""
    sums = [_fold(part.double().square_().view(-1, ALIGNMENT)) for part in x.split(CHUNK)]
    return torch.cat(sums) if sums else x.new_zeros(0, dtype=torch.float64)


def _fold(x: Tensor) -> Tensor:
    """Row sums `[n, 2^k] -> [n]` in one fixed order, that of halving."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def split_on_grids(values: Tensor, largest: Tensor) -> Tensor:
    """FP64 sums `[GRIDS]` of the parts of `values` on each grid, exact whatever the order.

    values: FP64, between 0 and `largest` (below 2^900), an FP64 scalar that is the same on all ranks. Their sums may
    be added in any order; `total_of` makes the sum of all values of them.
    """
    exponent = torch.frexp(largest).exponent
    sums, rest = [], values
    for level in range(1, GRIDS + 1):
        unit = torch.ldexp(torch.ones_like(largest), exponent - GRID_BITS * level)
        shift = unit * (1.5 * 2.0**52)  # adding and taking it away rounds to multiples of `unit`
        on_grid = (rest + shift) - shift
        rest = rest - on_grid
        sums.append(on_grid.sum())
    return torch.stack(sums)


def total_of(sums: Tensor) -> Tensor:
    """FP64 scalar: the sum of the grids, the finest first."""
    total = sums[-1]
    for level in range(GRIDS - 2, -1, -1):
        total = sums[level] + total
    return total


class Measure:
    """Norms and counts over all trained parameters of all ranks, each element once.

    shards: this rank's, of all buffers. later_stages: names of the parameters that an earlier pipeline stage counts.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        specs: Mapping[str, ParamSpec],
        parallel: ParallelContext,
        device: torch.device,
        later_stages: frozenset[str] = frozenset(),
    ):
        self._shards = shards
        self._everyone = parallel.everyone
        sharded = any(shard.layout.shards > 1 for shard in shards)
        alike = min(parallel.dp_cp.size, parallel.edp.size) if parallel.world_size > 1 else 1
        self._spread = self._everyone if sharded or parallel.world_size > alike else Axis()
        self._elements = 0
        self._counted: list[Tensor | None] = []
        for shard in shards:
            here = {n for n in specs if n not in later_stages and self._counts(specs[n], shard, parallel)}
            mask = torch.zeros(shard.numel // ALIGNMENT, dtype=torch.bool)
            for piece in shard.pieces:
                if piece.name in here:
                    mask[piece.local // ALIGNMENT : -(-piece.place.stop // ALIGNMENT)] = True
                    logical = math.prod(specs[piece.name].box_shape)
                    self._elements += max(0, min(piece.stop, logical) - piece.start)
            self._counted.append(None if all(p.name in here for p in shard.pieces) else mask.to(device))

    def _counts(self, spec: ParamSpec, shard: Shard, parallel: ParallelContext) -> bool:
        """Whether this rank is the first of those that hold the same elements."""
        if self._spread.size == 1:
            return True
        copies = parallel.edp if spec.expert else parallel.dp_cp
        if shard.layout.shards == 1 and copies.rank:
            return False
        tensor = parallel.etp if spec.expert else parallel.tp
        return tensor.rank == 0 or "tp" not in spec.replicated_over

    def norm(self, parts: Sequence[Sequence[Tensor]], bad: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """FP64 scalar, the L2 norm of what all ranks hold, and a flag: it, or anybody's `bad`, is not finite.

        parts: for each buffer this rank's shards of its values, in the order of its state. The norm is NaN when an
        element is not finite.
        """
        squares = [torch.cat([chunk_squares(part) for part in of_buffer]) for of_buffer in parts]
        finite = torch.stack([s.isfinite().all() for s in squares]).all()
        squares = [
            torch.where(s.isfinite() if mask is None else s.isfinite() & mask, s, 0.0)
            for s, mask in zip(squares, self._counted, strict=True)
        ]
        values = torch.cat(squares)
        flags = [~finite, torch.zeros_like(finite) if bad is None else bad]
        largest = values.max() if values.numel() else values.new_zeros(())
        agreed = self._everyone.max_(torch.stack([largest, *(flag.double() for flag in flags)]))
        sums = self._spread.sum_(split_on_grids(values, agreed[0]))
        broken = agreed[1] > 0
        norm = torch.where(broken, torch.nan, total_of(sums).sqrt())
        return norm, broken | (agreed[2] > 0)

    def num_zeros(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Int64 scalar: elements, of what all ranks hold, that are exactly 0; vocabulary padding doesn't count."""
        zeros = None
        for of_buffer, mask in zip(parts, self._counted, strict=True):
            for_chunks = [(part.view(-1, ALIGNMENT) != 0).sum(1) for part in of_buffer]
            nonzero = torch.cat(for_chunks)
            nonzero = (nonzero if mask is None else nonzero * mask).sum()
            zeros = -nonzero if zeros is None else zeros - nonzero
        return self._spread.sum_(zeros + self._elements)


def clip_coefficient(norm: Tensor, clip_grad: float) -> Tensor:
    """FP64 scalar that brings `norm` down to at most `clip_grad`; 1 when clipping is off (`clip_grad` 0).

    `clip_grad / (norm + 1e-6)`, as in Megatron-LM and `torch.nn.utils.clip_grad_norm_`.
    """
    if clip_grad == 0:
        return torch.ones_like(norm)
    return (clip_grad / (norm + 1e-6)).clamp(max=1.0)
