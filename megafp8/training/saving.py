"""When a run's checkpoints are written: at once, or in the background while training goes on (`--async-save`).

A save in the background is finished between two steps, once every rank has written its files: no rank waits for another
one's disk. The next save, and the end of the run, wait for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from megafp8.checkpoint import BackgroundSaver
from megafp8.training.agreement import Agreement
from megafp8.training.build import Parts
from megafp8.training.checkpointing import RunState
from megafp8.training.progress import Progress

BUSY, DONE = 2, 1
"""What a rank says of its files; the largest counts, and 0 is the answer before there is one."""


@dataclass(frozen=True)
class Outcome:
    """What became of a save. note: how long training stood still for it, where that isn't all of it."""

    iteration: int
    saved: bool
    note: str = ""


class Saves:
    """Every rank calls all of this at the same points; what is returned is what became of saves, once each."""

    def __init__(self, parts: Parts, state: RunState) -> None:
        checkpoint = parts.config.checkpoint
        self._parts, self._state = parts, state
        self._background: BackgroundSaver | None = None
        self._iteration = 0
        self._stalled_s = self._started = 0.0
        self._agreement: Agreement | None = None
        if checkpoint.save is not None and checkpoint.async_save:
            self._background = BackgroundSaver(parts.parallel, parts.device)

    def prepare(self) -> list[str]:
        """Takes the host memory for saves in the background; returns a line about it."""
        if self._background is None:
            return []
        nbytes = self._background.prepare(self._state.items_to_save())
        return [f"--async-save: {nbytes / 2**20:.0f} MiB of host memory a rank for the copy of the state"]

    def save(self, progress: Progress) -> list[Outcome]:
        """Saves, or starts to; waits for the save before."""
        if self._background is None:
            return [Outcome(progress.iteration, self._state.save(progress))]
        outcomes = self.finish(hint="; the next save had to wait for it: --save-interval is too short for this disk")
        self._iteration, self._started = progress.iteration, time.perf_counter()
        if not self._background.start(self._state.writer(progress), self._state.items_to_save()):
            return [*outcomes, Outcome(progress.iteration, saved=False)]
        self._stalled_s = time.perf_counter() - self._started
        self._agreement = Agreement(self._parts.parallel, self._parts.device)
        return outcomes

    def poll(self) -> list[Outcome]:
        """Between two steps: finishes a save that all ranks have written."""
        if self._background is None or not self._background.busy:
            return []
        (slowest,) = self._agreement.agree([DONE if self._background.written else BUSY])
        return self.finish() if slowest == DONE else []

    def finish(self, hint: str = "") -> list[Outcome]:
        """Waits for the save that is being written, if any. hint: what to say when there was a wait."""
        if self._background is None or not self._background.busy:
            return []
        waited, hint = time.perf_counter(), "" if self._background.written else hint
        saved = self._background.finish() is not None
        now = time.perf_counter()
        stalled_s = self._stalled_s + now - waited
        note = f", in {now - self._started:.3g} s, for {stalled_s:.3g} s of which training stood still{hint}"
        return [Outcome(self._iteration, saved, note)]

    def rescue(self) -> list[Outcome]:
        """After an error in training: the save being written is of the time before, and good. With several ranks it
        can't be finished, for the others may be anywhere."""
        if self._parts.parallel.world_size == 1:
            return self.finish()
        if self._background is None or not self._background.busy:
            return []
        return [Outcome(self._iteration, saved=False, note=": an error ended the run while it was written")]
