"""Where the host's time goes in a call: the functions in which it spends most, PyTorch's operators among them."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path

import torch

Row = tuple[str, int, float]
"""Function, calls, milliseconds in it without what it calls."""


def host_profile(run: Callable[[], object], rows: int) -> list[Row]:
    """The functions that a call spends most of the host's time in. Backward runs on the same thread, to be seen; each
    call costs more than without the profiler, so small functions look slower than they are."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profile.runcall(run)
    found = [
        (_name(*function), calls, 1e3 * own) for function, (_, calls, own, _, _) in pstats.Stats(profile).stats.items()
    ]
    return sorted(found, key=lambda row: -row[2])[:rows]


def _name(file: str, line: int, function: str) -> str:
    return function if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"


def table(rows: list[Row]) -> list[str]:
    return [f"{ms:9.2f} ms {calls:6}  {name}" for name, calls, ms in rows]
