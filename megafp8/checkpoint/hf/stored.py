"""A checkpoint of ours, opened to be read one tensor at a time in no particular order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megafp8.checkpoint.boxes import pieces, slices_within
from megafp8.checkpoint.index import TensorRecord, read_index
from megafp8.checkpoint.resume import Found
from megafp8.checkpoint.tensor_file import DamagedFileError, TensorReader, check_file, check_regular, open_tensors


class StoredCheckpoint:
    """records: global name (`model/...`) -> dtype, shape and parts."""

    def __init__(self, directory: Path, records: dict[str, TensorRecord], readers: dict[str, TensorReader]):
        self.directory, self.records, self._readers = directory, records, readers

    def read(self, name: str) -> Tensor:
        """A whole tensor in its stored dtype, whatever layout it was saved in. Raises DamagedFileError."""
        record = self.records[name]
        whole = tuple((0, n) for n in record.shape)
        try:
            found = pieces(whole, [part.box for part in record.parts])
        except ValueError as error:
            raise DamagedFileError(f"{self.directory}: '{name}' is incomplete: {error}") from None
        out = torch.empty(record.shape, dtype=record.dtype)
        for number, common in found:
            part = record.parts[number]
            reader = self._readers[part.file]
            reader.check(part.key, record.dtype, tuple(stop - start for start, stop in part.box))
            out[slices_within(common, whole)] = reader.read(part.key, slices_within(common, part.box))
        return out


@contextmanager
def open_checkpoint(found: Found, groups: tuple[str, ...] = ("model/",)) -> Iterator[StoredCheckpoint]:
    """Opens the tensors whose names start with one of `groups`, their files' checksums checked once.

    Raises DamagedFileError, one line that names the file.
    """
    directory = found.directory
    index = read_index(directory)
    records = {name: record for name, record in index.tensors.items() if name.startswith(groups)}
    files = sorted({part.file for record in records.values() for part in record.parts})
    with ExitStack() as stack:
        readers = {}
        for file in files:
            check_regular(directory, file)
            check_file(directory / file, index.files[file])
            readers[file] = stack.enter_context(open_tensors(directory / file))
        yield StoredCheckpoint(directory, records, readers)
