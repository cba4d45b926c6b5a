"""Saving a checkpoint: files of this rank, then the index of all, then one rename.

Owners' `state()` gives the items; the first component of a name picks the file (`model/...` goes to
`model-00000.safetensors`). With several ranks each one writes its files into the shared partial directory, rank 0
merges their records into the index and publishes; this version has one rank.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megafp8
from megafp8.checkpoint.directory import (
    PARTIAL,
    clean,
    discard_partial,
    iteration_name,
    latest_iteration,
    publish,
    remove,
)
from megafp8.checkpoint.index import INDEX_FILE, RUN_FILE, Index, Part, TensorRecord, dump_index
from megafp8.checkpoint.tensor_file import FileRecord, write_bytes, write_tensors
from megafp8.params import StateItem

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankRecord:
    """What one rank has written."""

    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]


def save_checkpoint(
    save: str | Path,
    iteration: int,
    items: Mapping[str, StateItem],
    metadata: Mapping[str, Any],
    *,
    retain_interval: int | None = None,
) -> Path | None:
    """Saves `<save>/iter_<iteration>/` and points `<save>/latest` at it; an existing one of that iteration is replaced.

    Killed at any moment, it leaves every checkpoint that was complete before, or the new one.

    Args:
        items: global name -> part of a tensor, from the owners' `state()`; names are `<group>/...`.
        metadata: JSON values for run.json (arguments, consumed samples and tokens, tokenizer, schedule, data state);
            the iteration and library versions are added.
        retain_interval: delete the checkpoint that was the latest before, unless its iteration is a multiple of this.

    Returns the checkpoint's directory, or None when the disk refused (full, gone, read-only): that is logged, what
    was written is removed, and training goes on.
    """
    save = Path(save)
    try:
        save.mkdir(parents=True, exist_ok=True)
        clean(save)
        previous = latest_iteration(save)
        _write(save / (PARTIAL + iteration_name(iteration)), iteration, items, metadata)
        directory = publish(save, iteration)
    except OSError as error:
        log.error("checkpoint of iteration %d was not saved in %s: %s", iteration, save, error)
        discard_partial(save, iteration)
        return None
    if retain_interval is not None and previous not in (None, iteration) and previous % retain_interval:
        _try_remove(save, previous)
    return directory


def _write(directory: Path, iteration: int, items: Mapping[str, StateItem], metadata: Mapping[str, Any]) -> None:
    directory.mkdir()
    records = [write_rank_files(directory, 0, items)]
    run = {**metadata, "iteration": iteration, "versions": versions()}
    run_record = write_bytes(directory / RUN_FILE, json.dumps(run, indent=1).encode() + b"\n")
    index = merge_records(records)
    write_bytes(directory / INDEX_FILE, dump_index(Index({**index.files, RUN_FILE: run_record}, index.tensors)))


def write_rank_files(directory: Path, rank: int, items: Mapping[str, StateItem]) -> RankRecord:
    """Writes one rank's `<group>-<rank>.safetensors` files. Raises OSError."""
    groups: dict[str, dict[str, StateItem]] = {}
    for name, item in items.items():
        groups.setdefault(group_of(name), {})[name] = item
    files, tensors = {}, {}
    for group, members in sorted(groups.items()):
        file = f"{group}-{rank:05d}.safetensors"
        content: dict[str, Tensor] = {name: item.tensor for name, item in members.items()}
        files[file] = write_tensors(directory / file, content)
        for name, item in members.items():
            tensors[name] = TensorRecord(item.tensor.dtype, tuple(item.shape), (Part(file, name, item.box),))
    return RankRecord(files, tensors)


def merge_records(records: list[RankRecord]) -> Index:
    """The index of what several ranks have written: a tensor's parts are those of all of them."""
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    for record in records:
        files.update(record.files)
        for name, new in record.tensors.items():
            old = tensors.get(name)
            assert old is None or (old.dtype, old.shape) == (new.dtype, new.shape), name
            tensors[name] = new if old is None else TensorRecord(old.dtype, old.shape, old.parts + new.parts)
    return Index(files, tensors)


def group_of(name: str) -> str:
    """The first component of a global name."""
    group, _, rest = name.partition("/")
    assert rest, f"{name}: names are <group>/..."
    assert group.isidentifier(), f"{name}: the group names a file"
    return group


def versions() -> dict[str, str]:
    return {"megafp8": megafp8.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _try_remove(save: Path, iteration: int) -> None:
    try:
        remove(save, iteration)
    except OSError as error:
        log.warning("could not delete the old checkpoint %s: %s", save / iteration_name(iteration), error)
