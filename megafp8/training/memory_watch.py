"""Memory on demand and when it runs out: snapshots of CUDA's allocator, pages for people, and the end of the run.

    SIGUSR2                   after the iteration in hand, the rank that got it writes its page and a snapshot
    --record-memory-history   snapshots have every allocation's stack; the last rank writes one with each training line
    out of memory             a page on stderr and in the run's directory, a snapshot, exit code `EXIT_OUT_OF_MEMORY`

https://pytorch.org/memory_viz opens snapshots.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from megafp8.config import Config
from megafp8.config.publish import publish
from megafp8.training.build import Parts
from megafp8.training.memory_page import memory_page

EXIT_OUT_OF_MEMORY = 19
HISTORY_ENTRIES = 100_000
"""Allocations and frees that are kept, as Megatron keeps: some tens of MiB on the host."""


class OutOfMemory(SystemExit):
    """Ends the process, by `EXIT_OUT_OF_MEMORY`, when all is said."""


def record_history(config: Config, device: torch.device) -> None:
    """Starts --record-memory-history: before anything is built, so that all of it has a stack."""
    if config.logging.record_memory_history and device.type == "cuda":
        # Python's frames alone: C++ symbols take minutes to look up when a snapshot is written.
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=HISTORY_ENTRIES)


class MemoryWatch:
    """A context manager; inside, SIGUSR2 asks for a page. say: takes a line for the log."""

    def __init__(self, parts: Parts, say: Callable[[str], None]) -> None:
        logging, self._parts = parts.config.logging, parts
        directory = logging.log_dir or logging.tensorboard_dir
        self._directory = None if directory is None else Path(directory)
        self._snapshot = (self._directory or Path()) / logging.memory_snapshot_path
        self._cuda = parts.device.type == "cuda"
        last = parts.parallel.rank == parts.parallel.world_size - 1
        self._with_lines = logging.record_memory_history and self._cuda and last
        self._asked = self._snapshot_failed = False
        self._previous: object = None
        if logging.record_memory_history and not self._cuda:
            say("--record-memory-history: only CUDA's allocator has a history; nothing is recorded on the CPU")

    def __enter__(self) -> MemoryWatch:
        self._previous = signal.signal(signal.SIGUSR2, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGUSR2, self._previous)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True

    def poll(self, iteration: int) -> None:
        """Between two iterations: writes what was asked for."""
        if not self._asked:
            return
        self._asked = False
        rank = self._parts.parallel.rank
        lines = [f"memory of rank {rank} after iteration {iteration} (SIGUSR2)"]
        lines += [*memory_page(self._parts), self._dump(f"iter{iteration}")]
        self._publish(lines, f"memory_rank{rank}_iter{iteration}.txt", sys.stdout)

    def at_line(self) -> None:
        """With a training line: the last rank's snapshot, in the place of the one before."""
        if self._with_lines and not self._snapshot_failed:
            line = self._dump()
            if self._snapshot_failed:
                print(line, file=sys.stderr, flush=True)

    def run_out(self, error: BaseException, iteration: int, tell_others: Callable[[int, str], bool]) -> OutOfMemory:
        """Says all there is to say about an error for want of memory; returns the exit to raise.

        tell_others: takes exit code and reason; returns whether this rank is the first that says so.
        """
        rank, world = self._parts.parallel.rank, self._parts.parallel.world_size
        get_error_handler().record_exception(error)  # for torchrun's last lines
        reason = f"rank {rank} of {world} ran out of memory in iteration {iteration}"
        lines = [f"{reason}: {_what(error)}"]
        lines += [f"  at {_place(error)}", *(f"  {note}" for note in getattr(error, "__notes__", ()))]
        lines += [*memory_page(self._parts, error), self._dump("oom")]
        stacks = "".join(traceback.format_exception(error))
        first = tell_others(EXIT_OUT_OF_MEMORY, reason)
        self._publish(lines, f"out_of_memory_rank{rank}.txt", sys.stderr, stacks, in_full=first)
        return OutOfMemory(EXIT_OUT_OF_MEMORY)

    def _dump(self, label: str = "") -> str:
        """Writes a snapshot; returns a line about it, whether or not it could be written."""
        if not self._cuda:
            return "snapshot: only CUDA's allocator has one"
        end = f"_{label}" if label else ""
        path = self._snapshot.with_stem(f"{self._snapshot.stem}_rank{self._parts.parallel.rank}{end}")
        partial = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(partial))
            os.replace(partial, path)
        except (OSError, RuntimeError, MemoryError) as error:
            self._snapshot_failed = True
            partial.unlink(missing_ok=True)
            return f"no snapshot: {path}: {type(error).__name__}: {error}"
        hint = "" if self._parts.config.logging.record_memory_history else "; --record-memory-history adds every stack"
        return f"snapshot: {path}, for https://pytorch.org/memory_viz{hint}"

    def _publish(self, lines: list[str], name: str, stream, more: str = "", *, in_full: bool = True) -> None:
        """As one block, and as a file where the run has a directory; `more` is in the file only."""
        shown = lines if in_full else lines[:2]
        if self._directory is not None:
            try:
                publish(self._directory / name, "\n".join(lines) + "\n" + (f"\n{more}" if more else ""))
                shown = [*shown, f"this page: {self._directory / name}"]
            except OSError as error:
                shown = [*shown, f"this page is in no file: {error}"]
        print("\n".join(shown), file=stream, flush=True)


def _what(error: BaseException) -> str:
    """Its first line, without what CUDA's allocator says of the device, and of every process there: the page does."""
    said = str(error).splitlines()
    return re.split(r" GPU \d+ has a total capacity", said[0])[0] if said else type(error).__name__


def _place(error: BaseException) -> str:
    """The innermost line of this project."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}megafp8{os.sep}" in frame.filename] or frames
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else "an unknown place"
