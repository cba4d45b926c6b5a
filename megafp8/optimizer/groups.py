"""Which parameters an update treats alike, and in which precision their state is stored, as the flags say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from megafp8.config import Config
from megafp8.config.patterns import multipliers
from megafp8.optimizer.adamw import Rates
from megafp8.optimizer.layout import Group
from megafp8.optimizer.precision import FP32_STATE, Precision
from megafp8.params import ParamSpec


def default_groups(specs: Mapping[str, ParamSpec]) -> dict[str, Group]:
    """By name: decay as the spec says."""
    return {name: Group(spec.decay) for name, spec in specs.items()}


def groups_of(specs: Mapping[str, ParamSpec], config: Config, decoupled: Iterable[str] = ()) -> dict[str, Group]:
    """By name, as the flags say. decoupled: names that follow --decoupled-lr."""
    decoupled = frozenset(decoupled)
    lr = multipliers("--lr-multipliers", config.optimizer.lr_multipliers)
    decay = multipliers("--weight-decay-multipliers", config.optimizer.weight_decay_multipliers)
    return {
        name: Group(spec.decay, name in decoupled, factor_of(lr, name), factor_of(decay, name))
        for name, spec in specs.items()
    }


def factor_of(factors: Mapping[str, float], name: str) -> float:
    """The factor of the last pattern that matches; 1 without one."""
    return next((factor for pattern, factor in reversed(factors.items()) if fnmatchcase(name, pattern)), 1.0)


def precision_of(name: str, shape: Sequence[int], config: Config) -> Precision:
    """Of a parameter's masters and moments. Norms and biases stay in FP32: they are few."""
    o = config.optimizer
    kept = any(fnmatchcase(name, pattern) for pattern in o.keep_optimizer_state_in_fp32)
    if not o.use_precision_aware_optimizer or len(shape) < 2 or kept:
        return FP32_STATE
    return Precision("remainder" if o.store_param_remainders else "fp32", o.exp_avg_dtype, o.exp_avg_sq_dtype)


def check_patterns(names: Iterable[str], config: Config) -> None:
    """Raises ValueError for a pattern of a flag that is the name of no trained parameter. names: of all ranks'."""
    names, o = list(names), config.optimizer
    given = {
        "--lr-multipliers": multipliers("--lr-multipliers", o.lr_multipliers),
        "--weight-decay-multipliers": multipliers("--weight-decay-multipliers", o.weight_decay_multipliers),
        "--keep-optimizer-state-in-fp32": o.keep_optimizer_state_in_fp32,
    }
    for flag, patterns in given.items():
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"{flag} {pattern}: no trained parameter has such a name; names are like {names[0]}")


def rates_of(group: Group, *, lr: float, decoupled_lr: float, weight_decay: float) -> Rates:
    """A group's rates in one step."""
    return Rates(
        (decoupled_lr if group.decoupled else lr) * group.lr_mult, weight_decay * group.wd_mult if group.decay else 0.0
    )
