"""Reads raw documents: JSON lines, plain text, parquet, and Hugging Face data sets saved on disk.

A document comes as a `Record`: where it stands (for messages), and either its line of JSON, still to be parsed, or
its texts by key. Parsing is left to `texts_of`, so that worker processes do it. A `Cursor` moves along with reading:
a copy of it is a place where a later process can go on.
"""

import functools
import glob
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FORMATS = ("jsonl", "text", "parquet", "dataset")
TEXT_SPLITS = ("file", "blank-lines", "lines")
_SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".parquet": "parquet"}


@dataclass(frozen=True)
class Record:
    """One raw document. `size` is about what it takes in memory, in bytes."""

    where: str
    content: bytes | dict[str, object]
    size: int


@dataclass(frozen=True)
class Source:
    """A file, or a data set's directory, to read documents from."""

    path: Path
    format: str

    def files(self) -> list[Path]:
        """The files that are read, a saved data set's own list of them among them."""
        if self.format != "dataset":
            return [self.path]
        return sorted(p for p in self.path.rglob("*") if p.suffix in (".arrow", ".json"))

    @property
    def is_pipe(self) -> bool:
        """Whether it can be read once only, and nobody knows how long it is."""
        return not self.path.is_dir() and not self.path.is_file()

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.files() if self.format != "dataset" or path.suffix == ".arrow")


@dataclass
class Cursor:
    """How far reading has come: sources read to their end, and the place in the one that is being read.

    records, line: documents and lines read of it. offset: bytes of its text (decompressed). read: bytes of its files
    (compressed) that are consumed; for progress only.
    """

    source: int = 0
    records: int = 0
    line: int = 0
    offset: int = 0
    read: int = 0


@dataclass(frozen=True)
class Corpus:
    """All sources of a job, one after the other, and how documents are cut from them (see `read_records`)."""

    sources: tuple[Source, ...]
    keys: tuple[str, ...] = ("text",)
    text_split: str = "file"
    dataset_split: str | None = None

    def records(self, cursor: Cursor | None = None) -> Iterator[Record]:
        """Documents from the cursor on, which moves along."""
        cursor = Cursor() if cursor is None else cursor
        for number in range(cursor.source, len(self.sources)):
            if number != cursor.source:
                cursor.__init__(source=number)
            yield from read_records(self.sources[number], self.keys, self.text_split, self.dataset_split, cursor)

    @property
    def pipe(self) -> Source | None:
        """The first source that is a pipe."""
        return next((source for source in self.sources if source.is_pipe), None)

    def sizes(self) -> list[int] | None:
        """Bytes of each source on disk; None when one of them is a pipe."""
        return None if self.pipe else [source.bytes_on_disk() for source in self.sources]

    def identity(self) -> dict[str, list[int]]:
        """Path of each file -> size and time of its last change, in nanoseconds."""
        stats = {str(path.absolute()): path.stat() for source in self.sources for path in source.files()}
        return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}


def find_sources(inputs: Sequence[str], input_format: str = "auto", flag: str = "--input") -> list[Source]:
    """Files and directories that inputs name, in a fixed order.

    An input is a file, a pattern with wildcards, a directory saved by `datasets` (`save_to_disk`), or a directory of
    files with known suffixes (.jsonl .json .txt .parquet, the first three also with .gz).

    Raises ValueError when an input matches nothing or its format can't be told.
    """
    sources = []
    for value in inputs:
        paths = [Path(value)] if Path(value).exists() else [Path(p) for p in sorted(glob.glob(value))]
        if not paths:
            raise ValueError(f"{flag} {value}: no such file or directory")
        for path in paths:
            sources += _sources_at(path, input_format, flag)
    return sources


def _sources_at(path: Path, input_format: str, flag: str) -> list[Source]:
    if not path.is_dir():
        found = _format_of(path) if input_format == "auto" else input_format
        if found is None:
            raise ValueError(f"{flag} {path}: unknown suffix; say what it is with --input-format text, jsonl ...")
        return [Source(path, found)]
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return [Source(path, "dataset")]
    files = sorted(p for p in path.rglob("*") if p.is_file())
    wanted = [
        Source(p, _format_of(p) or input_format)
        for p in files
        if _format_of(p) in ((input_format,) if input_format != "auto" else FORMATS)
    ]
    if not wanted:
        raise ValueError(f"{flag} {path}: no .jsonl, .json, .txt or .parquet files and no saved data set in there")
    return wanted


def _format_of(path: Path) -> str | None:
    suffixes = [s for s in path.suffixes if s != ".gz"]
    return _SUFFIXES.get(suffixes[-1]) if suffixes else None


def read_records(
    source: Source,
    keys: Sequence[str],
    text_split: str = "file",
    dataset_split: str | None = None,
    cursor: Cursor | None = None,
) -> Iterator[Record]:
    """Documents of one source, in order.

    Args:
        keys: fields that hold text; plain text stands under the first.
        text_split: what is a document in plain text: the whole "file", text between "blank-lines", or each of its
            "lines".
        dataset_split: split of a saved `DatasetDict`.
        cursor: reading starts there, and it moves along: when a record is given out, it stands behind that one.
    Raises:
        ValueError for what can't be read, naming file and place.
    """
    cursor = Cursor() if cursor is None else cursor
    if source.format == "parquet":
        yield from _read_parquet(source.path, keys, cursor)
    elif source.format == "dataset":
        yield from _read_saved_dataset(source.path, keys, dataset_split, cursor)
    else:
        try:
            with _Lines(source.path, cursor) as lines:
                records = _read_jsonl(lines) if source.format == "jsonl" else _read_text(lines, keys[0], text_split)
                yield from records
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{source.path}: damaged or cut short ({error}); get the file again") from None


def texts_of(record: Record, keys: Sequence[str]) -> dict[str, str]:
    """Texts of a document by key; a null is an empty text.

    Raises ValueError for broken JSON, a missing key, or a value that is no text.
    """
    content = record.content
    if isinstance(content, bytes):
        if not content.strip():
            return dict.fromkeys(keys, "")
        try:
            content = json.loads(content)
        except (ValueError, RecursionError) as error:  # broken JSON, or not UTF-8
            raise ValueError(f"{record.where}: not JSON ({error})") from None
        if not isinstance(content, dict):
            raise ValueError(f"{record.where}: a JSON object is expected, not {type(content).__name__}")
    texts = {}
    for key in keys:
        if key not in content:
            raise ValueError(
                f"{record.where}: has no {key!r}, only {', '.join(map(repr, content)) or 'nothing'}; name "
                "the text's key with --json-keys"
            )
        value = "" if content[key] is None else content[key]
        if not isinstance(value, str):
            raise ValueError(f"{record.where}: {key!r} is {type(value).__name__}, not text")
        texts[key] = _without_surrogates(value)
    return texts


def _without_surrogates(text: str) -> str:
    """JSON can escape half a surrogate pair, which no tokenizer can encode: it becomes U+FFFD."""
    return re.sub(r"[\ud800-\udfff]", "\ufffd", text)


class _Lines:
    """Lines of a file, compressed or not, from a cursor on; the cursor's line, offset and bytes follow."""

    def __init__(self, path: Path, cursor: Cursor):
        self.path, self.cursor = path, cursor
        self._raw = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        self._file = gzip.GzipFile(fileobj=self._raw) if path.suffix == ".gz" else self._raw
        if cursor.offset:
            self._file.seek(cursor.offset)

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
        self._raw.close()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1 on, line with its end)"""
        for line in self._file:
            yield self._took(line, 1), line

    def rest(self) -> bytes:
        content = self._file.read()
        self._took(content, 1)
        return content

    def _took(self, content: bytes, lines: int) -> int:
        cursor = self.cursor
        cursor.line += lines
        cursor.offset += len(content)
        cursor.read = cursor.offset if self._file is self._raw else self._raw.tell()
        return cursor.line

    def record(self, number: int, content: bytes | dict[str, object], size: int) -> Record:
        self.cursor.records += 1
        return Record(f"{self.path}:{number}", content, size)


def _read_jsonl(lines: _Lines) -> Iterator[Record]:
    for number, line in lines:
        yield lines.record(number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, len(line))


def _read_text(lines: _Lines, key: str, text_split: str) -> Iterator[Record]:
    def record(number: int, raw: bytes) -> Record:
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{lines.path}:{number}: not UTF-8 text ({error.reason})") from None
        return lines.record(number, {key: text}, len(raw))

    if text_split == "file":
        if not lines.cursor.records:
            yield record(1, lines.rest())
    elif text_split == "lines":
        for number, line in lines:
            yield record(number, line.rstrip(b"\r\n"))
    else:
        start, block = 1, []
        for number, line in lines:
            if line.strip():
                start = start if block else number
                block.append(line)
            elif block:
                yield record(start, b"".join(block).rstrip(b"\r\n"))
                block = []
        if block:
            yield record(start, b"".join(block).rstrip(b"\r\n"))


def _read_parquet(path: Path, keys: Sequence[str], cursor: Cursor) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        _require_columns(path, file.schema_arrow.names, keys)
        total, size = file.metadata.num_rows, path.stat().st_size
        groups, before = list(range(file.metadata.num_row_groups)), 0
        while groups and before + file.metadata.row_group(groups[0]).num_rows <= cursor.records:
            before += file.metadata.row_group(groups.pop(0)).num_rows
        if groups:
            batches = file.iter_batches(batch_size=1024, row_groups=groups, columns=list(keys))
            yield from _rows(path, batches, before, cursor, lambda: size * cursor.records // total)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a parquet file that can be read ({_one_line(error)})") from None


def _read_saved_dataset(path: Path, keys: Sequence[str], split: str | None, cursor: Cursor) -> Iterator[Record]:
    """Arrow files of `datasets`' `save_to_disk`, in the order of its state.json; read without that package."""
    import pyarrow

    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        split = split or ("train" if "train" in splits else splits[0])
        if split not in splits:
            raise ValueError(f"--dataset-split {split}: {path} has {', '.join(splits)}")
        path = path / split
    if not (path / "state.json").is_file():
        raise ValueError(f"{path}: not a data set saved with save_to_disk (no state.json)")
    before = earlier = 0  # rows and bytes of the files before
    for entry in json.loads((path / "state.json").read_text())["_data_files"]:
        file = path / entry["filename"]
        try:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as reader:
                _require_columns(path, reader.schema.names, keys)
                for batch in reader:
                    read = functools.partial(int, earlier + source.tell())
                    yield from _rows(path, [batch.select(list(keys))], before, cursor, read)
                    before += batch.num_rows
            earlier += file.stat().st_size
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{file}: can't be read ({_one_line(error)})") from None


def _require_columns(path: Path, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise ValueError(
                f"{path}: has no column {key!r}, only {', '.join(map(repr, names))}; name the text's "
                "column with --json-keys"
            )


def _rows(path: Path, batches, before: int, cursor: Cursor, read: Callable[[], int]) -> Iterator[Record]:
    """Rows that the cursor has not passed yet. before: rows of the source that stand before the batches; read: bytes
    consumed when the cursor stands behind a row."""
    for batch in batches:
        passed = min(max(cursor.records - before, 0), batch.num_rows)
        before += batch.num_rows
        for row in batch.slice(passed).to_pylist():
            cursor.records += 1
            cursor.read = read()
            size = sum(len(value) for value in row.values() if isinstance(value, str))
            yield Record(f"{path}, row {cursor.records}", row, size)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
