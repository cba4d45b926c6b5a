"""Saving a checkpoint: every rank writes its share into a partial directory, then rank 0 writes the index of all and
renames.

Owners' `state()` gives the items; the first component of a name picks the file (`model/...` goes to
`model-00000.safetensors`, with the rank's number). What several ranks hold alike is written by one of them. With more
than one rank, `--save` must be a directory that all of them see.
"""

from __future__ import annotations

import json
import logging
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

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
from megafp8.checkpoint.index import (
    INDEX_FILE,
    RUN_FILE,
    Index,
    Part,
    TensorRecord,
    dump_index,
    index_from_json,
    index_to_json,
    merge_indexes,
)
from megafp8.checkpoint.ranks import Held, exchange, share_out, together
from megafp8.checkpoint.tensor_file import FileRecord, write_bytes, write_tensors
from megafp8.parallel import ParallelContext
from megafp8.params import StateItem, name_of

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

    Returns the checkpoint's directory, or None on every rank when the disk refused one (full, gone, read-only): that
    is logged, what was written is removed, and training goes on.
    """
    save = Path(save)
    partial = save / (PARTIAL + iteration_name(iteration))
    run = json.dumps({**metadata, "iteration": iteration, "versions": versions()}, indent=1).encode() + b"\n"
    try:
        previous, *_ = together(parallel, lambda: _prepare(save, partial) if parallel.is_first else None)
        share = share_of(items, parallel)
        written = together(parallel, lambda: index_to_json(write_rank_files(partial, parallel.rank, share)))
        together(parallel, lambda: _finish(save, iteration, written, run) if parallel.is_first else None)
    except OSError as error:
        if parallel.is_first:
            log.error("checkpoint of iteration %d was not saved in %s: %s", iteration, save, error)
            discard_partial(save, iteration)
        return None
    superseded = retain_interval is not None and previous not in (None, iteration) and previous % retain_interval
    if parallel.is_first and superseded:
        _try_remove(save, previous)
    return save / iteration_name(iteration)


def _prepare(save: Path, partial: Path) -> int | None:
    """Makes the partial directory; returns the latest iteration saved before."""
    save.mkdir(parents=True, exist_ok=True)
    clean(save)
    previous = latest_iteration(save)
    partial.mkdir()
    return previous


def share_of(items: Mapping[str, StateItem], parallel: ParallelContext) -> dict[str, StateItem]:
    """The items that this rank writes, of those it holds."""
    items = {key: item for key, item in items.items() if not item.replica and not _is_nothing(item)}
    mine = [Held(name_of(key), item.box, item.tensor.nbytes) for key, item in items.items()]
    everyone = exchange(parallel, mine)
    held = [[Held(name, tuple(map(tuple, box)), size) for name, box, size in parts] for parts in everyone]
    share = share_out(held)[parallel.rank]
    return {key: item for key, item in items.items() if (name_of(key), item.box) in share}


def _is_nothing(item: StateItem) -> bool:
    """Whether a rank holds no element of a tensor that has some."""
    return item.tensor.numel() == 0 and math.prod(item.shape) > 0


def write_rank_files(directory: Path, rank: int, items: Mapping[str, StateItem]) -> Index:
    """Writes one rank's `<group>-<rank>.safetensors` files and returns what is in them. Raises OSError."""
    groups: dict[str, dict[str, StateItem]] = {}
    for name, item in items.items():
        groups.setdefault(group_of(name), {})[name] = item
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    for group, members in sorted(groups.items()):
        file = f"{group}-{rank:05d}.safetensors"
        files[file] = write_tensors(directory / file, {name: item.tensor for name, item in members.items()})
        for key, item in members.items():
            record = tensors.get(name_of(key))
            parts = (*(record.parts if record else ()), Part(file, key, item.box))
            tensors[name_of(key)] = TensorRecord(item.tensor.dtype, tuple(item.shape), parts)
    return Index(files, tensors)


def _finish(save: Path, iteration: int, written: list[dict[str, Any]], run: bytes) -> None:
    """Writes run.json and the index of all ranks' files, and publishes."""
    partial = save / (PARTIAL + iteration_name(iteration))
    index = merge_indexes(index_from_json(body) for body in written)
    files = {**index.files, RUN_FILE: write_bytes(partial / RUN_FILE, run)}
    write_bytes(partial / INDEX_FILE, dump_index(Index(files, index.tensors)))
    publish(save, iteration)


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
