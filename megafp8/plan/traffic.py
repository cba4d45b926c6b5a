"""What traffic is counted in: messages of one rank, by kind, group and purpose; and the groups of a layout by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from megafp8.config import Config
from megafp8.config.parallel import layout_sizes

WIRE = {"sum": 2.0, "max": 2.0, "scatter_sum": 1.0, "deal": 1.0}
"""Times (n - 1) / n of a message's bytes that leave a rank in a ring, or one by one (deal)."""


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind that one rank takes part in, in one optimizer step.

    kind: gather, scatter_sum (reduce-scatter), sum and max (all-reduce), deal (all-to-all), send. group: name of the
    axis (`parallel.ParallelContext`), "world" for all ranks; size: its ranks. bytes: of the tensors that this rank
    hands to the collective: its shard for gather, the whole for the others. messages: calls.
    """

    kind: str
    group: str
    purpose: str
    bytes: int
    messages: int
    size: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that leave this rank when the collective is a ring; of a `deal`, an even share stays here."""
        if self.kind == "gather":
            return float(self.bytes * (self.size - 1))
        return self.bytes * WIRE[self.kind] * (self.size - 1) / self.size if self.kind in WIRE else float(self.bytes)


@dataclass(frozen=True)
class Group:
    """An axis of the layout. name: of the ranks that it really is, where two axes are the same ones."""

    name: str
    size: int


class Groups(dict[str, Group]):
    """Axis -> its group, as `parallel.build_parallel` makes them."""

    @staticmethod
    def of(config: Config) -> Groups:
        sizes = layout_sizes(config.parallel)
        found = Groups({name: Group(name, size) for name, size in sizes.items()})
        found["dp_cp"] = _joint(found["dp"], found["cp"], "dp_cp")
        if sizes["ep"] == 1 and sizes["etp"] == sizes["tp"]:
            found |= {"etp": found["tp"], "edp": found["dp_cp"], "ep_etp": found["tp"]}
        else:
            found["ep_etp"] = _joint(found["ep"], found["etp"], "ep_etp")
        found["world"] = Group("world", config.parallel.world_size)
        return found


def _joint(first: Group, second: Group, name: str) -> Group:
    if second.size == 1:
        return first
    return second if first.size == 1 else Group(name, first.size * second.size)


@dataclass
class Passes:
    """What a part of the model sends in one microbatch.

    forward, backward: in each. tail: of forward, after the last tensor that is kept for backward: a recomputation that
    ends with this part stops before it. keeps: whether anything of the part is kept for backward.
    """

    forward: list[Traffic] = field(default_factory=list)
    backward: list[Traffic] = field(default_factory=list)
    tail: list[Traffic] = field(default_factory=list)
    keeps: bool = True

    def add(self, where: str, kind: str, group: Group, purpose: str, size: int, messages: int = 1) -> None:
        """size: bytes of all messages together. Nothing goes over a group of one rank."""
        if group.size > 1 and messages:
            getattr(self, where).append(Traffic(kind, group.name, purpose, size, messages, group.size))

    def then(self, *others: Passes) -> Passes:
        """This part and then others, as one."""
        parts = (self, *others)
        last = max((n for n, part in enumerate(parts) if part.keeps), default=0)
        return Passes(
            [t for part in parts[: last + 1] for t in part.forward] + [t for part in parts[:last] for t in part.tail],
            [t for part in parts for t in part.backward],
            parts[last].tail + [t for part in parts[last + 1 :] for t in (*part.forward, *part.tail)],
        )

    @property
    def recomputed(self) -> Passes:
        """The part run once more in backward."""
        return Passes(self.forward, self.backward + self.forward, self.tail)

    @property
    def all(self) -> list[Traffic]:
        return self.forward + self.tail + self.backward


def times(found: Iterable[Traffic], number: int) -> Iterator[Traffic]:
    """The same `number` times."""
    for traffic in found:
        yield replace(traffic, bytes=traffic.bytes * number, messages=traffic.messages * number)


def merged(found: Iterable[Traffic]) -> list[Traffic]:
    """Traffic of one kind, group and purpose together, in the order in which each is first met."""
    totals: dict[tuple[str, str, str, int], tuple[int, int]] = {}
    for t in found:
        key = t.kind, t.group, t.purpose, t.size
        size, messages = totals.get(key, (0, 0))
        totals[key] = size + t.bytes, messages + t.messages
    return [Traffic(k, g, p, size, count, n) for (k, g, p, n), (size, count) in totals.items()]
