"""From a command line, a JSON file or plain values to a checked Config."""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megafp8.config import compat, validate
from megafp8.config.config import GROUPS, Config, field_table, flag_of, from_plain, has_flag
from megafp8.config.flags import add_group
from megafp8.config.resolve import resolve
from megafp8.config.strangers import mend_for, pasted_dash

TITLES = {
    "model": "model",
    "parallel": "parallelism",
    "fp8": "FP8",
    "optimizer": "optimizer",
    "data": "data and tokenizer",
    "train": "training",
    "checkpoint": "checkpoints",
    "logging": "logging",
}


def parse_args(
    argv: Sequence[str] | None = None, *, env: Mapping[str, str] = os.environ, check_files: bool = True
) -> Config:
    """Returns the resolved and checked configuration of a command line.

    Values come from the flags' defaults, then from `--config FILE`, then from the command line; later ones win.

    Args:
        argv: the arguments without the program's name; None takes `sys.argv[1:]`.
        env: environment variables (WORLD_SIZE).
        check_files: whether data and tokenizer files must exist.

    Raises:
        ValueError: one line that names the flag, the value and the mend.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if dash := next(filter(None, map(pasted_dash, argv)), None):  # flags that take many values would take it for one
        raise ValueError(dash)
    namespace, rest = build_parser().parse_known_args(argv)
    if rest:
        raise ValueError(_unknown(rest, argv))
    values = vars(namespace)
    foreign = values.pop("foreign", [])
    file = values.pop("config", None)
    given = {} if file is None else read_values(file)
    given |= {name: from_plain(name, value) for name, value in values.items()}
    return build_config(env=env, check_files=check_files, foreign=foreign, **given)


def build_config(
    *,
    env: Mapping[str, str] = os.environ,
    check_files: bool = True,
    foreign: Sequence[tuple[str, tuple[str, ...]]] = (),
    **given: Any,
) -> Config:
    """Returns the resolved and checked configuration of field values, e.g. `build_config(num_layers=2, ...)`.

    Args:
        env, check_files: as in `parse_args`.
        foreign: flags without a field of ours (compat.py), each with its values.
        given: field name -> value, as the flags would set them.

    Raises:
        ValueError: as `parse_args` does.
    """
    for name in given:
        if not has_flag(name):
            raise ValueError(f"there is no flag for the configuration field '{name}'")
    config = Config(given=dict(given)).replace(**given)
    validate.check_limits(config)
    config = resolve(config, env)
    notes = compat.check(config, foreign) + validate.idle_notes(config)
    validate.check(config)
    if check_files:
        validate.check_files(config)
    return Config(**{g: getattr(config, g) for g in GROUPS}, given=config.given, notes=tuple(notes))


def read_values(path: str) -> dict[str, Any]:
    """Returns the field values in a JSON file: a run's args.json, or an object of flags.

    An args.json gives the flags of that run (its `given` part). Otherwise keys are flags or field names
    (`"hidden-size"`, `"--hidden-size"`, `"hidden_size"`), flat or in the groups' objects.

    Raises:
        ValueError: no such file, not JSON, an unknown key, or a value of the wrong type.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}; give a JSON file or a run's args.json") from None
    except (ValueError, RecursionError) as error:  # JSON's and UTF-8's errors are ValueErrors
        raise ValueError(f"--config {path}: not JSON ({error})") from None
    if isinstance(content, dict) and "given" in content and "config" in content:
        content = content["given"]
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: the file must hold one JSON object of flags")
    values: dict[str, Any] = {}
    for key, value in content.items():
        section = value if key in GROUPS and isinstance(value, dict) else {key: value}
        for name, item in section.items():
            values |= _file_value(path, name, item)
    return values


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all flags: those of the groups' fields, and hidden ones of compat.py."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        usage="%(prog)s [flags]",
        description="Pretrains a GPT in FP8. Flags carry Megatron-LM's names and meanings.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=44, width=110),
    )
    parser.add_argument(
        "--config",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="Read flags from a JSON file or a run's args.json; the command line overrides it.",
    )
    for name, group in GROUPS.items():
        add_group(parser, group, TITLES[name])
    features = {field.name: field.feature for field in compat.NOT_YET_FIELDS}
    for action in parser._actions:
        if action.dest in features:
            action.help += f" Not yet: {features[action.dest]}."
    for entry in compat.FOREIGN:
        parser.add_argument(
            entry.flag, action=_Foreign, nargs=entry.nargs, dest="foreign", default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )  # fmt: skip
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse, with errors as ValueError: the caller decides on the exit code."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


class _Foreign(argparse.Action):
    """Notes a flag that has no field, with its values, in the order given."""

    def __call__(self, parser, namespace, values, option_string=None):  # noqa: D102
        seen = getattr(namespace, "foreign", [])
        texts = tuple(values) if isinstance(values, list) else () if values is None else (values,)
        namespace.foreign = [*seen, (self.option_strings[0], texts)]


def _file_value(path: str, key: str, value: Any) -> dict[str, Any]:
    name = key.removeprefix("--").replace("-", "_")
    by_flag = {flag_of(field).removeprefix("--").replace("-", "_"): field for field in field_table()}
    if name not in field_table() and name in by_flag and value is True:  # "disable-bias-linear": true
        field = by_flag[name]
        return {field: not field_table()[field][1].default}
    if not has_flag(name):
        close = difflib.get_close_matches(name, [n for n in field_table() if has_flag(n)], n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ValueError(f"--config {path}: unknown key '{key}'{hint}")
    try:
        return {name: from_plain(name, value)}
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None


def _unknown(rest: list[str], argv: list[str]) -> str:
    text = rest[0].split("=")[0]
    if not text.startswith("-"):
        before = argv[argv.index(rest[0]) - 1] if rest[0] in argv[1:] else ""
        if before.startswith("--"):
            return f"unexpected argument '{rest[0]}' after {before}, which takes no value there; leave it out"
        return f"unexpected argument '{text}': values must follow their flag"
    if mend := mend_for(text):
        return f"unknown flag {text}: {mend}"
    if area := compat.out_of_scope(text):
        return f"{text}: is for {area}, which is out of scope here (GPT pretraining); leave it out"
    known = [flag_of(name) for name in field_table() if has_flag(name)] + [e.flag for e in compat.FOREIGN]
    close = difflib.get_close_matches(text, known, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}?" if close else "; see --help for the flags there are"
    return f"unknown flag {text}{hint}"
