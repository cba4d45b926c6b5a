"""The checkpoint format as storage of `torch.distributed.checkpoint` (DCP): safetensors files and index.json.

DCP's own storage keeps its index as a pickle (`.metadata`); this one writes no pickle, and refuses what DCP would
pickle (anything that is no tensor). Any DCP program can use the pair:

    dcp.save(state_dict, storage_writer=CheckpointWriter("ckpt", iteration=100))
    dcp.load(state_dict, storage_reader=CheckpointReader("ckpt/iter_0000100"))

Runs use it through `save_checkpoint` and `load_checkpoint`, with the planners of `planner.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megafp8.checkpoint.boxes import slices_within
from megafp8.checkpoint.directory import (
    PARTIAL,
    clean,
    discard_partial,
    hide,
    iteration_name,
    latest_iteration,
    publish,
    sweep,
)
from megafp8.checkpoint.index import (
    INDEX_FILE,
    RUN_FILE,
    Index,
    Part,
    TensorRecord,
    compact,
    dump_parts,
    places,
    read_index,
    tensor_to_json,
    versions,
)
from megafp8.checkpoint.lock import SaveLock
from megafp8.checkpoint.planner import chunk_of, written_box
from megafp8.checkpoint.tensor_file import (
    FileRecord,
    TensorReader,
    check_file,
    check_regular,
    open_tensors,
    write_bytes,
    write_tensors,
)


@dataclass(frozen=True)
class Written:
    """Where a box of a tensor lies (`WriteResult.storage_data`), and its file's size and checksum."""

    part: Part
    file: FileRecord


class CheckpointWriter(StorageWriter):
    """Writes `<save>/iter_<iteration>/`; complete or not there, whenever it is interrupted.

    Args:
        save: directory of checkpoints, one that all ranks see.
        metadata: JSON values for run.json; the iteration and library versions are added. The coordinator's count.
        retain_interval: delete the checkpoint that was the latest before, unless its iteration is a multiple of this.
    """

    def __init__(
        self,
        save: str | Path,
        iteration: int,
        metadata: Mapping[str, Any] | None = None,
        *,
        retain_interval: int | None = None,
    ) -> None:
        run = {**(metadata or {}), "iteration": iteration, "versions": versions()}
        self._run = json.dumps(run, indent=1).encode() + b"\n"
        self.iteration, self._retain_interval = iteration, retain_interval
        self._previous: int | None = None
        self._lock: SaveLock | None = None
        self.reset(save)

    def reset(self, checkpoint_id: Any = None) -> None:
        """checkpoint_id: another directory of checkpoints."""
        if checkpoint_id is not None:
            self._save = Path(checkpoint_id)

    @property
    def directory(self) -> Path:
        """Where the checkpoint lies once it is complete."""
        return self._save / iteration_name(self.iteration)

    @property
    def _partial(self) -> Path:
        return self._save / (PARTIAL + self.directory.name)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """On the coordinator: locks the directory, removes what interrupted saves left. Raises OSError."""
        if not is_coordinator:
            return
        self._save.mkdir(parents=True, exist_ok=True)
        self._lock = SaveLock(self._save)
        clean(self._save)
        self._previous = latest_iteration(self._save)
        self._partial.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        for item in plan.items:
            written_box(item)  # refuses what is no tensor
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives each rank its number, which its files have in their names."""
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's `<group>-<rank>.safetensors` files. Raises OSError."""
        if not self._partial.is_dir():
            raise FileNotFoundError(f"{self._partial} is not there; --save must be a directory that all ranks share")
        future: Future[list[WriteResult]] = Future()
        future.set_result(write_files(self._partial, plan, planner))
        return future

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """On the coordinator: publishes what all ranks have written, deletes what that supersedes. Raises OSError."""
        index = _index_of(metadata, [result for some in results for result in some])
        tensors = {name: tensor_to_json(record) for name, record in index.tensors.items()}
        sweep(self.complete(index.files, compact(tensors)))

    def complete(self, files: Mapping[str, FileRecord], tensors: str) -> list[Path]:
        """Writes run.json and the index of all ranks' files, publishes, and hides the checkpoint that was replaced and
        the one before, where that is to go; returns those, for `directory.sweep`, which may take its time.

        tensors: the index's, as JSON (`index.compact`). Raises OSError.
        """
        files = {**files, RUN_FILE: write_bytes(self._partial / RUN_FILE, self._run)}
        write_bytes(self._partial / INDEX_FILE, dump_parts(files, tensors))
        superseded = publish(self._save, self.iteration)
        previous, interval = self._previous, self._retain_interval
        if interval is not None and previous not in (None, self.iteration) and previous % interval:
            superseded += hide(self._save / iteration_name(previous))
        self._unlock()
        return superseded

    def give_up(self) -> None:
        """On the coordinator: removes what was written of an unfinished checkpoint, as far as that can be done."""
        if self._lock is not None:
            discard_partial(self._save, self.iteration)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | Path)


def write_files(directory: Path, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    """Writes the items of one rank's plan, a file for each group of names, one tensor at a time."""
    placed = places((item.index.fqn for item in plan.items), plan.storage_data or 0)
    by_file: dict[str, dict[str, WriteItem]] = {}
    for (file, key), item in zip(placed, plan.items, strict=True):
        by_file.setdefault(file, {})[key] = item
    results = []
    for file, items in sorted(by_file.items()):
        record = write_tensors(
            directory / file,
            {key: _like(item) for key, item in items.items()},
            load=lambda key, items=items: planner.resolve_data(items[key]).detach(),
        )
        for key, item in items.items():
            written = Written(Part(file, key, written_box(item)), record)
            results.append(WriteResult(item.index, record.size, written))
    return results


def _like(item: WriteItem) -> Tensor:
    """The dtype and shape of what an item writes."""
    return torch.empty(item.tensor_data.chunk.sizes, dtype=item.tensor_data.properties.dtype, device="meta")


def _index_of(metadata: Metadata, results: Iterable[WriteResult]) -> Index:
    files: dict[str, FileRecord] = {}
    parts: dict[str, list[Part]] = {}
    for result in results:
        written: Written = result.storage_data
        assert files.setdefault(written.part.file, written.file) == written.file, "two ranks wrote one file"
        parts.setdefault(result.index.fqn, []).append(written.part)
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        tensors[name] = TensorRecord(stored.properties.dtype, tuple(stored.size), tuple(parts.get(name, ())))
        assert len(tensors[name].parts) == len(stored.chunks), f"a part of '{name}' was not written"
    return Index(files, tensors)


class CheckpointReader(StorageReader):
    """Reads the checkpoint in `directory`. Raises DamagedFileError for whatever is not as it was written.

    verify: `prepare_local_plan` compares the checksums of all files that the plan needs, before anything is read;
    False: the caller sees to that.
    """

    def __init__(self, directory: str | Path, *, verify: bool = True):
        self._verify = verify
        self.reset(directory)

    def reset(self, checkpoint_id: Any = None) -> None:
        """checkpoint_id: another checkpoint's directory."""
        if checkpoint_id is not None:
            self._directory = Path(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._index = read_index(self._directory)
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=record.dtype),
                    torch.Size(record.shape),
                    [chunk_of(part.box) for part in record.parts],
                )
                for name, record in self._index.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks the files that the plan needs: that they are regular, and hold what the index says."""
        needed = self._by_file(plan)
        for file in needed:
            check_regular(self._directory, file)
        if self._verify:
            self.check_sums(needed)
        for file, reads in needed.items():
            with open_tensors(self._directory / file) as reader:
                for _, part, dtype in reads:
                    reader.check(part.key, dtype, tuple(stop - start for start, stop in part.box))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for file, reads in self._by_file(plan).items():
            with open_tensors(self._directory / file) as reader:
                for item, part, _ in reads:
                    _read(reader, item, part, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return (Path(checkpoint_id) / INDEX_FILE).is_file()

    @property
    def files(self) -> Mapping[str, FileRecord]:
        """All files of the checkpoint, from the index."""
        return self._index.files

    def needed(self, plan: LoadPlan) -> set[str]:
        """The files that a plan reads."""
        return set(self._by_file(plan))

    def check_sums(self, files: Iterable[str]) -> None:
        """Raises DamagedFileError unless the files have the sizes and checksums they were written with."""
        for file in files:
            check_file(self._directory / file, self._index.files[file])

    def _by_file(self, plan: LoadPlan) -> dict[str, list[tuple[ReadItem, Part, torch.dtype]]]:
        found: dict[str, list[tuple[ReadItem, Part, torch.dtype]]] = {}
        for item in plan.items:
            record = self._index.tensors[item.storage_index.fqn]
            part = record.parts[item.storage_index.index]
            found.setdefault(part.file, []).append((item, part, record.dtype))
        return dict(sorted(found.items()))


@torch.no_grad()
def _read(reader: TensorReader, item: ReadItem, part: Part, planner: LoadPlanner) -> None:
    """Reads the box of one item into the place that the planner has for it."""
    ends = zip(part.box, item.storage_offsets, item.lengths, strict=True)
    wanted = tuple((start + offset, start + offset + length) for (start, _), offset, length in ends)
    target = planner.resolve_tensor(item).detach()
    target.copy_(reader.read(part.key, slices_within(wanted, part.box)))
    planner.commit_tensor(item, target)
