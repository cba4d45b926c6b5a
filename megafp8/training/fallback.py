"""Linears that run in BF16 for now: who they are, since when, and the switch, between two steps, on all ranks alike.

Falling back changes what a linear computes with, not what it is: its masters, moments and places in checkpoints stay.
A weight with a BF16 copy just stops being quantized; an FP8 primary weight gets its BF16 bytes back, beside the FP8
buffer of the optimizer, which writes it from the masters from then on. Producers ask their consumer anew each step.

Linears that are multiplied together (`ParamSpec.stack`: a layer's experts) fall back together, on all ranks: they stay
alike, so that they can go on to run as one, and ranks send each other's rows in one format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megafp8.config.fp8 import FP8Config
from megafp8.fp8 import Linear, Recipe
from megafp8.fp8.monitor import quantized_modules
from megafp8.params import spec_of
from megafp8.training.build import Parts


class Fallbacks:
    """since: global name of a linear -> the iteration after which it runs in BF16; of all ranks' linears."""

    def __init__(self, parts: Parts, since: dict[str, int] | None = None) -> None:
        self._parts, self._flags = parts, parts.config.fp8
        self._recipes: dict[str, tuple[Linear, Recipe]] = {}
        self._strikes: Counter[str] = Counter()
        self.since: dict[str, int] = {}
        if since:
            self._fall(since)

    @property
    def flags(self) -> FP8Config:
        return self._flags

    def strike(self, name: str) -> bool:
        """Counts a non-finite step that was traced to `name`; whether it now has to fall back."""
        self._strikes[name] += 1
        return self._flags.fp8_fallback_after is not None and self._strikes[name] >= self._flags.fp8_fallback_after

    def is_too_noisy(self, sqnr_db: float | None) -> bool:
        limit = self._flags.fp8_fallback_sqnr
        return limit is not None and sqnr_db is not None and sqnr_db < limit

    def fall_back(self, names: Iterable[str], iteration: int) -> list[str]:
        """The linears among `names` that run in FP8, here or on another rank, run in BF16 from the next step on.

        Every rank calls it; what one of them votes for happens on all. Returns their names, and those of linears that
        are multiplied together with one of them. A name may also be that of the module that holds such a group.
        """
        own = sorted((name, group_of(linear)) for name, linear in quantized_modules(self._parts.model).items())
        votes = self._parts.parallel.everyone.exchange([sorted(set(names)), own])
        voted, groups = {name for vote, _ in votes for name in vote}, {n: g for _, here in votes for n, g in here}
        # A group whose linears are no modules that run was traced to by the name of what holds it.
        hit = {group for name, group in groups.items() if name in voted or _holder(name, group) in voted}
        wanted = sorted(name for name, group in groups.items() if group in hit)
        self._fall(dict.fromkeys(wanted, iteration))
        return wanted

    def return_due(self, iteration: int) -> list[str]:
        """Linears whose time in BF16 is over run in FP8 from the next step on; returns their names."""
        time = self._flags.fp8_fallback_for
        due = sorted(name for name, since in self.since.items() if time and iteration >= since + time)
        self.give_back(due)
        return due

    def give_back(self, names: Iterable[str]) -> None:
        """FP8 again, from the next step on."""
        names = list(names)
        if not names:
            return
        optimizer = self._parts.optimizer
        optimizer.weights.arrivals.wait_all()
        for name in names:
            del self.since[name], self._strikes[name]
            if name in self._recipes:
                linear, recipe = self._recipes.pop(name)
                linear.use_recipe(recipe)
                optimizer.hold_in_fp8(spec_of(linear.weight).name, only=True)
        optimizer.write_weights()

    def _fall(self, since: dict[str, int]) -> None:
        if not since:
            return
        optimizer = self._parts.optimizer
        optimizer.weights.arrivals.wait_all()
        self.since |= since
        here = quantized_modules(self._parts.model)
        for name in since.keys() & here.keys():
            linear = here[name]
            self._recipes[name] = linear, linear.recipe
            optimizer.hold_in_fp8(spec_of(linear.weight).name, only=False)
            linear.use_recipe(None)
        optimizer.write_weights()


def group_of(linear: Linear) -> str:
    """Name of what a linear is multiplied together with; its own where it runs alone."""
    stack = spec_of(linear.weight).stack
    return linear.name if stack is None else stack[0]


def _holder(name: str, group: str) -> str | None:
    """Of a linear in a group: the group's name is its holder's, and the kind of linear."""
    return None if group == name else group.rpartition(".")[0]
