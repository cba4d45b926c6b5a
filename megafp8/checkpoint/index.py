"""index.json: every tensor of a checkpoint under its global name, and every file with its checksum.

    {"crc32": "<of the compact JSON of the rest>",
     "index": {"format": "megafp8", "version": 1,
               "files": {"model-00000.safetensors": {"size": 123, "crc32": "89abcdef"}, "run.json": {...}},
               "tensors": {"model/embedding.weight": {"dtype": "BF16", "shape": [256, 64],
                           "parts": [{"file": "model-00000.safetensors", "key": "model/embedding.weight",
                                      "box": [[0, 256], [0, 64]]}]}}}}

An index may come from anywhere: reading it checks every type, size and file name, so that what follows can rely on
them. A file name is a plain name within the checkpoint's directory.
"""

from __future__ import annotations

import json
import math
import platform
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import megafp8
from megafp8.checkpoint.boxes import is_box_of
from megafp8.checkpoint.tensor_file import DTYPE_NAMES, DTYPES, DamagedFileError, FileRecord
from megafp8.params import Box, part_key

INDEX_FILE = "index.json"
RUN_FILE = "run.json"
VERSION = 1
MAX_ELEMENTS = 1 << 48
"""Of one tensor: beyond any real one, and far from overflowing 64-bit byte counts."""
MAX_BYTES = 1 << 32
"""Of an index: beyond any real one."""
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True)
class Part:
    """A box of a tensor, stored whole in `file` as `key`."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of the whole job. shape: global; parts: in any layout, replicas possible."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Index:
    """files: plain name -> size and checksum; tensors: global name -> record."""

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]


def group_of(name: str) -> str:
    """Which file a tensor goes to: the first component of `<group>/...`, or one for all others."""
    group, _, rest = name.partition("/")
    return group if rest and group.isidentifier() and group.isascii() else "tensors"


def places(names: Iterable[str], rank: int) -> list[tuple[str, str]]:
    """(file, key in it) of each tensor that a rank writes, of several parts of one tensor as well."""
    found, seen = [], {}
    for name in names:
        seen[name] = seen.get(name, -1) + 1
        found.append((f"{group_of(name)}-{rank:05d}.safetensors", part_key(name, seen[name])))
    return found


def versions() -> dict[str, str]:
    """What run.json says of the program that wrote it."""
    return {"megafp8": megafp8.__version__, "torch": torch.__version__, "python": platform.python_version()}


def dump_index(index: Index) -> bytes:
    """The content of index.json; `read_index` reads it back."""
    tensors = {name: tensor_to_json(record) for name, record in index.tensors.items()}
    return dump_parts(index.files, compact(tensors))


def dump_parts(files: Mapping[str, FileRecord], tensors: str) -> bytes:
    """The same of `tensors` as `compact` gives it: the tensors of a job are the same in each save, and many."""
    records = compact({name: {"size": r.size, "crc32": f"{r.crc32:08x}"} for name, r in files.items()})
    body = f'{{"files":{records},"format":"megafp8","tensors":{tensors},"version":{VERSION}}}'
    return f'{{"crc32":"{zlib.crc32(body.encode()):08x}","index":{body}}}'.encode()


def compact(value: Any) -> str:
    """JSON in the one form that checksums are taken of."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def index_from_json(body: dict[str, Any]) -> Index:
    """Checks everything; ValueError, KeyError, TypeError or AttributeError for what `dump_index` never wrote."""
    if body["format"] != "megafp8" or body["version"] != VERSION:
        raise ValueError(f"format {body['format']!r} version {body['version']!r} is not megafp8 version {VERSION}")
    files = {_file_name(name): _file_from_json(record) for name, record in body["files"].items()}
    return Index(files, {name: _tensor_from_json(name, record, files) for name, record in body["tensors"].items()})


def read_index(directory: Path) -> Index:
    """Reads and checks the index of a checkpoint. Raises DamagedFileError, one line that names the file."""
    path = directory / INDEX_FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        content = json.loads(path.read_bytes())
        body = content["index"]
        if content["crc32"] != _crc32(body):
            raise ValueError("its checksum is wrong")
        return index_from_json(body)
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing: {directory} is not a complete checkpoint") from None
    except OSError as error:
        raise DamagedFileError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedFileError(f"{path} is damaged or not an index of megafp8: {reason}") from None


def _crc32(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(compact(body).encode()):08x}"


def tensor_to_json(record: TensorRecord) -> dict[str, Any]:
    return {
        "dtype": DTYPE_NAMES[record.dtype],
        "shape": list(record.shape),
        "parts": [{"file": p.file, "key": p.key, "box": [list(r) for r in p.box]} for p in record.parts],
    }


def _file_name(name: str) -> str:
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


def _file_from_json(record: dict[str, Any]) -> FileRecord:
    return FileRecord(_count(record["size"]), int(record["crc32"], 16))


def _tensor_from_json(name: str, record: dict[str, Any], files: Mapping[str, FileRecord]) -> TensorRecord:
    if not name.isprintable():  # it would be shown in messages
        raise ValueError(f"{name!a} is not a name")
    shape = tuple(_count(n) for n in record["shape"])
    if math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS or len(shape) > 16:
        raise ValueError(f"'{name}' has the absurd shape {list(shape)}")
    if record["dtype"] not in DTYPES:
        raise ValueError(f"'{name}' has the unknown dtype {record['dtype']!r}")
    parts = []
    for part in record["parts"]:
        box = tuple((_count(start), _count(stop)) for start, stop in part["box"])
        if not is_box_of(box, shape):
            raise ValueError(f"'{name}' has the part {part['box']}, which is not within its shape {list(shape)}")
        if part["file"] not in files:
            raise ValueError(f"'{name}' is in {part['file']!r}, which is not among the files")
        parts.append(Part(part["file"], str(part["key"]), box))
    return TensorRecord(DTYPES[record["dtype"]], shape, tuple(parts))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value
