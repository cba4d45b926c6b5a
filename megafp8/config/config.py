"""The whole configuration of a run: one frozen dataclass a group, and its JSON form."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megafp8.config.checkpoint import CheckpointConfig
from megafp8.config.data import DataConfig
from megafp8.config.flags import spec_of, spelling_of
from megafp8.config.fp8 import FP8Config
from megafp8.config.logging import LoggingConfig
from megafp8.config.model import ModelConfig
from megafp8.config.optimizer import OptimizerConfig
from megafp8.config.parallel import ParallelConfig
from megafp8.config.train import TrainConfig

GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "fp8": FP8Config,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}


@dataclass(frozen=True)
class Config:
    """A resolved and checked configuration: read it, never write it.

    Build one with `parse_args` (from flags) or `build_config` (from values). Fields carry the names of Megatron-LM's
    arguments.

    Attributes:
        given: field name -> value of the flags that the user gave, before defaults were derived. A rerun starts from
            these, so that changing `--hidden-size` changes what is derived from it.
        notes: one line per flag that was accepted without effect or changed by another; for the log.
    """

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    fp8: FP8Config = FP8Config()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def replace(self, **values: Any) -> "Config":
        """Returns a copy with fields changed by name, whatever group they are in; derives and checks nothing."""
        by_group: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            by_group.setdefault(group_of(name), {})[name] = value
        groups = {g: dataclasses.replace(getattr(self, g), **changes) for g, changes in by_group.items()}
        return dataclasses.replace(self, **groups)

    def value(self, name: str) -> Any:
        """Returns the field `name`, whatever group it is in."""
        return getattr(getattr(self, group_of(name)), name)

    def is_given(self, name: str) -> bool:
        """Returns whether the user gave the flag of the field `name`."""
        return name in self.given

    def items(self) -> Iterator[tuple[str, str, Any]]:
        """Yields (group, field name, value) of every field in order."""
        for group in GROUPS:
            section = getattr(self, group)
            for f in dataclasses.fields(section):
                yield group, f.name, getattr(section, f.name)

    def to_dict(self) -> dict[str, Any]:
        """Returns the configuration as plain JSON types: the given flags, and all values by group."""
        groups = {group: dataclasses.asdict(getattr(self, group)) for group in GROUPS}
        return {"given": dict(self.given), "config": groups, "notes": list(self.notes)}

    def to_json(self) -> str:
        """Returns `to_dict()` as indented JSON; `from_json` reads it back."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Config":
        """Returns the configuration that `to_dict` wrote, exactly, without deriving or checking anew.

        Raises:
            ValueError: a group or field is unknown (written by another version).
        """
        groups = {}
        for name, values in content["config"].items():
            if name not in GROUPS:
                raise ValueError(f"args.json: unknown group '{name}'; it was written by another version of megafp8")
            for key in values:
                if key not in field_table() or field_table()[key][0] != name:
                    raise ValueError(f"args.json: unknown field '{name}.{key}'; written by another version of megafp8")
            groups[name] = GROUPS[name](**{key: from_plain(key, value) for key, value in values.items()})
        given = {key: from_plain(key, value) for key, value in content.get("given", {}).items()}
        return cls(**groups, given=given, notes=tuple(content.get("notes", ())))

    @classmethod
    def from_json(cls, text: str) -> "Config":
        """Returns the configuration in `text`, which `to_json` wrote. Raises ValueError as `from_dict` does."""
        return cls.from_dict(json.loads(text))


def field_table() -> dict[str, tuple[str, dataclasses.Field]]:
    """Returns field name -> (group name, field) over all groups; names are unique over the groups."""
    return _FIELDS


def group_of(name: str) -> str:
    """Returns the group of the field `name`. Raises ValueError when there is no such field."""
    if name not in _FIELDS:
        raise ValueError(f"there is no configuration field '{name}'")
    return _FIELDS[name][0]


def flag_of(name: str) -> str:
    """Returns the option string of the field `name`, e.g. `--disable-bias-linear` of add_bias_linear."""
    return spelling_of(_FIELDS[name][1])


def has_flag(name: str) -> bool:
    """Returns whether the field `name` can be set on the command line."""
    return name in _FIELDS and spec_of(_FIELDS[name][1]) is not None


def from_plain(name: str, value: Any) -> Any:
    """Returns a JSON value as the field `name` holds it: lists become tuples.

    Raises:
        ValueError: the value's type doesn't fit the field, or it is none of the flag's choices.
    """
    group, field = _FIELDS[name]
    hint = typing.get_type_hints(GROUPS[group])[name]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        allowed = list(typing.get_args(hint))
    else:
        allowed = [hint]
    if value is None and type(None) in allowed:
        return None
    sequence = next((a for a in allowed if typing.get_origin(a) is tuple), None)
    if sequence is None:
        if isinstance(value, list | tuple):
            raise ValueError(f"{flag_of(name)} takes one value, not the list {list(value)}")
        return _scalar(name, field, [a for a in allowed if a is not type(None)], value)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{flag_of(name)} takes a list, not {value!r}")
    return tuple(_scalar(name, field, [typing.get_args(sequence)[0]], item) for item in value)


def _scalar(name: str, field: dataclasses.Field, kinds: list[type], value: Any) -> Any:
    """`value` as one of `kinds`, from the flag's choices if it has any. Raises ValueError."""
    if float in kinds and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"{flag_of(name)} {value}: too large; give a smaller number") from None
    if type(value) not in kinds:
        raise ValueError(f"{flag_of(name)} takes {' or '.join(kind.__name__ for kind in kinds)}, not {value!r}")
    choices = spec_of(field).choices if spec_of(field) else None
    if choices and value not in choices:
        raise ValueError(f"{flag_of(name)} {value}: no such choice; use one of {', '.join(map(str, choices))}")
    return value


def diff(old: Config, new: Config) -> list[str]:
    """Returns a line per field whose value differs, e.g. `--lr: 0.0003 -> 0.0001`, in the order of the groups."""
    lines = []
    for (_, name, before), (_, _, after) in zip(old.items(), new.items(), strict=True):
        if before != after:
            label = flag_of(name) if has_flag(name) else name
            lines.append(f"{label}: {before} -> {after}")
    return lines


_FIELDS = {f.name: (group, f) for group, kind in GROUPS.items() for f in dataclasses.fields(kind)}
assert len(_FIELDS) == sum(len(dataclasses.fields(kind)) for kind in GROUPS.values()), "field names must be unique"
