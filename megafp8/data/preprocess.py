"""Raw documents -> indexed data sets of token ids, with several processes and the same bytes for any number of them.

The main process reads records and cuts them into chunks; workers parse and tokenize chunks; the main process writes
the results in the order of the chunks.
"""

import collections
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from megafp8.data.documents import Record, texts_of
from megafp8.data.indexed import IndexedDatasetBuilder, token_dtype
from megafp8.data.tokenizer import Tokenizer

_CHUNK_RECORDS = 256
_CHUNK_BYTES = 1 << 20


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
class _Encoded:
    """A chunk's result: for each key ids end to end, sizes of documents, and how many were empty."""

    ids: dict[str, np.ndarray] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    empty: dict[str, int] = field(default_factory=dict)


class Encoder:
    """Parses and tokenizes chunks of records. Lives in each worker."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions):
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.eod = tokenizer.require_eod("--append-eod") if options.append_eod else None
        self.bos = tokenizer.require_bos("--prepend-bos") if options.prepend_bos else None

    def __call__(self, records: Sequence[Record]) -> _Encoded:
        texts = [texts_of(record, self.options.keys) for record in records]
        result = _Encoded()
        for key in self.options.keys:
            documents = self._encode([text[key] for text in texts], records)
            kept = [ids for ids in documents if ids]
            result.ids[key] = np.fromiter(itertools.chain.from_iterable(kept), dtype=self.dtype)
            result.lengths[key] = [len(ids) for ids in kept]
            result.empty[key] = len(documents) - len(kept)
        return result

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
    records: Iterable[Record],
    make_tokenizer: Callable[[], Tokenizer],
    options: EncodeOptions,
    prefixes: dict[str, str],
    workers: int = 1,
    report: Callable[[int, int], None] = lambda documents, size: None,
) -> dict[str, Summary]:
    """Tokenize records into one `.bin/.idx` pair a key.

    Args:
        records: documents, in order.
        make_tokenizer: called once in this process and once in each worker.
        prefixes: key -> output prefix.
        workers: processes that tokenize; 1 does it in this one.
        report: called with the numbers of documents and input bytes done since the last call.
    Returns:
        key -> what was written.
    Raises:
        ValueError for a document that can't be read, or when there is none with text; nothing is left behind.
    """
    encoder = Encoder(make_tokenizer(), options)
    summaries = {key: Summary(prefix, str(encoder.dtype)) for key, prefix in prefixes.items()}
    with contextlib.ExitStack() as stack:
        builders = {
            key: stack.enter_context(IndexedDatasetBuilder(prefix, encoder.dtype)) for key, prefix in prefixes.items()
        }
        for chunk, encoded in _encode_in_order(_chunks(records), encoder, make_tokenizer, workers):
            for key, summary in summaries.items():
                builders[key].add_documents(encoded.ids[key], encoded.lengths[key])
                summary.documents += len(encoded.lengths[key])
                summary.tokens += len(encoded.ids[key])
                summary.empty += encoded.empty[key]
            report(len(chunk), sum(record.size for record in chunk))
        for key, summary in summaries.items():
            if summary.documents == 0:
                raise ValueError(f"--input: no document has any text under {key!r} ({summary.empty} are empty)")
    return summaries


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records in groups that depend on the records only, not on the number of workers."""
    chunk, size = [], 0
    for record in records:
        chunk.append(record)
        size += record.size
        if len(chunk) == _CHUNK_RECORDS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode_in_order(
    chunks: Iterator[list[Record]], encoder: Encoder, make_tokenizer: Callable[[], Tokenizer], workers: int
) -> Iterator[tuple[list[Record], _Encoded]]:
    if workers <= 1:
        for chunk in chunks:
            yield chunk, encoder(chunk)
        return
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(make_tokenizer, encoder.options)) as pool:
        pending = collections.deque()  # bounded: a corpus larger than memory must not be read ahead
        try:
            for chunk in chunks:
                pending.append((chunk, pool.submit(_encode_in_worker, chunk)))
                if len(pending) >= 4 * workers:
                    oldest, future = pending.popleft()
                    yield oldest, future.result()
            while pending:
                oldest, future = pending.popleft()
                yield oldest, future.result()
        finally:
            for _, future in pending:
                future.cancel()


_encoder: Encoder | None = None  # of a worker process


def _start_worker(make_tokenizer: Callable[[], Tokenizer], options: EncodeOptions) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encoder = Encoder(make_tokenizer(), options)


def _encode_in_worker(records: list[Record]) -> _Encoded:
    return _encoder(records)
