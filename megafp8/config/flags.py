"""How a dataclass field becomes a command-line flag.

Each configuration group is a frozen dataclass whose fields are made by `flag(...)`. What argparse needs beyond the
field's name, type and default (help, choices, number of values, spelling) lies in the field's metadata, so that a flag
is described in exactly one place.
"""

import dataclasses
import types
import typing
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from collections.abc import Callable, Iterable
from typing import Any

_KEY = "flag"


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """What argparse needs to know of a field.

    Attributes:
        help: one plain line or two, with the unit; the default is appended by the parser.
        spelling: the option string when it isn't the field's name with dashes (`--disable-bias-linear`).
        aliases: further option strings that Megatron-LM accepts for the same field.
        choices: allowed values.
        nargs: argparse's `nargs` for fields that hold tuples.
        metavar: placeholder in `--help`; of `choices`, in place of their list, which the help must then give.
        shown_default: text for the default in `--help` when it is derived from other flags.
    """

    help: str
    spelling: str | None = None
    aliases: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    nargs: str | int | None = None
    metavar: str | None = None
    shown_default: str | None = None


def flag(
    default: Any,
    help: str,
    *,
    spelling: str | None = None,
    aliases: Iterable[str] = (),
    choices: Iterable[Any] | None = None,
    nargs: str | int | None = None,
    metavar: str | None = None,
    shown_default: str | None = None,
) -> Any:
    """Returns a dataclass field that is also a command-line flag (arguments: see `FlagSpec`)."""
    spec = FlagSpec(help, spelling, tuple(aliases), tuple(choices) if choices else None, nargs, metavar, shown_default)
    return dataclasses.field(default=default, metadata={_KEY: spec})


def derived(default: Any) -> Any:
    """Returns a field without a flag: its value follows from others (see resolve.py) or from the environment."""
    return dataclasses.field(default=default)


def spec_of(field: dataclasses.Field) -> FlagSpec | None:
    """Returns the field's `FlagSpec`, or None where the field has no flag."""
    return field.metadata.get(_KEY)


def spelling_of(field: dataclasses.Field) -> str:
    """Returns the option string by which error messages and `--help` name the field."""
    spec = spec_of(field)
    return (spec and spec.spelling) or "--" + field.name.replace("_", "-")


def value_type(annotation: Any) -> Callable[[str], Any]:
    """Returns the scalar type of a field's annotation: `int | None` and `tuple[int, ...]` both give int."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    return annotation


def add_group(parser: ArgumentParser, group: type, title: str) -> None:
    """Adds one flag per field of the dataclass `group` to `parser`, under the heading `title`.

    Absent flags leave no trace in the namespace (`SUPPRESS`): so the caller can tell a flag that was given from one
    that has its default, which `--config` and the cross-checks need.
    """
    hints = typing.get_type_hints(group)
    section = parser.add_argument_group(title, (group.__doc__ or "").strip().splitlines()[0])
    for field in dataclasses.fields(group):
        spec = spec_of(field)
        if spec is not None:
            options = [spelling_of(field), *spec.aliases]
            section.add_argument(
                *options, dest=field.name, default=SUPPRESS, **_keywords(field, spec, hints[field.name])
            )


def _keywords(field: dataclasses.Field, spec: FlagSpec, annotation: Any) -> dict[str, Any]:
    kind = value_type(annotation)
    keywords: dict[str, Any] = {"help": spec.help + _default_text(field, spec, kind)}
    if kind is bool and field.default is None:
        return keywords | {"action": BooleanOptionalAction}
    if kind is bool:
        return keywords | {"action": "store_false" if field.default else "store_true"}
    keywords |= {"type": kind, "choices": spec.choices, "nargs": spec.nargs}
    if spec.choices is None or spec.metavar is not None:  # long lists of choices would break the columns
        keywords["metavar"] = spec.metavar or {int: "N", float: "X", str: "TEXT"}[kind]
    return keywords


def _default_text(field: dataclasses.Field, spec: FlagSpec, kind: Any) -> str:
    if spec.shown_default is not None:
        return f" (default: {spec.shown_default})".replace("%", "%%")
    if kind is bool or field.default in (None, ""):
        return ""
    return f" (default: {field.default})".replace("%", "%%")
