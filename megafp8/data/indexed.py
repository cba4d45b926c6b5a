"""Megatron's indexed dataset: `PREFIX.bin` holds the token ids of all sequences end to end, `PREFIX.idx` their table.

Layout of the `.idx` file, little-endian:

    9 bytes   magic b"MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     dtype code of the token ids (`DTYPE_OF_CODE`)
    uint64    number of sequences S
    uint64    number of document indices D + 1
    int32     [S]      sequence lengths, in tokens
    int64     [S]      sequence pointers, byte offsets into the `.bin` file
    int64     [D + 1]  document indices: document d is sequences document_indices[d] .. document_indices[d + 1] - 1

An optional last part, int8 [S] "modes" of multimodal sets, is skipped when reading and never written. The files are
the same bytes that megatron-core's `IndexedDatasetBuilder` writes for the same ids and dtype.
"""

import hashlib
import os
import shutil
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_OF_CODE = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
CODE_OF_DTYPE = {np.dtype(dtype): code for code, dtype in DTYPE_OF_CODE.items()}
_HEADER = struct.Struct("<9sQBQQ")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype we write that holds every id of a vocabulary, added tokens included.

    uint16 up to 65536 ids, else int32. (Megatron's own tool already turns to int32 at 65500 ids; it reads both.)
    """
    return np.dtype(np.uint16 if vocab_size <= 65536 else np.int32)


def index_path(prefix: str | os.PathLike) -> Path:
    return Path(f"{prefix}.idx")


def token_path(prefix: str | os.PathLike) -> Path:
    return Path(f"{prefix}.bin")


class IndexedDataset:
    """Read-only, memory-mapped view of one `.bin/.idx` pair.

    Attributes: `dtype` of the ids, `sequence_lengths` int32 [S], `sequence_pointers` int64 [S] (bytes),
    `document_indices` int64 [D + 1], `document_lengths` [D] (tokens; a document may span several sequences).

    Raises ValueError, naming the file, when one is missing, truncated, or they don't belong together.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = str(prefix)
        self._fingerprint: str | None = None
        for path in (index_path(prefix), token_path(prefix)):
            if not path.is_file():
                raise ValueError(f"{path}: no such file ({_mend_prefix(self.prefix)})")
        self._read_index(index_path(prefix))
        self._map_tokens(token_path(prefix))
        self._check_consistency()

    def __reduce__(self):
        return IndexedDataset, (self.prefix,)  # memory maps are opened again, not copied, in another process

    def _read_index(self, path: Path) -> None:
        size = path.stat().st_size
        if size < _HEADER.size:
            raise ValueError(f"{path}: truncated, {size} bytes are less than its header of {_HEADER.size}")
        self._index = np.memmap(path, mode="r", dtype=np.uint8)
        magic, version, code, sequences, documents = _HEADER.unpack(self._index[: _HEADER.size].tobytes())
        if magic != MAGIC or version != VERSION:
            raise ValueError(f"{path}: not an indexed dataset (magic {magic!r}, version {version})")
        if code not in DTYPE_OF_CODE:
            raise ValueError(f"{path}: unknown dtype code {code}")
        self.dtype = np.dtype(DTYPE_OF_CODE[code])
        if self.dtype.kind not in "iu":
            raise ValueError(f"{path}: holds {self.dtype} values, not token ids")
        expected = _HEADER.size + 12 * sequences + 8 * documents
        if size not in (expected, expected + sequences):  # with or without modes
            raise ValueError(
                f"{path}: {size} bytes, but {sequences} sequences and {documents} document indices need "
                f"{expected}: truncated or damaged"
            )
        offset = _HEADER.size
        self.sequence_lengths = np.frombuffer(self._index, np.int32, sequences, offset)
        offset += 4 * sequences
        self.sequence_pointers = np.frombuffer(self._index, np.int64, sequences, offset)
        self.document_indices = np.frombuffer(self._index, np.int64, documents, offset + 8 * sequences)

    def _map_tokens(self, path: Path) -> None:
        size = path.stat().st_size
        expected = int(self.sequence_lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        if size != expected:
            fault = "truncated" if size < expected else "it belongs to another index"
            raise ValueError(f"{path}: {size} bytes, but {index_path(self.prefix)} describes {expected}: {fault}")
        # an empty file can't be mapped
        self._tokens = np.memmap(path, mode="r", dtype=self.dtype) if size else np.empty(0, self.dtype)

    def _check_consistency(self) -> None:
        path, bounds = index_path(self.prefix), self.document_indices
        lengths = self.sequence_lengths
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        if (lengths < 0).any() or not np.array_equal(self.sequence_pointers, starts * self.dtype.itemsize):
            raise ValueError(f"{path}: damaged, its sequence pointers don't follow from its sequence lengths")
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(lengths) or (np.diff(bounds) < 0).any():
            raise ValueError(f"{path}: damaged, its document indices don't cover its {len(lengths)} sequences")
        if len(bounds) == len(lengths) + 1 and (np.diff(bounds) == 1).all():  # usual: nothing to hold in memory
            self.document_lengths, self._document_pointers = lengths, self.sequence_pointers
        else:
            starts = np.append(starts, self.num_tokens)[bounds]
            self.document_lengths, self._document_pointers = np.diff(starts), starts[:-1] * self.dtype.itemsize

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        """Token ids of one sequence: a read-only view of the file in its own dtype."""
        length = self.sequence_lengths[sequence]
        start = self.sequence_pointers[sequence] // self.dtype.itemsize
        return self._tokens[start : start + length]

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Token ids of a document from `offset` on, to its end or `length` ids: a read-only view."""
        size = int(self.document_lengths[document])
        stop = size if length is None else offset + length
        assert 0 <= offset <= stop <= size, (document, offset, length, size)
        start = int(self._document_pointers[document]) // self.dtype.itemsize
        return self._tokens[start + offset : start + stop]

    def token_range(self, chunk: int = 1 << 24) -> tuple[int, int]:
        """Smallest and largest id in the file, read in chunks; (0, -1) when it is empty."""
        chunks = [self._tokens[i : i + chunk] for i in range(0, self.num_tokens, chunk)]
        if not chunks:
            return 0, -1
        return min(int(c.min()) for c in chunks), max(int(c.max()) for c in chunks)

    def fingerprint(self) -> str:
        """Hash of the table of lengths and documents: what sample indices depend on, wherever the files lie."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            for start in range(0, len(self._index), 1 << 24):
                digest.update(self._index[start : start + (1 << 24)])
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def identity(self) -> list:
        """Path, size and modification time of the tokens: changes whenever the `.bin` file may have changed."""
        stat = token_path(self.prefix).stat()
        return [os.path.abspath(self.prefix), stat.st_size, stat.st_mtime_ns]


def _mend_prefix(prefix: str) -> str:
    if prefix.endswith((".bin", ".idx")):
        return f"give the prefix without its suffix: {prefix[:-4]}"
    return "tools/preprocess_data.py writes PREFIX_text_document.bin and .idx; give PREFIX_text_document"


class IndexedDatasetBuilder:
    """Writes a `.bin/.idx` pair under temporary names and publishes both when the `with` block ends well.

    An exception inside the block removes what was written; files that stood at the prefix before stay as they were.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | type):
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        assert self.dtype in CODE_OF_DTYPE, dtype
        assert self.dtype.kind in "iu", dtype
        token_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._temporary = {
            path: path.with_name(f"{path.name}.tmp-{os.getpid()}") for path in (token_path(prefix), index_path(prefix))
        }
        self._tokens = open(self._temporary[token_path(prefix)], "wb")  # noqa: SIM115 - closed by __exit__
        self._lengths = array("i")  # compact: tens of millions of Python ints would not be
        self._document_indices = array("q", [0])

    def add_document(self, ids: np.ndarray) -> None:
        """Append one document, one sequence. ids: integers [n]. ValueError when an id doesn't fit the dtype."""
        self.add_documents(np.asarray(ids), [len(ids)])

    def add_documents(self, ids: np.ndarray, lengths) -> None:
        """Append documents that lie end to end in `ids`; `lengths` are their sizes in tokens."""
        assert sum(lengths) == len(ids)
        limits = np.iinfo(self.dtype)
        if len(ids) and (ids.min() < limits.min or ids.max() > limits.max):
            raise ValueError(f"{self.prefix}: token ids {ids.min()} .. {ids.max()} don't fit {self.dtype}")
        if len(lengths) and max(lengths) > np.iinfo(np.int32).max:
            raise ValueError(f"{self.prefix}: a document of {max(lengths)} tokens; the format allows {2**31 - 1}")
        self._tokens.write(np.ascontiguousarray(ids, dtype=self.dtype).tobytes())
        first = len(self._lengths)
        self._lengths.extend(int(n) for n in lengths)
        self._document_indices.extend(range(first + 1, first + len(lengths) + 1))

    def add_dataset(self, other: IndexedDataset) -> None:
        """Append all of another dataset, sequences and documents as they are. ValueError on another dtype."""
        if other.dtype != self.dtype:
            raise ValueError(
                f"{token_path(other.prefix)}: holds {other.dtype} ids, not {self.dtype} as the others; "
                "preprocess them with one tokenizer"
            )
        first = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        self._document_indices.frombytes((other.document_indices[1:] + first).tobytes())
        with open(token_path(other.prefix), "rb") as source:
            shutil.copyfileobj(source, self._tokens, 1 << 22)

    @property
    def num_documents(self) -> int:
        return len(self._document_indices) - 1

    def _write_index(self, path: Path) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        write_index(path, self.dtype, [lengths], np.frombuffer(self._document_indices, np.int64))

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None:
                _sync(self._tokens)
                self._tokens.close()
                self._write_index(self._temporary[index_path(self.prefix)])
                # no index may stand beside tokens that it doesn't describe: the old one goes first, the new one last
                index_path(self.prefix).unlink(missing_ok=True)
                for path, temporary in self._temporary.items():
                    os.replace(temporary, path)
        finally:
            self._tokens.close()
            for temporary in self._temporary.values():
                temporary.unlink(missing_ok=True)


def write_index(
    path: Path, dtype: np.dtype, lengths: Sequence[np.ndarray], document_indices: np.ndarray | None = None
) -> None:
    """Writes an `.idx` file, synced to disk.

    lengths: int32, of all sequences in order, in blocks, which are gone through several times; what is held in memory
    is a block. document_indices: int64 [D + 1]; None: each sequence is a document.
    """
    sequences = sum(len(block) for block in lengths)
    documents = sequences + 1 if document_indices is None else len(document_indices)
    with open(path, "wb") as f:
        f.write(_HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[dtype], sequences, documents))
        for block in lengths:
            f.write(np.ascontiguousarray(block, np.int32).tobytes())
        tokens = 0
        for block in lengths:
            ends = tokens + np.cumsum(block, dtype=np.int64)
            f.write(((ends - block) * dtype.itemsize).tobytes())
            tokens = int(ends[-1]) if len(ends) else tokens
        if document_indices is None:
            for start in range(0, documents, 1 << 20):
                f.write(np.arange(start, min(start + (1 << 20), documents), dtype=np.int64).tobytes())
        else:
            f.write(document_indices.tobytes())
        _sync(f)


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())
