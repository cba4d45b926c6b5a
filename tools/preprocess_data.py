#!/usr/bin/env python3
"""Turn raw text into the token files that training reads (Megatron's .bin/.idx format).

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/tokenizer --append-eod --workers 8

writes data/corpus_text_document.bin and .idx; train on them with --data-path data/corpus_text_document. The files are
the same, byte for byte, for any number of workers.
"""

import argparse
import functools
import os
import sys
import time

from megafp8.data.arguments import add_input_arguments, add_tokenizer_arguments, input_records, run
from megafp8.data.preprocess import EncodeOptions, preprocess
from megafp8.data.tokenizer import build_tokenizer


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_input_arguments(parser)
    add_tokenizer_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="files are named PREFIX_KEY_document.bin and .idx"
    )
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group.add_argument("--prepend-bos", action="store_true", help="begin each document with the tokenizer's BOS")
    group = parser.add_argument_group("runtime")
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
    """A bar on a terminal, a line every `interval` documents elsewhere."""

    def __init__(self, total_bytes: int | None, interval: int):
        self.interval, self.documents, self.size, self.start = interval, 0, 0, time.monotonic()
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenizing")

    def __call__(self, documents: int, size: int) -> None:
        before = self.documents
        self.documents += documents
        self.size += size
        if self.bar is not None:
            self.bar.set_postfix(documents=self.documents, refresh=False)
            self.bar.update(size)
        elif self.interval and self.documents // self.interval > before // self.interval:
            seconds = time.monotonic() - self.start
            print(
                f"Processed {self.documents} documents ({self.documents / seconds:.0f} docs/s, "
                f"{self.size / seconds / 1e6:.2f} MB/s).",
                file=sys.stderr,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    records, total_bytes = input_records(args)
    options = EncodeOptions(tuple(args.json_keys), args.append_eod, args.prepend_bos)
    prefixes = {key: f"{args.output_prefix}_{key}_document" for key in args.json_keys}
    progress = Progress(total_bytes, args.log_interval)
    try:
        summaries = preprocess(
            records, functools.partial(build_tokenizer, args), options, prefixes, args.workers, progress
        )
    finally:
        progress.close()
    for summary in summaries.values():
        skipped = f", {summary.empty} empty ones skipped" if summary.empty else ""
        print(
            f"{summary.prefix}.bin/.idx: {summary.documents} documents, {summary.tokens} tokens "
            f"({summary.dtype}){skipped}"
        )
        if summary.documents == 1 and args.split_text == "file":
            print("note: one document in all; --split-text lines or blank-lines cuts plain text that holds many")


if __name__ == "__main__":
    sys.exit(run(main))
