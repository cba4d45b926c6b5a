"""Counts what a rank hands to collectives: bytes and messages, by kind and by group. What forecasts are held to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

Key = tuple[str, str]
"""(kind, group): gather, scatter_sum, sum, max, deal or send, over the axis of that name (`parallel.Axis`)."""


@dataclass
class Meter:
    """bytes: of the tensors that this rank handed over, its own shard for a gather, the whole for the others.
    messages: calls. Both since the start; `since` gives what came after a copy."""

    bytes: Counter[Key] = field(default_factory=Counter)
    messages: Counter[Key] = field(default_factory=Counter)

    def add(self, kind: str, group: str, *parts: Tensor) -> None:
        """One message of one tensor or several."""
        self.bytes[kind, group] += sum(x.numel() * x.element_size() for x in parts)
        self.messages[kind, group] += 1

    def include(self, other: Meter) -> None:
        """Counts once more what another has counted."""
        self.bytes.update(other.bytes)
        self.messages.update(other.messages)

    @contextmanager
    def aside(self) -> Iterator[Meter]:
        """What would be counted inside goes to the meter that this gives: of messages that are recorded, not sent."""
        own, found = (self.bytes, self.messages), Meter()
        self.bytes, self.messages = found.bytes, found.messages
        try:
            yield found
        finally:
            self.bytes, self.messages = own

    def copy(self) -> Meter:
        return Meter(Counter(self.bytes), Counter(self.messages))

    def since(self, before: Meter) -> dict[Key, tuple[int, int]]:
        """(bytes, messages) by kind and group, since the copy `before` was made."""
        calls = self.messages - before.messages
        return {key: (self.bytes[key] - before.bytes[key], count) for key, count in sorted(calls.items())}
