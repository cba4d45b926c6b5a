"""Norms and zero counts over all parameters: exact sums, so the same bits in every layout.

Squares are added in FP64, first within aligned chunks of 64 elements, in a fixed order (neighbours in pairs, pairs of
pairs, then 16 such sums by halving); neither a parameter nor a shard begins inside a chunk. The sums of chunks are then
split into parts on grids that all ranks share (Demmel and Nguyen, "Parallel reproducible summation", 2015): parts on
one grid add up without rounding, so neither order nor number of ranks matters, and their total is rounded once, more
exactly than a plain FP64 sum.

What several ranks hold is counted on the first of them, but looked at on all, so that all see a non-finite value alike.
Two small messages over all ranks; nothing here waits for the device. On a GPU a kernel (`kernels/grad_norm.py`) reads
the values once, and gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megafp8.fp8 import backend
from megafp8.optimizer.layout import ALIGNMENT, Shard
from megafp8.parallel import Axis, ParallelContext
from megafp8.params import ParamSpec

CHUNK = 1 << 20
"""Elements converted to FP64 at once."""
GRIDS, GRID_BITS = 4, 22
"""Each grid is 2^22 times as fine as the one before; up to 2^30 chunks add up exactly on each."""


def chunk_squares(x: Tensor) -> Tensor:
    """FP64 sums of squares `[n]` of the chunks of a flat FP32 tensor `[64 n]`; non-finite where an element is."""
    sums = [_fold(part.double().square_().view(-1, 2, 2)) for part in x.split(CHUNK)]
    return torch.cat(sums) if sums else x.new_zeros(0, dtype=torch.float64)


def _fold(x: Tensor) -> Tensor:
    """Sums of chunks `[16 n, 2, 2] -> [n]`, in one fixed order."""
    x = x[..., 0] + x[..., 1]
    x = (x[:, 0] + x[:, 1]).view(-1, ALIGNMENT // 4)
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def grid_shifts(largest: Tensor) -> Tensor:
    """FP64 `[GRIDS]`: adding one to a value, and taking it away, rounds the value to that grid's multiples.

    largest: FP64 scalar below 2^900 that no value exceeds, the same on all ranks.
    """
    exponent = torch.frexp(largest).exponent
    units = [torch.ldexp(torch.ones_like(largest), exponent - GRID_BITS * level) for level in range(1, GRIDS + 1)]
    return torch.stack(units) * (1.5 * 2.0**52)


def split_on_grids(values: Tensor, shifts: Tensor) -> Tensor:
    """FP64 sums `[GRIDS]` of the parts of `values` on each grid, exact whatever the order.

    values: FP64, from 0 to the largest of which the shifts are made. Their sums may be added in any order; `total_of`
    makes the sum of all values of them.
    """
    sums, rest = [], values
    for shift in shifts:
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


def _chunks(mask: Tensor, start: int, stop: int) -> Tensor:
    return mask[start // ALIGNMENT : stop // ALIGNMENT]


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
        *,
        fused: bool = True,
    ):
        """fused: with kernels, where there are any."""
        self._shards = shards
        self._everyone = parallel.everyone
        sharded = any(shard.layout.shards > 1 for shard in shards)
        alike = min(parallel.dp_cp.size, parallel.edp.size) if parallel.world_size > 1 else 1
        self._spread = self._everyone if sharded or parallel.world_size > alike else Axis()
        self._elements = 0
        counted: list[Tensor | None] = []
        for shard in shards:
            here = {n for n in specs if n not in later_stages and self._counts(specs[n], shard, parallel)}
            mask = torch.zeros(shard.numel // ALIGNMENT, dtype=torch.bool)
            for piece in shard.pieces:
                if piece.name in here:
                    mask[piece.local // ALIGNMENT : -(-piece.place.stop // ALIGNMENT)] = True
                    logical = math.prod(specs[piece.name].box_shape)
                    self._elements += max(0, min(piece.stop, logical) - piece.start)
            counted.append(None if all(p.name in here for p in shard.pieces) else mask.to(device))
        self._masks = [
            [None if mask is None else _chunks(mask, r.local, r.local + r.stop - r.start) for r in shard.ranges]
            for shard, mask in zip(shards, counted, strict=True)
        ]
        self._kernels = backend.kernels("grad_norm") if fused and device.type == "cuda" else None

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
        return self.measure(parts, bad)[:2]

    def measure(
        self, parts: Sequence[Sequence[Tensor]], bad: Tensor | None = None, *, count_zeros: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `norm`, and int64 scalar: the elements, of what all ranks hold, that are exactly 0; None unless asked for.

        Vocabulary padding doesn't count. All in one pass over the values.
        """
        flat, masks = [part for of_buffer in parts for part in of_buffer], [m for of in self._masks for m in of]
        chunks = [part.numel() // ALIGNMENT for part in flat]
        values = torch.empty(sum(chunks), dtype=torch.float64, device=flat[0].device)
        found = [
            self._squares(part, mask, sums, count_zeros)
            for part, mask, sums in zip(flat, masks, values.split(chunks), strict=True)
        ]
        summary = torch.stack([pair for pair, _ in found]).amax(0) if len(found) > 1 else found[0][0]
        third = torch.zeros_like(summary[:1]) if bad is None else bad.double().view(1)
        agreed = self._everyone.max_(torch.cat([summary, third]))
        sums = self._spread.sum_(self._grids(values, agreed[0]))
        broken = agreed[1] > 0
        norm = torch.where(broken, torch.nan, total_of(sums).sqrt())
        zeros = None
        if count_zeros:
            zeros = self._spread.sum_(self._elements - sum(nonzero for _, nonzero in found))
        return norm, broken | (agreed[2] > 0), zeros

    def _squares(self, part: Tensor, mask: Tensor | None, sums: Tensor, count: bool) -> tuple[Tensor, Tensor | None]:
        """Writes sums of chunks, 0 of those that are not counted or not finite. Returns FP64 [2]: the largest, and 1 if
        one isn't finite; elements that are not 0."""
        if self._kernels is not None and part.numel():
            found = self._kernels.squares(part, mask, sums, count_nonzero=count)
            return found.summary, found.nonzero.sum() if count else None
        squares = chunk_squares(part)
        finite = squares.isfinite()
        squares = sums.copy_(torch.where(finite if mask is None else finite & mask, squares, 0.0))
        largest = squares.max() if squares.numel() else squares.new_zeros(())
        nonzero = None
        if count:
            nonzero = (part.view(-1, ALIGNMENT) != 0).sum(1)
            nonzero = (nonzero if mask is None else nonzero * mask).sum()
        return torch.stack([largest, (~finite.all()).double()]), nonzero

    def _grids(self, values: Tensor, largest: Tensor) -> Tensor:
        if self._kernels is not None and values.numel():
            return self._kernels.grids(values, largest)
        return split_on_grids(values, grid_shifts(largest))


def clip_coefficient(norm: Tensor, clip_grad: float) -> Tensor:
    """FP64 scalar that brings `norm` down to at most `clip_grad`; 1 when clipping is off (`clip_grad` 0).

    `clip_grad / (norm + 1e-6)`, as in Megatron-LM and `torch.nn.utils.clip_grad_norm_`.
    """
    if clip_grad == 0:
        return torch.ones_like(norm)
    return (clip_grad / (norm + 1e-6)).clamp(max=1.0)
