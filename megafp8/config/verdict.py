"""What becomes of flags that people's scripts carry and that have no field here (the table is in compat.py).

A foreign flag is accepted without effect (one log line), refused with what it is for and the mend, or "not yet": a
feature that a later version brings. Some of ours are "not yet" as well: they have a field, and only their harmless
values pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["supported", "accepted", "refused", "not yet"]


@dataclass(frozen=True)
class Foreign:
    """A flag without a field.

    Attributes:
        flag: option string.
        nargs: argparse's number of values: 0, 1, "*".
        kind: the verdict.
        text: accepted: why it has no effect; refused: what it is for and what to use instead; not yet: the feature.
        harmless: values with which a refused or not-yet flag changes nothing.
        needs_ranks: a not-yet flag that does nothing in a job of one process.
    """

    flag: str
    nargs: int | str
    kind: Kind
    text: str
    harmless: tuple[str, ...] = ()
    needs_ranks: bool = False

    def is_harmless(self, values: Sequence[str], world_size: int) -> bool:
        """Returns whether the flag with these values leaves everything as it is."""
        if self.kind == "accepted" or (self.needs_ranks and world_size == 1):
            return True
        return bool(values) and all(value in self.harmless for value in values)


@dataclass(frozen=True)
class NotYetField:
    """A field whose feature is still to come.

    Attributes:
        name: the field.
        feature: what it would turn on.
        harmless: values that pass.
        needs_ranks: does nothing in a job of one process.
    """

    name: str
    feature: str
    harmless: tuple[Any, ...] = (None, False, 1)
    needs_ranks: bool = False

    def is_harmless(self, value: Any, world_size: int) -> bool:
        """Returns whether the field's value asks for nothing new."""
        same = any(type(value) is type(h) and value == h for h in self.harmless)  # True == 1, but means another thing
        return same or (self.needs_ranks and world_size == 1)


def accepted(why: str, *flags: str) -> tuple[Foreign, ...]:
    """Entries for flags that change nothing. A flag is written with its values: `--a`, `--a X` or `--a X...`."""
    return tuple(Foreign(name, nargs, "accepted", why) for name, nargs in _spelled(flags))


def refused(text: str, *flags: str, harmless: Iterable[str] = ()) -> tuple[Foreign, ...]:
    """Entries for flags that megafp8 won't have; `text` says what they are for and what to use instead."""
    return tuple(Foreign(name, nargs, "refused", text, tuple(harmless)) for name, nargs in _spelled(flags))


def not_yet(feature: str, *flags: str, harmless: Iterable[str] = (), needs_ranks: bool = False) -> tuple[Foreign, ...]:
    """Entries for flags of a feature that is still to come."""
    return tuple(
        Foreign(name, nargs, "not yet", feature, tuple(harmless), needs_ranks) for name, nargs in _spelled(flags)
    )


def _spelled(flags: Iterable[str]) -> Iterable[tuple[str, int | str]]:
    for text in flags:
        name, *values = text.split()
        yield name, ("*" if values == ["X..."] else len(values))
