"""The command lines of tools: argparse whose errors are one line with a mend, and checks that many of them make."""

import argparse
import difflib
import itertools
import re
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from megafp8.config.mistakes import say_mistake
from megafp8.config.publish import writable_directory
from megafp8.config.strangers import pasted_dash


class ToolParser(argparse.ArgumentParser):
    """argparse, but a mistake gives one line, without the usage in front, and a guess at what was meant."""

    def parse_known_args(self, args=None, namespace=None):
        self._given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if "required" in message and (flag := self._misspelt()):  # that one may be why the other is missing
            message = f"unrecognized arguments: {flag}"
        if missing := re.match(r"argument (--\S+): expected one argument", message):
            message += self._dashed(missing[1])
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            message = self._unknown(unknown[1].split("=")[0])
        elif message.startswith("the following arguments are required"):
            message += f"; {self.prog} --help explains them"
        say_mistake(f"{self.prog}: error: {message.removeprefix('argument ')}")
        self.exit(2)

    def _dashed(self, flag: str) -> str:
        """How to give a text of flags, which argparse takes for one more flag where it has no space."""
        action = self._option_string_actions.get(flag)
        value = next((after for name, after in itertools.pairwise(self._given) if name == flag), "")
        written = action is not None and action.type is None and value.startswith("--")
        return f"; write {flag}={value}" if written else ""

    def _misspelt(self) -> str | None:
        """The first flag on the command line that is none of ours."""
        if self._subparsers is not None:  # they know their own
            return None
        flags = [text.split("=")[0] for text in self._given if text.startswith("--") and text != "--"]
        known = self._option_string_actions
        return next((flag for flag in flags if not any(name.startswith(flag) for name in known)), None)

    def _unknown(self, text: str) -> str:
        if not text.startswith("-"):
            return pasted_dash(text) or f"unexpected argument '{text}': values must follow their flag"
        close = difflib.get_close_matches(text.replace("_", "-"), self._option_string_actions, n=1)
        return f"unknown flag {text}; " + (
            f"did you mean {close[0]}?" if close else "see --help for the flags there are"
        )


def check_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Raises ValueError for the first of the named flags that has a number below `least`; None is no number."""
    for name in names:
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < least:
                raise ValueError(f"--{name.replace('_', '-')} {number}: give {least} or more")


def split_flags(text: str, flag: str) -> list[str]:
    """Training flags that a tool takes as one string, as a shell would split them. Raises ValueError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{flag} {text}: {error}") from None


def check_output(path: Path | None, flag: str = "--output") -> None:
    """Raises ValueError for a file that can't be written, before the work that it is for; its directory is made."""
    if path is not None and (path.is_dir() or not writable_directory(path.parent)):
        raise ValueError(f"{flag} {path}: can't write there; give another file")
