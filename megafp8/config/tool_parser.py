"""The command lines of tools: argparse whose errors are one line with a mend."""

import argparse
import difflib
import re
import sys
from typing import NoReturn

from megafp8.config.mistakes import say_mistake


class ToolParser(argparse.ArgumentParser):
    """argparse, but a mistake gives one line, without the usage in front, and a guess at what was meant."""

    def parse_known_args(self, args=None, namespace=None):
        self._given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if "required" in message and (flag := self._misspelt()):  # that one may be why the other is missing
            message = f"unrecognized arguments: {flag}"
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            message = self._unknown(unknown[1].split("=")[0])
        elif message.startswith("the following arguments are required"):
            message += f"; {self.prog} --help explains them"
        say_mistake(f"{self.prog}: error: {message.removeprefix('argument ')}")
        self.exit(2)

    def _misspelt(self) -> str | None:
        """The first flag on the command line that is none of ours."""
        if self._subparsers is not None:  # they know their own
            return None
        flags = [text.split("=")[0] for text in self._given if text.startswith("--") and text != "--"]
        known = self._option_string_actions
        return next((flag for flag in flags if not any(name.startswith(flag) for name in known)), None)

    def _unknown(self, text: str) -> str:
        if not text.startswith("-"):
            return f"unexpected argument '{text}': values must follow their flag"
        close = difflib.get_close_matches(text.replace("_", "-"), self._option_string_actions, n=1)
        return f"unknown flag {text}; " + (
            f"did you mean {close[0]}?" if close else "see --help for the flags there are"
        )
