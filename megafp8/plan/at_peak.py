"""What held the memory of a GPU at its peak: the allocator's history, played back, by the project's lines of code.

A block counts by the size that was asked for. Its line is the innermost one of the project that was running when it
was allocated; autograd's own functions run without Python, so what they allocate has no line.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

OWN = re.compile(r"/(megafp8|kernels|tools)/")
FRAMES = 3
"""Of the project, by which blocks are told apart."""
NO_LINE = "autograd's own functions"


@dataclass(frozen=True)
class Holder:
    """bytes: of `count` blocks that were allocated at `line`, innermost call first."""

    line: str
    bytes: int
    count: int


@dataclass
class Peak:
    """bytes: allocated at the moment of most. holders: the largest first. during: the line that was the last straw."""

    bytes: int = 0
    holders: list[Holder] = field(default_factory=list)
    during: str = NO_LINE


@contextmanager
def recorded() -> Iterator[None]:
    """Inside, CUDA's allocator keeps its history, with the lines of code of each block."""
    # Python's frames alone: C++ symbols take minutes to look up.
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=1 << 20)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def now() -> int:
    """Now, as the history counts time: in microseconds."""
    return time.time_ns() // 1000


def at_peak(device: torch.device, since: int = 0) -> Peak:
    """The moment of most bytes `since` then (`now`), from the history that is `recorded` until here."""
    number = torch.cuda.current_device() if device.index is None else device.index
    return peak_of_history(torch.cuda.memory._snapshot(device)["device_traces"][number], since)


def peak_of_history(history: Sequence[Mapping[str, Any]], since: int = 0) -> Peak:
    """The same from the history's entries: what is allocated and freed, in order."""
    sizes: dict[int, int] = {}
    total, most, place = 0, -1, -1
    for number, entry in enumerate(history):
        if entry["action"] == "alloc":
            sizes[entry["addr"]] = entry["size"]
            total += entry["size"]
        elif entry["action"] == "free_requested":  # may be later complete, but the bytes don't count from here
            total -= sizes.pop(entry["addr"], 0)
        if total > most and entry.get("time_us", since) >= since:
            most, place = total, number
    if place < 0:
        return Peak()
    live: dict[int, Mapping[str, Any]] = {}
    for entry in history[: place + 1]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
        elif entry["action"] == "free_requested":
            live.pop(entry["addr"], None)
    return Peak(most, list(_by_line(live.values())), line_of(history[place].get("frames", ())))


def _by_line(blocks: Iterable[Mapping[str, Any]]) -> Iterator[Holder]:
    sums: dict[str, list[int]] = {}
    for block in blocks:
        found = sums.setdefault(line_of(block.get("frames", ())), [0, 0])
        found[0] += block["size"]
        found[1] += 1
    for line, (size, count) in sorted(sums.items(), key=lambda item: -item[1][0]):
        yield Holder(line, size, count)


def line_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """The project's lines among a block's frames, innermost first."""
    own = [frame for frame in frames if OWN.search(frame["filename"])]
    names = (f"{_short(frame['filename'])}:{frame['line']} {frame['name']}" for frame in own[:FRAMES])
    return " < ".join(names) or NO_LINE


def _short(path: str) -> str:
    return "/".join(path.rsplit("/", 2)[1:])


def peak_lines(peak: Peak, most: int = 25) -> list[str]:
    """A table: MiB and blocks of the largest holders."""
    lines = [f"{peak.bytes / 2**20:,.1f} MiB at the peak, in {peak.during}; held by"]
    rest = peak.holders[most:]
    shown = [*peak.holders[:most], *([Holder(f"{len(rest)} others", sum(h.bytes for h in rest),
                                             sum(h.count for h in rest))] if rest else [])]  # fmt: skip
    return [*lines, *(f"{holder.bytes / 2**20:12,.1f} {holder.count:6,}  {holder.line}" for holder in shown)]
