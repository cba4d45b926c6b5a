"""Saving a checkpoint, in three steps: all ranks plan together, each writes its files, rank 0 publishes.

Planning and publishing are the planner's and the storage's (`planner.py`, `storage.py`); `dcp.save` takes the same
steps. They are driven here for two reasons: what ranks tell each other is JSON and no pickle, and the middle step, in
which ranks don't talk, can go on in the background (`background.py`).

Owners' `state()` gives the items. With more than one rank, `--save` must be a directory that all of them see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megafp8.checkpoint.planner import BoxSavePlanner, plan_from_json, plan_to_json
from megafp8.checkpoint.ranks import exchange, together
from megafp8.checkpoint.storage import CheckpointWriter, results_from_json, results_to_json
from megafp8.parallel import ParallelContext
from megafp8.params import StateItem

log = logging.getLogger(__name__)
ONE_RANK = ParallelContext()


def save_checkpoint(
    save: str | Path,
    iteration: int,
    items: Mapping[str, StateItem],
    metadata: Mapping[str, Any],
    *,
    retain_interval: int | None = None,
    parallel: ParallelContext = ONE_RANK,
) -> Path | None:
    """Saves `<save>/iter_<iteration>/` and points `<save>/latest` at it; an existing one of that iteration is replaced.

    Every rank calls it. Killed at any moment, it leaves every checkpoint that was complete before, or the new one.

    Args:
        items: global name -> this rank's part of a tensor, from the owners' `state()`; names are `<group>/...`. More
            parts of the same tensor have keys of their own (`params.part_key`).
        metadata: JSON values for run.json (arguments, consumed samples and tokens, tokenizer, schedule, data state);
            the iteration and library versions are added; rank 0's counts.
        retain_interval: delete the checkpoint that was the latest before, unless its iteration is a multiple of this.

    Returns the checkpoint's directory, or None on every rank when the disk refused one (full, gone, read-only) or
    another run is saving there: that is logged, what was written is removed, and training goes on.
    """
    return SaveJob(CheckpointWriter(save, iteration, metadata, retain_interval=retain_interval), parallel).run(items)


class SaveJob:
    """One save. `plan` and `finish` are called by every rank at the same point; `write` by each alone, from any
    thread."""

    def __init__(self, writer: CheckpointWriter, parallel: ParallelContext) -> None:
        self._writer, self._parallel = writer, parallel
        self._planner = BoxSavePlanner()
        self._written: list[Any] = []
        self._error: BaseException | None = None

    def run(self, items: Mapping[str, StateItem]) -> Path | None:
        """All steps at once; returns what `finish` returns."""
        if not self.plan(items):
            return None
        self.write()
        return self.finish()

    def plan(self, items: Mapping[str, StateItem]) -> bool:
        """Decides who writes what and makes the directory; False on every rank when the disk refused."""
        self._plan, self._metadata = plan_save(self._planner, items, self._parallel, self._writer)
        try:
            together(self._parallel, lambda: self._writer.set_up_storage_writer(self._parallel.is_first))
        except OSError as error:
            return self._refused(error)
        return True

    def stage(self, copy: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """From now on the job holds what `copy` made of the tensors that this rank writes, and no others."""
        self._planner.stage(self._plan, copy)

    def write(self, ready: Callable[[], None] = lambda: None) -> None:
        """Writes this rank's files, once `ready()` has waited for the tensors. What goes wrong is kept for `finish`."""
        try:
            ready()
            self._written = results_to_json(self._writer.write_data(self._plan, self._planner).wait())
        except BaseException as error:  # noqa: BLE001 -- raised in `finish`, in the main thread
            self._error = error
        self._planner.release()

    def finish(self) -> Path | None:
        """Publishes the checkpoint and returns its directory; None on every rank when the disk refused one.

        Raises what went wrong in `write` on this rank, if it isn't the disk's fault.
        """
        try:
            written = together(self._parallel, self._outcome)
            together(self._parallel, lambda: self._publish(written) if self._parallel.is_first else None)
        except OSError as error:
            self._refused(error)
            return None
        return self._writer.directory

    def _outcome(self) -> list[Any]:
        error, self._error = self._error, None
        if error is None:
            return self._written
        try:
            raise error
        finally:
            del error  # else this frame and the error keep each other, and the lock, alive

    def _publish(self, written: list[list[Any]]) -> None:
        self._writer.finish(self._metadata, [results_from_json(rows) for rows in written])

    def _refused(self, error: OSError) -> bool:
        if self._parallel.is_first:
            iteration, save = self._writer.iteration, self._writer.directory.parent
            log.error("checkpoint of iteration %d was not saved in %s: %s", iteration, save, error)
        self._writer.give_up()
        return False


def plan_save(planner: BoxSavePlanner, items: Mapping[str, StateItem], parallel: ParallelContext, writer=None):
    """This rank's plan and the checkpoint's metadata, as all ranks together decide. Every rank calls it."""
    planner.set_up_planner(items, is_coordinator=parallel.is_first)
    local = planner.create_local_plan()
    plans = [plan_from_json(rows) for rows in exchange(parallel, plan_to_json(local))]
    plans, metadata = planner.create_global_plan(plans)
    if writer is not None:
        plans = writer.prepare_global_plan(plans)
    return planner.finish_plan(plans[parallel.rank]), metadata
