"""What a load makes of names that only the run or only the checkpoint has: Megatron-LM's `--dist-ckpt-strictness`.

Megatron's words mean, seen from here: "unexpected" names are those that the run wants and the checkpoint lacks, "all"
takes in those that the checkpoint holds and the run has no place for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["raise", "log", "ignore"]
NAMES_SHOWN = 3
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Strictness:
    """lacks: what to do about wanted names that the checkpoint lacks; extra: about those without a place in the run."""

    lacks: Verdict = "raise"
    extra: Verdict = "raise"

    def judge(self, where: Any, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Raises ValueError, or logs a line, as it was asked to."""
        hint = "; --dist-ckpt-strictness log_all goes on without"
        if missing:
            _say(self.lacks, f"{where} lacks {some(missing)}", hint)
        if unexpected:
            _say(self.extra, f"{where} holds {some(unexpected)}, for which this run has no place", hint)


STRICT = Strictness()
STRICTNESS = {
    "assume_ok_unexpected": Strictness("raise", "ignore"),
    "log_unexpected": Strictness("log", "ignore"),
    "log_all": Strictness("log", "log"),
    "raise_unexpected": Strictness("raise", "ignore"),
    "raise_all": STRICT,
    "return_unexpected": Strictness("log", "ignore"),
    "return_all": Strictness("log", "log"),
    "ignore_all": Strictness("ignore", "ignore"),
}
"""Megatron-LM's values. Its `return_*` hand the names to the caller, who logs them."""


def some(names: Sequence[str]) -> str:
    """The first names, and how many there are more."""
    shown = ", ".join(f"'{name}'" for name in sorted(names)[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return shown if more <= 0 else f"{shown} and {more} more"


def _say(verdict: Verdict, text: str, hint: str) -> None:
    if verdict == "raise":
        raise ValueError(text + hint)
    if verdict == "log":
        log.warning("%s (--dist-ckpt-strictness)", text)
