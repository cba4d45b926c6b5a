"""The last step's shares of each expert, which the global auxiliary loss goes on with after a resume."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from megafp8.core.moe.router import Router
from megafp8.params import StateItem

BALANCE = "balance/"
"""Under which they are saved: beside the weights, since they say nothing of the model."""


class LastShares:
    """The shares of all `routers`, FP32 [E] each."""

    def __init__(self, routers: Iterable[Router]) -> None:
        self._shares = {f"{BALANCE}{r.name}.shares": r.shares for r in routers if r.shares is not None}

    def state(self) -> dict[str, StateItem]:
        return {name: StateItem.whole(shares) for name, shares in self._shares.items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes the shares back; a checkpoint of a run without that loss has none, and they stay even."""
        for name, shares in self._shares.items():
            if name in tensors:
                shares.copy_(tensors[name])
