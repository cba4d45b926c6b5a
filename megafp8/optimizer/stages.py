"""Which stages of a pipeline hold which parameters: what norms are put together from, and what stages share.

A parameter that two stages hold, the tied embedding on the first and the last one, has the same value on both; each has
a part of its gradient, and after their sum both update it alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megafp8.parallel import Axis


@dataclass(frozen=True)
class StageNames:
    """names: of all stages' parameters, in order. own: this stage's. shared: name -> the other stage that has it."""

    axis: Axis
    names: tuple[str, ...]
    own: tuple[str, ...]
    shared: Mapping[str, int]

    @staticmethod
    def of(own: Iterable[str], axis: Axis) -> StageNames:
        """Every rank of the pipeline calls it with the global names of its parameters."""
        own = tuple(sorted(own))
        stages = axis.exchange(own)
        shared = {}
        for name in own:
            others = [rank for rank, names in enumerate(stages) if name in names and rank != axis.rank]
            assert len(others) <= 1, f"{name} is on more than two stages"
            shared |= dict.fromkeys([name] * len(others), *others)
        return StageNames(axis, tuple(sorted({name for names in stages for name in names})), own, shared)

    @property
    def counted_before(self) -> frozenset[str]:
        """Names of this stage's parameters that an earlier stage holds too, and counts."""
        return frozenset(name for name, stage in self.shared.items() if stage < self.axis.rank)

    def sum_shared(self, views: Mapping[str, Tensor]) -> None:
        """Adds up, in place, what two stages have of the same parameter; both then have the same bits."""
        for name in sorted(self.shared):
            views[name].add_(self.axis.swap(self.shared[name], views[name].contiguous()))
