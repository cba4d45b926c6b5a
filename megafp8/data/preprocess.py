"""Raw documents -> indexed data sets of token ids, with several processes and the same bytes for any number of them.

The main process reads records and cuts them into chunks; workers parse and tokenize chunks; the main process writes
the results in the order of the chunks, into a state that survives the process (partial.py). At the end duplicates are
counted, index files are written, and all is published.
"""

import collections
import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process

import numpy as np

from megafp8.data.documents import Corpus, Cursor, Record, texts_of
from megafp8.data.duplicates import DUPLICATE, EMPTY, UNIQUE, hash_texts, mark_duplicates
from megafp8.data.indexed import index_path, token_dtype, token_path, write_index
from megafp8.data.partial import Partial
from megafp8.data.tokenizer import Tokenizer

_CHUNK_RECORDS = 256
_CHUNK_BYTES = 1 << 20
_BLOCK = 1 << 20  # documents, when files are gone through


@dataclass(frozen=True)
class EncodeOptions:
    """How a document becomes ids.

    keys: fields of a document to tokenize, each into a data set of its own.
    append_eod, prepend_bos: put exactly one such id at the end or beginning of each document.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    prepend_bos: bool = False


@dataclass
class Summary:
    """What was written for one key."""

    prefix: str
    dtype: str
    documents: int = 0
    tokens: int = 0
    empty: int = 0  # documents without any token, skipped


@dataclass
class Outcome:
    """What became of a job.

    summaries: by key. records: documents read. duplicates: those of them that repeat an earlier one, in all keys;
    duplicate_tokens: their tokens, over all keys. dropped: whether they were left out.
    """

    summaries: dict[str, Summary]
    records: int
    duplicates: int
    duplicate_tokens: int
    dropped: bool


@dataclass
class _Encoded:
    """A chunk's result: for each key ids end to end and tokens of each document, and a hash of each document."""

    ids: list[np.ndarray] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    hashes: np.ndarray | None = None


class Encoder:
    """Parses and tokenizes chunks of records. Lives in each worker."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions):
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.eod = tokenizer.require_eod("--append-eod") if options.append_eod else None
        self.bos = tokenizer.require_bos("--prepend-bos") if options.prepend_bos else None

    def __call__(self, records: Sequence[Record]) -> _Encoded:
        texts = [texts_of(record, self.options.keys) for record in records]
        result = _Encoded(hashes=np.array([hash_texts(text.values()) for text in texts], np.uint64))
        for key in self.options.keys:
            documents = self._encode([text[key] for text in texts], records)
            result.ids.append(np.fromiter(itertools.chain.from_iterable(documents), dtype=self.dtype))
            result.lengths.append(self._lengths(documents, records))
        return result

    def _lengths(self, documents: Sequence[list[int]], records: Sequence[Record]) -> np.ndarray:
        longest = max(range(len(documents)), key=lambda i: len(documents[i]))
        if len(documents[longest]) > np.iinfo(np.int32).max:
            size = len(documents[longest])
            raise ValueError(f"{records[longest].where}: a document of {size} tokens; the format allows {2**31 - 1}")
        return np.array([len(ids) for ids in documents], np.int32)

    def _encode(self, texts: Sequence[str], records: Sequence[Record]) -> list[list[int]]:
        try:
            documents = self.tokenizer.encode_batch(texts)
        except ValueError as error:
            raise ValueError(f"{records[0].where} or soon after: {error}") from None
        for ids in documents:
            if not ids:
                continue
            if self.bos is not None and ids[0] != self.bos:
                ids.insert(0, self.bos)
            if self.eod is not None and ids[-1] != self.eod:
                ids.append(self.eod)
        return documents


def preprocess(
    corpus: Corpus,
    make_tokenizer: Callable[[], Tokenizer],
    options: EncodeOptions,
    output_prefix: str,
    workers: int = 1,
    *,
    report: Callable[[int, Cursor], None] = lambda documents, cursor: None,
    say: Callable[[str], None] = lambda line: None,
    restart: bool = False,
    drop_duplicates: bool = False,
) -> Outcome:
    """Tokenize a corpus into one `.bin/.idx` pair a key, `PREFIX_KEY_document`, or go on with that.

    Args:
        make_tokenizer: called once in this process and once in each worker.
        workers: processes that tokenize; 1 does it in this one.
        report: called with the number of documents, and the place in the input, that all is written up to; first with
            what an interrupted run has done.
        say: told what happens to the state that survives an interruption.
        restart: throw away what an interrupted run has done.
        drop_duplicates: leave documents out whose texts are exactly an earlier one's.
    Raises:
        ValueError for a document that can't be read, or when there is none with text: nothing is left behind. Also when
            an interrupted run had other inputs or flags; then its state stays.
    """
    prefixes = [f"{output_prefix}_{key}_document" for key in options.keys]
    _check_targets(prefixes)
    encoder = Encoder(make_tokenizer(), options)
    job = _job(corpus, encoder.tokenizer, options, drop_duplicates)
    resumable = corpus.pipe is None
    partial = Partial(output_prefix, encoder.dtype, len(options.keys), job, restart=restart, resumable=resumable)
    if partial.committed:
        say(f"going on after {partial.committed} documents of an interrupted run ({partial.directory}/)")
    try:
        if not partial.finished:
            report(partial.records, partial.cursor)
            _read_all(partial, corpus, encoder, make_tokenizer, workers, report)
            partial.finish(dataclasses.asdict(_finish(partial, options.keys, prefixes, drop_duplicates)))
        outcome = Outcome(**partial.finished)
        outcome.summaries = {key: Summary(**summary) for key, summary in outcome.summaries.items()}
        partial.publish(prefixes, ".kept.bin" if drop_duplicates and outcome.duplicates else ".bin")
        return outcome
    except ValueError:  # the same would happen again
        partial.discard()
        raise
    except BaseException as error:
        if partial.committed:
            partial.close()
            say(
                f"{partial.committed} documents are kept in {partial.directory}/: the same command goes on after "
                "them, --restart begins anew"
            )
        else:
            partial.discard()
        if isinstance(error, BrokenProcessPool):
            raise ChildProcessError(
                "a worker process was killed, most often for memory; give fewer --workers"
            ) from None
        raise


def _check_targets(prefixes: Iterable[str]) -> None:
    """Raises ValueError for what no file can replace, before hours of work that would end there."""
    for path in (of(prefix) for prefix in prefixes for of in (token_path, index_path)):
        if path.is_dir():
            raise ValueError(f"--output-prefix: {path} is a directory; remove it, or give another prefix")


def _job(corpus: Corpus, tokenizer: Tokenizer, options: EncodeOptions, drop_duplicates: bool) -> dict[str, dict]:
    """What decides which bytes are written, see Partial."""
    flags = {
        "--json-keys": options.keys,
        "--split-text": corpus.text_split,
        "--dataset-split": corpus.dataset_split,
        "--input-format": [source.format for source in corpus.sources],
        "--append-eod": options.append_eod,
        "--prepend-bos": options.prepend_bos,
        "--drop-duplicates": drop_duplicates,
    }
    identity = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    return {"flags": flags, "tokenizer": identity, "inputs": corpus.identity()}


def _read_all(
    partial: Partial,
    corpus: Corpus,
    encoder: Encoder,
    make_tokenizer: Callable[[], Tokenizer],
    workers: int,
    report: Callable[[int, Cursor], None],
) -> None:
    cursor = dataclasses.replace(partial.cursor)
    chunks = _chunks(corpus.records(cursor), cursor)
    for encoded, place in _encode_in_order(chunks, encoder, make_tokenizer, workers):
        partial.add(encoded.ids, encoded.lengths, encoded.hashes, place)
        report(partial.records, place)
    if partial.resumable:
        partial.commit()


class _KeptLengths:
    """Tokens of the documents that are kept, in blocks, as often as one asks."""

    def __init__(self, lengths: np.ndarray, left_out: Callable[[slice], np.ndarray]):
        self.lengths, self.left_out = lengths, left_out

    def __iter__(self) -> Iterator[np.ndarray]:
        for start in range(0, len(self.lengths), _BLOCK):
            part = slice(start, start + _BLOCK)
            yield self.lengths[part][~self.left_out(part)]


def _finish(partial: Partial, keys: Sequence[str], prefixes: Sequence[str], drop: bool) -> Outcome:
    """Counts duplicates, cuts them out when they are to be dropped, and writes the index files."""
    partial.flush()
    count = partial.records
    lengths = [_map(partial.path(f"{key}.lengths"), np.int32, count) for key in range(len(keys))]
    marks = np.memmap(partial.path("marks"), np.uint8, "w+", shape=count) if count else np.empty(0, np.uint8)
    for start in range(0, count, _BLOCK):
        part = slice(start, start + _BLOCK)
        marks[part] = np.where(sum(column[part] > 0 for column in lengths) > 0, UNIQUE, EMPTY)
    duplicates = mark_duplicates(_map(partial.path("hashes"), np.uint64, count), marks)
    outcome = Outcome({}, count, duplicates, 0, drop)
    for number, (key, column) in enumerate(zip(keys, lengths, strict=True)):

        def left_out(part: slice, column: np.ndarray = column) -> np.ndarray:
            return (column[part] == 0) | ((marks[part] == DUPLICATE) & drop)

        kept = _KeptLengths(column, left_out)
        summary = Summary(prefixes[number], str(partial.dtype))
        for start in range(0, count, _BLOCK):
            part = slice(start, start + _BLOCK)
            summary.empty += int((column[part] == 0).sum())
            outcome.duplicate_tokens += int(column[part][marks[part] == DUPLICATE].sum(dtype=np.int64))
        for block in kept:
            summary.documents += len(block)
            summary.tokens += int(block.sum(dtype=np.int64))
        if count == 0:
            raise ValueError("--input: holds no document at all")
        if summary.documents == 0:
            raise ValueError(f"--input: no document has any text under {key!r} ({summary.empty} are empty)")
        token_path(summary.prefix).parent.mkdir(parents=True, exist_ok=True)
        if drop and duplicates:
            _cut_out(partial, number, column, left_out)
        write_index(partial.path(f"{number}.idx"), partial.dtype, kept)
        outcome.summaries[key] = summary
    return outcome


def _map(path, dtype, count: int) -> np.ndarray:
    return np.memmap(path, dtype, "r", shape=count) if count else np.empty(0, dtype)  # an empty file can't be mapped


def _cut_out(partial: Partial, number: int, lengths: np.ndarray, left_out: Callable[[slice], np.ndarray]) -> None:
    """Copies the kept documents' tokens to `N.kept.bin`."""
    tokens = _map(partial.path(f"{number}.bin"), partial.dtype, partial.tokens[number])
    position = 0
    with open(partial.path(f"{number}.kept.bin"), "wb") as f:
        for start in range(0, len(lengths), _BLOCK // 64):
            part = slice(start, start + _BLOCK // 64)
            size = int(lengths[part].sum(dtype=np.int64))
            keep = np.repeat(~left_out(part), lengths[part])
            f.write(tokens[position : position + size][keep].tobytes())
            position += size
        f.flush()
        os.fsync(f.fileno())


def _chunks(records: Iterable[Record], cursor: Cursor) -> Iterator[tuple[list[Record], Cursor]]:
    """Records in groups that depend on the records only, not on the number of workers; and the place behind each."""
    chunk, size = [], 0
    for record in records:
        chunk.append(record)
        size += record.size
        if len(chunk) == _CHUNK_RECORDS or size >= _CHUNK_BYTES:
            yield chunk, dataclasses.replace(cursor)
            chunk, size = [], 0
    if chunk:
        yield chunk, dataclasses.replace(cursor)


def _encode_in_order(
    chunks: Iterator[tuple[list[Record], Cursor]],
    encoder: Encoder,
    make_tokenizer: Callable[[], Tokenizer],
    workers: int,
) -> Iterator[tuple[_Encoded, Cursor]]:
    if workers <= 1:
        for chunk, place in chunks:
            yield encoder(chunk), place
        return
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(make_tokenizer, encoder.options)) as pool:
        pending = collections.deque()  # bounded: a corpus larger than memory must not be read ahead
        try:
            for chunk, place in chunks:
                pending.append((pool.submit(_encode_in_worker, chunk), place))
                if len(pending) >= 4 * workers:
                    future, oldest = pending.popleft()
                    yield future.result(), oldest
            while pending:
                future, oldest = pending.popleft()
                yield future.result(), oldest
        finally:
            for future, _ in pending:
                future.cancel()


_encoder: Encoder | None = None  # of a worker process


def _start_worker(make_tokenizer: Callable[[], Tokenizer], options: EncodeOptions) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of the group; the main process ends its workers
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encoder = Encoder(make_tokenizer(), options)


def _leave_with_parent() -> None:
    """Ends this worker when the main process is gone; by itself it would wait for work for ever."""
    connection.wait([parent_process().sentinel])
    os._exit(1)


def _encode_in_worker(records: list[Record]) -> _Encoded:
    return _encoder(records)
