"""What all ranks must decide alike though only some of them know of it: to stop, because of a signal or a clock.

A rank that stopped alone would leave the others waiting in their next collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafp8.parallel import ParallelContext
from megafp8.training.held import HostCopy


class Agreement:
    """Takes the ranks' wishes once an iteration and returns those of all, the largest of each.

    On one rank they are its own, at once. Otherwise they are those of the call before: the device has long known
    them, so reading them doesn't hold it up.
    """

    def __init__(self, parallel: ParallelContext, device: torch.device) -> None:
        self._parallel, self._device = parallel, device
        self._last: HostCopy | None = None

    def agree(self, wishes: Sequence[int]) -> list[int]:
        """wishes: numbers of 0 or more; every rank calls it with as many."""
        if self._parallel.world_size == 1:
            return list(wishes)
        now = torch.tensor(wishes, dtype=torch.int32).to(self._device, non_blocking=True)
        last, self._last = self._last, HostCopy(self._parallel.everyone.max_(now))
        return [0] * len(wishes) if last is None else last.read().tolist()
