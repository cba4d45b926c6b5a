"""Safetensors files: streamed writing with a checksum, reading by slices.

The format (https://huggingface.co/docs/safetensors): the header's length as 8 bytes little-endian, the header as JSON,
then the tensors' bytes without gaps. Files are written here and not by the library because it wants all tensors of a
file in memory at once; this writer needs one at a time, and sums up the checksum on the way to the disk.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Name in the format -> dtype."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK = 1 << 22
"""Bytes written or summed up at once."""


class DamagedFileError(ValueError):
    """A file of a checkpoint is missing, cut short, or not what was written; the message names it."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC-32 of a complete file: finds accidents of disk and transfer, not forgery."""

    size: int
    crc32: int


class ChecksumWriter:
    """A file that sums up its CRC-32 while it is written."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.size = 0
        self.crc32 = 0

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self.size += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)

    def record(self) -> FileRecord:
        return FileRecord(self.size, self.crc32)


@contextmanager
def synced_file(path: Path) -> Iterator[ChecksumWriter]:
    """Opens a new file for writing and has it on the disk (fsync) when the block ends."""
    with path.open("xb") as stream:
        yield ChecksumWriter(stream)
        stream.flush()
        os.fsync(stream.fileno())


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Writes a new small file and syncs it. Raises OSError."""
    with synced_file(path) as out:
        out.write(data)
    return out.record()


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    load: Callable[[str], Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Writes a new safetensors file and syncs it. One tensor at a time is copied to the host. Raises OSError.

    load: gives a tensor by name when its turn comes; `tensors` then only say dtypes and shapes (device "meta").
    metadata: texts for the header's `__metadata__`.
    """
    ordered = sorted(tensors.items(), key=lambda kv: (-kv[1].element_size(), kv[0]))  # wide first: all stay aligned
    with synced_file(path) as out:
        out.write(_header(ordered, metadata))
        for name, tensor in ordered:
            content = tensor if load is None else load(name)
            assert (content.dtype, content.shape) == (tensor.dtype, tensor.shape), name
            for block in _blocks(content):
                out.write(block)
    return out.record()


def _header(tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors:
        end = offset + tensor.numel() * tensor.element_size()
        dtype = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    dense = tensor.detach().cpu().contiguous()
    dense = dense.as_strided((dense.numel(),), (1,))  # a lone element may have any stride
    data = memoryview(dense.view(torch.uint8).numpy())
    for start in range(0, len(data), BLOCK):
        yield data[start : start + BLOCK]


def check_regular(directory: Path, file: str) -> None:
    """Raises DamagedFileError for a link or anything else that isn't a file of this directory."""
    path = directory / file
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise DamagedFileError(f"{path} is not a regular file; links are not followed")


def check_file(path: Path, record: FileRecord) -> None:
    """Raises DamagedFileError unless the file has the recorded size and checksum. Reads it in blocks."""
    try:
        size = path.stat().st_size
        if size != record.size:
            raise DamagedFileError(f"{path} is damaged: it has {size} bytes, {record.size} were written")
        crc32, block = 0, memoryview(bytearray(min(BLOCK, size + 1)))
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                crc32 = zlib.crc32(block[:count], crc32)
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedFileError(f"{path} can't be read: {error.strerror}") from None
    if crc32 != record.crc32:
        raise DamagedFileError(f"{path} is damaged: checksum {crc32:08x}, {record.crc32:08x} was written")


class TensorReader:
    """An open safetensors file."""

    def __init__(self, path: Path, handle: Any):
        self._path = path
        self._handle = handle

    def check(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Raises DamagedFileError unless the file holds `key` with this dtype and shape."""
        try:
            entry = self._handle.get_slice(key)
        except SafetensorError:
            raise DamagedFileError(f"{self._path} does not hold '{key}', which the index says it does") from None
        found, expected = (entry.get_dtype(), tuple(entry.get_shape())), (DTYPE_NAMES[dtype], shape)
        if found != expected:
            raise DamagedFileError(f"{self._path}: '{key}' is {found}, the index says {expected}")

    def read(self, key: str, slices: tuple[slice, ...]) -> Tensor:
        """The part of tensor `key` that `slices` cut out, on the CPU."""
        if not slices:
            return self._handle.get_tensor(key)
        return self._handle.get_slice(key)[slices]


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorReader]:
    """Opens a safetensors file, memory-mapped: only what is read comes into memory. Raises DamagedFileError."""
    try:
        handle = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path} can't be read as safetensors: {error}") from None
    with handle as opened:
        yield TensorReader(path, opened)
