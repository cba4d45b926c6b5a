"""Which stages of a pipeline hold which parameters: what norms are put together from, and what stages share.

A parameter that two stages hold, the tied embedding on the first and the last one, has the same value on both; each has
a part of its gradient, and after their sum both update it alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
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

    def whole(self, values: Tensor) -> Tensor:
        """A number of each of this stage's parameters, in order, as the vector of all parameters' numbers.

        What two stages hold counts on the first of them, unless it is not finite.
        """
        if self.axis.size == 1:
            return values
        repeated = torch.tensor([self.shared.get(name, self.axis.size) < self.axis.rank for name in self.own])
        values = torch.where(repeated.to(values.device) & values.isfinite(), torch.zeros_like(values), values)
        place = {name: i for i, name in enumerate(self.names)}
        every = torch.zeros(len(self.names), dtype=values.dtype, device=values.device)
        every[torch.tensor([place[name] for name in self.own], device=values.device)] = values
        return self.axis.sum_(every)

    def sum_shared(self, views: Mapping[str, Tensor]) -> None:
        """Adds up, in place, what two stages have of the same parameter; both then have the same bits."""
        for name in sorted(self.shared):
            views[name].add_(self.axis.swap(self.shared[name], views[name].contiguous()))
