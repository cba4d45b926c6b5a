"""ParallelContext: every parallel axis of the job, passed as an argument, never a global.

An axis is a size, this rank's place on it and its process group (None where the size is 1, so that code for one
process posts no collective).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Axis:
    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, self

    def split(self, n: int) -> tuple[int, int]:
        """This rank's half-open part of `n` equal shares; `n` must divide (checked by the configuration)."""
        assert n % self.size == 0, (n, self.size)
        share = n // self.size
        return self.rank * share, (self.rank + 1) * share


@dataclass(frozen=True)
class ParallelContext:
    """tp: tensor, cp: context, dp: data, pp: pipeline. `rank` and `world_size` are the job's."""

    tp: Axis = field(default_factory=Axis)
    cp: Axis = field(default_factory=Axis)
    dp: Axis = field(default_factory=Axis)
    pp: Axis = field(default_factory=Axis)
    rank: int = 0
    world_size: int = 1
    sequence_parallel: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what only one rank writes."""
        return self.rank == 0
