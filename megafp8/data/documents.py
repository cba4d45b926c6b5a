"""Reads raw documents: JSON lines, plain text, parquet, and Hugging Face data sets saved on disk.

A document comes as a `Record`: where it stands (for messages), and either its line of JSON, still to be parsed, or
its texts by key. Parsing is left to `texts_of`, so that worker processes do it.
"""

import glob
import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FORMATS = ("jsonl", "text", "parquet", "dataset")
TEXT_SPLITS = ("file", "blank-lines", "lines")
_SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".parquet": "parquet"}


@dataclass(frozen=True)
class Record:
    """One raw document. `size` is what it takes in the input, in bytes, for progress."""

    where: str
    content: bytes | dict[str, object]
    size: int


@dataclass(frozen=True)
class Source:
    """A file, or a data set's directory, to read documents from."""

    path: Path
    format: str


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
            raise ValueError(f"{flag} {path}: unknown suffix; say what it is with --input-format")
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
    source: Source, keys: Sequence[str], text_split: str = "file", dataset_split: str | None = None
) -> Iterator[Record]:
    """Documents of one source, in order.

    Args:
        keys: fields that hold text; plain text stands under the first.
        text_split: what is a document in plain text: the whole "file", text between "blank-lines", or each of its
            "lines".
        dataset_split: split of a saved `DatasetDict`.
    Raises:
        ValueError for what can't be read, naming file and place.
    """
    if source.format == "jsonl":
        yield from _read_jsonl(source.path)
    elif source.format == "text":
        yield from _read_text(source.path, keys[0], text_split)
    elif source.format == "parquet":
        yield from _read_parquet(source.path, keys)
    else:
        yield from _read_saved_dataset(source.path, keys, dataset_split)


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


def _open(path: Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _read_jsonl(path: Path) -> Iterator[Record]:
    with _open(path) as f:
        for number, line in enumerate(f, start=1):
            yield Record(f"{path}:{number}", line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, len(line))


def _read_text(path: Path, key: str, text_split: str) -> Iterator[Record]:
    def record(number: int, raw: bytes) -> Record:
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{number}: not UTF-8 text ({error.reason})") from None
        return Record(f"{path}:{number}", {key: text}, len(raw))

    with _open(path) as f:
        if text_split == "file":
            yield record(1, f.read())
        elif text_split == "lines":
            for number, line in enumerate(f, start=1):
                yield record(number, line.rstrip(b"\r\n"))
        else:
            start, lines = 1, []
            for number, line in enumerate(f, start=1):
                if line.strip():
                    start = start if lines else number
                    lines.append(line)
                elif lines:
                    yield record(start, b"".join(lines).rstrip(b"\r\n"))
                    lines = []
            if lines:
                yield record(start, b"".join(lines).rstrip(b"\r\n"))


def _read_parquet(path: Path, keys: Sequence[str]) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        _require_columns(path, file.schema_arrow.names, keys)
        yield from _rows(path, file.iter_batches(batch_size=1024, columns=list(keys)))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a parquet file that can be read ({_one_line(error)})") from None


def _read_saved_dataset(path: Path, keys: Sequence[str], split: str | None) -> Iterator[Record]:
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
    for entry in json.loads((path / "state.json").read_text())["_data_files"]:
        file = path / entry["filename"]
        try:
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as reader:
                _require_columns(path, reader.schema.names, keys)
                yield from _rows(path, (batch.select(list(keys)) for batch in reader))
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{file}: can't be read ({_one_line(error)})") from None


def _require_columns(path: Path, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise ValueError(
                f"{path}: has no column {key!r}, only {', '.join(map(repr, names))}; name the text's "
                "column with --json-keys"
            )


def _rows(path: Path, batches) -> Iterator[Record]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield Record(f"{path}, row {number}", row, 0)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
