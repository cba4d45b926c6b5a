"""Saving a checkpoint, in three steps: all ranks plan together, each writes its files, rank 0 publishes.

Planning and publishing are the planner's and the storage's (`planner.py`, `storage.py`); `dcp.save` takes the same
steps. They are driven here for two reasons: what ranks tell each other is JSON and no pickle, and the middle step, in
which ranks don't talk, can go on in the background (`background.py`).

Owners' `state()` gives the items. With more than one rank, `--save` must be a directory that all of them see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan

from megafp8.checkpoint.directory import sweep
from megafp8.checkpoint.index import compact, places
from megafp8.checkpoint.planner import BoxSavePlanner, Row, rows_of, shared_out
from megafp8.checkpoint.ranks import exchange, together
from megafp8.checkpoint.storage import CheckpointWriter
from megafp8.checkpoint.tensor_file import DTYPE_NAMES, FileRecord
from megafp8.parallel import ParallelContext
from megafp8.params import StateItem

Copy = Callable[[list[Tensor]], list[Tensor]]
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
    writer = CheckpointWriter(save, iteration, metadata, retain_interval=retain_interval)
    return SaveJob(writer, SavePlans(parallel)).run(items)


@dataclass(frozen=True)
class Planned:
    """What all ranks decided for states of one structure.

    rows: what this rank could write, by key; keys: of those it does, in the order of the plan. tensors: on rank 0, the
    index's, as JSON.
    """

    rows: dict[str, Row]
    keys: tuple[str, ...]
    plan: SavePlan
    tensors: str


class SavePlans:
    """Plans saves, and keeps the last plan: a run's states have one structure, and a plan of many ranks takes its time.

    The ranks tell each other only whether anything has changed, and plan anew when it has on any of them.
    """

    def __init__(self, parallel: ParallelContext = ONE_RANK) -> None:
        self.parallel = parallel
        self._last: Planned | None = None

    def of(self, items: Mapping[str, StateItem]) -> Planned:
        """Every rank calls it. Raises ValueError for states that don't fit together, on all ranks."""
        rows = rows_of(items)
        known = self._last is not None and self._last.rows == rows
        if not all(exchange(self.parallel, known)):
            self._last = self._decide(rows)
        return self._last

    def _decide(self, rows: dict[str, Row]) -> Planned:
        mine = list(rows.values())
        ranks = [list(map(Row.from_json, some)) for some in exchange(self.parallel, [row.to_json() for row in mine])]
        written, rank = shared_out(ranks), self.parallel.rank
        keys, wanted = [], {(row.name, row.box) for row in written[rank]}
        keys = tuple(key for key, row in rows.items() if (row.name, row.box) in wanted)
        plan = SavePlan([rows[key].write_item() for key in keys], storage_data=rank)
        return Planned(rows, keys, plan, _tensors_json(written) if self.parallel.is_first else "")


def _tensors_json(written: Sequence[Sequence[Row]]) -> str:
    """The index's tensors, from what each rank writes."""
    tensors: dict[str, Any] = {}
    for rank, rows in enumerate(written):
        for row, (file, key) in zip(rows, places((row.name for row in rows), rank), strict=True):
            tensor = {"dtype": DTYPE_NAMES[row.dtype], "shape": row.shape, "parts": []}
            tensors.setdefault(row.name, tensor)["parts"].append({"file": file, "key": key, "box": row.box})
    return compact(tensors)


class SaveJob:
    """One save. `plan` and `finish` are called by every rank at the same point; `write` by each alone, from any
    thread."""

    def __init__(self, writer: CheckpointWriter, plans: SavePlans) -> None:
        self._writer, self._plans, self._parallel = writer, plans, plans.parallel
        self._planner = BoxSavePlanner()
        self._files: dict[str, FileRecord] = {}
        self._error: BaseException | None = None
        self.superseded: list[Path] = []

    def run(self, items: Mapping[str, StateItem]) -> Path | None:
        """All steps at once; returns what `finish` returns."""
        if not self.plan(items):
            return None
        self.write()
        directory = self.finish()
        sweep(self.superseded)
        return directory

    def plan(self, items: Mapping[str, StateItem], copy: Copy = list) -> bool:
        """Decides who writes what and makes the directory; False on every rank when the disk refused.

        copy: makes of the tensors that this rank writes those that `write` reads.
        """
        self._planned = self._plans.of(items)
        try:
            together(self._parallel, lambda: self._writer.set_up_storage_writer(self._parallel.is_first))
        except OSError as error:
            return self._refused(error)
        self._planner.assign(self._planned.plan, copy([items[key].tensor for key in self._planned.keys]))
        return True

    def write(self, ready: Callable[[], None] = lambda: None) -> None:
        """Writes this rank's files, once `ready()` has waited for the tensors. What goes wrong is kept for `finish`."""
        try:
            ready()
            results = self._writer.write_data(self._planned.plan, self._planner).wait()
            self._files = {result.storage_data.part.file: result.storage_data.file for result in results}
        except BaseException as error:  # noqa: BLE001 -- raised in `finish`, in the main thread
            self._error = error
        self._planner = None  # lets go of the tensors

    def finish(self) -> Path | None:
        """Publishes the checkpoint and returns its directory; None on every rank when the disk refused one.

        What it supersedes is then hidden, and left to be swept (`superseded`): deleting takes time, and no rank waits
        for it. Raises what went wrong in `write` on this rank, if it isn't the disk's fault.
        """
        try:
            written = together(self._parallel, self._outcome)
            together(self._parallel, lambda: self._publish(written) if self._parallel.is_first else None)
        except OSError as error:
            self._refused(error)
            return None
        return self._writer.directory

    def _outcome(self) -> dict[str, list[int]]:
        error, self._error = self._error, None
        if error is None:
            return {name: [record.size, record.crc32] for name, record in self._files.items()}
        try:
            raise error
        finally:
            del error  # else this frame and the error keep each other, and the lock, alive

    def _publish(self, written: list[dict[str, list[int]]]) -> None:
        files = {name: FileRecord(*record) for some in written for name, record in some.items()}
        self.superseded = self._writer.complete(files, self._planned.tensors)

    def _refused(self, error: OSError) -> bool:
        if self._parallel.is_first:
            iteration, save = self._writer.iteration, self._writer.directory.parent
            log.error("checkpoint of iteration %d was not saved in %s: %s", iteration, save, error)
        self._writer.give_up()
        return False
