"""Which parameters an update treats alike, and in which precision their state is stored, as the flags say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megafp8.optimizer.adamw import Rates
from megafp8.optimizer.layout import Group
from megafp8.params import ParamSpec


def default_groups(specs: Mapping[str, ParamSpec], decoupled: Iterable[str] = ()) -> dict[str, Group]:
    """By name: decay as the spec says; decoupled: names that follow --decoupled-lr."""
    decoupled = frozenset(decoupled)
    return {name: Group(spec.decay, name in decoupled) for name, spec in specs.items()}


def rates_of(group: Group, *, lr: float, decoupled_lr: float, weight_decay: float) -> Rates:
    """A group's rates in one step."""
    return Rates(
        (decoupled_lr if group.decoupled else lr) * group.lr_mult, weight_decay * group.wd_mult if group.decay else 0.0
    )
