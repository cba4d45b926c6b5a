#!/usr/bin/env python3
"""Turn raw text into the token files that training reads (Megatron's .bin/.idx format).

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/tokenizer --append-eod --workers 8

writes data/corpus_text_document.bin and .idx; train on them with --data-path data/corpus_text_document. The files are
the same, byte for byte, for any number of workers, and however often the work was interrupted: the same command goes on
where it was stopped, from what PREFIX.partial/ holds.
"""

import argparse
import functools
import os
import sys
import time
from datetime import timedelta

from megafp8.config.tool_parser import ToolParser
from megafp8.data.arguments import (
    add_input_arguments,
    add_tokenizer_arguments,
    idle_tokenizer_flags,
    input_corpus,
    run,
)
from megafp8.data.documents import Corpus, Cursor
from megafp8.data.preprocess import EncodeOptions, Outcome, preprocess
from megafp8.data.tokenizer import build_tokenizer


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_input_arguments(parser)
    add_tokenizer_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="files are named PREFIX_KEY_document.bin and .idx"
    )
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group.add_argument("--prepend-bos", action="store_true", help="begin each document with the tokenizer's BOS")
    group.add_argument(
        "--drop-duplicates",
        action="store_true",
        help="leave out documents whose text is exactly that of an earlier one (they are counted without it, too)",
    )
    group = parser.add_argument_group("runtime")
    group.add_argument(
        "--restart", action="store_true", help="begin anew instead of going on with PREFIX.partial/, and remove that"
    )
    group.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that tokenize (default: one a CPU)",
    )
    group.add_argument(
        "--log-interval",
        type=int,
        default=10000,
        metavar="N",
        help="without a terminal: documents between two lines of progress (default 10000)",
    )
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: give 1 or more")
    if len(set(args.json_keys)) != len(args.json_keys):
        parser.error(f"--json-keys {' '.join(args.json_keys)}: a key stands twice")
    return args


class Progress:
    """A bar on a terminal, a line every `interval` documents elsewhere: by bytes of the input files, so that the time
    left follows from what is written, over all files. What an interrupted run has done is no part of the speed."""

    def __init__(self, corpus: Corpus, interval: int):
        self.sizes, self.interval = corpus.sizes(), interval
        self.start = self.first = self.first_documents = self.documents = None
        self.bar = None

    def done(self, cursor: Cursor) -> int:
        """Bytes of the input, as it lies on the disk, in front of the cursor."""
        sizes = self.sizes or []
        return sum(sizes[: cursor.source]) + cursor.read

    def __call__(self, documents: int, cursor: Cursor) -> None:
        done = self.done(cursor)
        if self.start is None:
            self._begin(documents, done)
        elif self.bar is not None:
            self.bar.set_postfix(documents=documents, refresh=False)
            self.bar.update(done - self.bar.n)
        elif self.interval and documents // self.interval > self.documents // self.interval:
            print(self._line(documents, done), file=sys.stderr)
        self.documents = documents

    def _begin(self, documents: int, done: int) -> None:
        self.start, self.first, self.first_documents = time.monotonic(), done, documents
        if sys.stderr.isatty():
            from tqdm import tqdm

            # Smoothed over many chunks: workers hand them over in bursts.
            total = None if self.sizes is None else sum(self.sizes)
            self.bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, desc="tokenizing", smoothing=0.02)

    def _line(self, documents: int, done: int) -> str:
        seconds = max(time.monotonic() - self.start, 1e-6)
        speed = (done - self.first) / seconds
        line = f"Processed {documents} documents ({(documents - self.first_documents) / seconds:.0f} docs/s"
        if self.sizes is None:
            return f"{line}); how many are left in a pipe is unknown."
        total = sum(self.sizes)
        left = f", {timedelta(seconds=round((total - done) / speed))} left" if speed else ""
        return f"{line}, {speed / 1e6:.2f} MB/s): {100 * done / max(total, 1):.1f}% of {total / 1e6:.1f} MB{left}."

    def close(self, complete: bool) -> None:
        if self.bar is not None:
            if complete and self.bar.total is not None:  # what stands behind the last document
                self.bar.update(self.bar.total - self.bar.n)
            self.bar.close()


def note(line: str) -> None:
    print(f"note: {line}", file=sys.stderr)


def print_outcome(outcome: Outcome, split_text: str) -> None:
    for summary in outcome.summaries.values():
        skipped = f", {summary.empty} empty ones skipped" if summary.empty else ""
        print(
            f"{summary.prefix}.bin/.idx: {summary.documents} documents, {summary.tokens} tokens "
            f"({summary.dtype}){skipped}"
        )
        if summary.documents == 1 and split_text == "file":
            print("note: one document in all; --split-text lines or blank-lines cuts plain text that holds many")
    if outcome.duplicates:
        fate = "left out" if outcome.dropped else "kept; --drop-duplicates leaves them out"
        print(
            f"duplicates: {outcome.duplicates} of {outcome.records} documents repeat an earlier one exactly "
            f"({outcome.duplicate_tokens} tokens); {fate}"
        )
    else:
        print("duplicates: none")


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    corpus = input_corpus(args)
    if corpus.pipe:
        note(f"--input {corpus.pipe.path} is a pipe: how much is left is unknown, and an interruption starts it anew")
    for line in idle_tokenizer_flags(args):
        note(line)
    options = EncodeOptions(tuple(args.json_keys), args.append_eod, args.prepend_bos)
    progress, complete = Progress(corpus, args.log_interval), False
    try:
        outcome = preprocess(
            corpus,
            functools.partial(build_tokenizer, args),
            options,
            args.output_prefix,
            args.workers,
            report=progress,
            say=note,
            restart=args.restart,
            drop_duplicates=args.drop_duplicates,
        )
        complete = True
    finally:
        progress.close(complete)
    print_outcome(outcome, args.split_text)


if __name__ == "__main__":
    sys.exit(run(main))
