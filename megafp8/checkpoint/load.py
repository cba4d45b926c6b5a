"""Loading tensors from a checkpoint into any layout.

Everything is checked before the first element is written: names, shapes, dtypes, boxes, and the checksums of the files
that are needed. Then each tensor is read by slices of the parts that hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from megafp8.checkpoint.boxes import pieces, slices_within
from megafp8.checkpoint.index import Index, TensorRecord, read_index
from megafp8.checkpoint.tensor_file import DamagedFileError, TensorReader, check_file, open_tensors
from megafp8.params import Box, StateItem, name_of

LOSSLESS = {
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
    torch.float64: set(),
}
"""Casts of a stored dtype that keep every value."""
NAMES_SHOWN = 3


def load_checkpoint(
    directory: Path,
    wanted: Mapping[str, StateItem],
    *,
    optional: Sequence[str] = (),
    ignored: Sequence[str] = (),
    elsewhere: Collection[str] = (),
    allow_narrowing: bool = False,
) -> dict[str, Tensor]:
    """Fills `wanted[name].tensor` in place from the checkpoint in `directory`, whatever layout it was saved in.

    Args:
        directory: of one checkpoint (`.../iter_0000100`).
        wanted: global name (of several parts: `params.part_key`) -> destination, e.g. the owners' `state()`; any
            device.
        optional: prefixes of names that the checkpoint may lack; what it lacks is left untouched.
        ignored: prefixes of names that the checkpoint may have without being wanted.
        elsewhere: names that other ranks want, such as those of other pipeline stages.
        allow_narrowing: also load floating-point tensors into a dtype that rounds them.

    Returns the tensors that were filled, by name, for the owners' `load_state()`.

    Raises:
        DamagedFileError (a ValueError): a file is missing, cut short or changed; the line names it.
        ValueError: names are missing or unexpected, or a shape or dtype doesn't fit; nothing has been written.
    """
    index = read_index(directory)
    _check_names(directory, index, wanted, optional, ignored, elsewhere)
    found = {key: item for key, item in wanted.items() if name_of(key) in index.tensors}
    plan = [
        read for key, item in found.items() for read in _plan(directory, name_of(key), item, index, allow_narrowing)
    ]
    files = sorted({read.file for read in plan})
    for file in files:
        check_regular(directory, file)
        check_file(directory / file, index.files[file])
    _read(directory, files, plan)
    return {name: item.tensor for name, item in found.items()}


class _Read:
    """One slice of a stored part, and where it goes."""

    def __init__(self, record: TensorRecord, number: int, common: Box, item: StateItem):
        part = record.parts[number]
        self.file, self.key, self.dtype = part.file, part.key, record.dtype
        self.stored_shape = tuple(stop - start for start, stop in part.box)
        self.source = slices_within(common, part.box)
        self.target = item.tensor[slices_within(common, item.box)]

    @torch.no_grad()
    def run(self, reader: TensorReader) -> None:
        self.target.copy_(reader.read(self.key, self.source))


def _plan(directory: Path, name: str, item: StateItem, index: Index, allow_narrowing: bool) -> list[_Read]:
    record = index.tensors[name]
    if record.shape != tuple(item.shape):
        raise ValueError(
            f"'{name}' has the shape {list(record.shape)} in {directory}, this run's is {list(item.shape)}: "
            "the model's flags must be those of the checkpoint"
        )
    _check_dtype(directory, name, record.dtype, item.tensor.dtype, allow_narrowing)
    try:
        found = pieces(item.box, [part.box for part in record.parts])
    except ValueError as error:
        raise DamagedFileError(f"{directory}: '{name}' is incomplete: {error}") from None
    return [_Read(record, number, common, item) for number, common in found]


def _read(directory: Path, files: Iterable[str], plan: list[_Read]) -> None:
    """Opens every file once, checks what it holds against the index, and only then writes."""
    by_file: dict[str, list[_Read]] = {file: [] for file in files}
    for read in plan:
        by_file[read.file].append(read)
    for step in ("check", "read"):
        for file, reads in by_file.items():
            with ExitStack() as stack:
                reader = stack.enter_context(open_tensors(directory / file))
                for read in reads:
                    if step == "check":
                        reader.check(read.key, read.dtype, read.stored_shape)
                    else:
                        read.run(reader)


def check_regular(directory: Path, file: str) -> None:
    """Raises DamagedFileError for a link or anything else that isn't a file of this directory."""
    path = directory / file
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise DamagedFileError(f"{path} is not a regular file; links are not followed")


def _check_dtype(directory: Path, name: str, stored: torch.dtype, wanted: torch.dtype, allow_narrowing: bool) -> None:
    if stored == wanted or wanted in LOSSLESS.get(stored, ()):
        return
    if stored in LOSSLESS and wanted in LOSSLESS:
        if allow_narrowing:
            return
        raise ValueError(f"'{name}' is {stored} in {directory} and would be rounded to {wanted} in this run")
    raise ValueError(f"'{name}' is {stored} in {directory}, this run's is {wanted}")


def _check_names(
    directory: Path,
    index: Index,
    wanted: Mapping[str, StateItem],
    optional: Sequence[str],
    ignored: Sequence[str],
    elsewhere: Collection[str],
) -> None:
    missing = {name_of(key) for key in wanted} - index.tensors.keys()
    missing = [n for n in sorted(missing) if not n.startswith(tuple(optional))]
    known = {name_of(key) for key in (*wanted, *elsewhere)}
    unexpected = [n for n in index.tensors if n not in known and not n.startswith(tuple(ignored))]
    if missing:
        raise ValueError(f"{directory} lacks {_some(missing)}")
    if unexpected:
        raise ValueError(f"{directory} holds {_some(unexpected)}, for which this run has no place")


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in sorted(names)[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return shown if more <= 0 else f"{shown} and {more} more"
