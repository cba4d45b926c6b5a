#!/usr/bin/env python3
"""Train a SentencePiece tokenizer on text.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --output-prefix data/tokenizer

writes data/tokenizer.model (for --tokenizer-type SentencePieceTokenizer --tokenizer-model) and data/tokenizer.vocab, a
list to read. Any text survives encoding and decoding: what the vocabulary lacks is spelt in bytes. The same input and
flags give the same files.
"""

import argparse
import io
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from megafp8.config.publish import publish
from megafp8.config.tool_parser import ToolParser
from megafp8.data.arguments import add_input_arguments, input_corpus, run
from megafp8.data.documents import Record, texts_of

MAX_SENTENCE_BYTES = 16384  # SentencePiece drops longer sentences: longer lines are cut


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_input_arguments(parser)
    group = parser.add_argument_group("training")
    group.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="tokens, the 256 bytes and <unk> <s> </s> included"
    )
    group.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="default: bpe")
    group.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        metavar="X",
        help="part of the characters that get tokens; the rest is spelt in bytes (default 0.9995)",
    )
    group.add_argument(
        "--max-sentences",
        type=int,
        default=0,
        metavar="N",
        help="train on a random sample of this many lines (default: all)",
    )
    group.add_argument("--seed", type=int, default=1234, metavar="N", help="of that sample (default 1234)")
    group.add_argument("--output-prefix", required=True, metavar="PREFIX", help="files are PREFIX.model and .vocab")
    args = parser.parse_args(argv)
    if args.vocab_size < 260:
        parser.error(f"--vocab-size {args.vocab_size}: give 260 or more (256 bytes, 3 special tokens, and text)")
    if not 0 < args.character_coverage <= 1:
        parser.error(f"--character-coverage {args.character_coverage}: give a number above 0, at most 1")
    return args


def sentences(records: Iterable[Record], keys: list[str]) -> Iterator[str]:
    """Lines of all documents that hold more than white space, cut to what SentencePiece takes."""
    limit = MAX_SENTENCE_BYTES // 4  # characters; UTF-8 takes up to 4 bytes for one
    for record in records:
        for text in texts_of(record, keys).values():
            for line in text.splitlines():
                if line.strip():
                    # SentencePiece ends a string at a null character
                    line = line.replace("\0", " ")
                    yield from (line[i : i + limit] for i in range(0, len(line), limit))


def train(lines: Iterator[str], args: argparse.Namespace) -> bytes:
    """The model's bytes."""
    import sentencepiece

    sentencepiece.set_random_generator_seed(args.seed)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=args.vocab_size,
            model_type=args.model_type,
            character_coverage=args.character_coverage,
            input_sentence_size=args.max_sentences,
            shuffle_input_sentence=args.max_sentences > 0,
            max_sentence_length=MAX_SENTENCE_BYTES,
            # text must come back as it went in
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            split_digits=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,  # more would add up unigram's statistics in another order
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise ValueError(_explain(error, args)) from None
    return model.getvalue()


def _explain(error: Exception, args: argparse.Namespace) -> str:
    """SentencePiece's message in terms of our flags."""
    reason = " ".join(str(error).split())
    largest = re.search(r"set it to a value <= (\d+)", reason)
    if largest:
        return (
            f"--vocab-size {args.vocab_size}: the text has too few distinct pieces; give {largest[1]} or less, or "
            "more text"
        )
    smallest = re.search(r"Vocabulary size is smaller than required_chars\. (\d+) vs (\d+)", reason)
    if smallest:
        return (
            f"--vocab-size {args.vocab_size}: the text's characters alone need {smallest[2]}; give more, or a "
            "smaller --character-coverage"
        )
    return f"SentencePiece can't train on --input {' '.join(args.input)}: {reason}"


def main(argv: list[str]) -> None:
    import sentencepiece

    args = parse_args(argv)
    lines = sentences(input_corpus(args).records(), args.json_keys)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"--input {' '.join(args.input)}: holds no text")

    def all_lines() -> Iterator[str]:
        yield first
        yield from lines

    model = train(all_lines(), args)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = processor.vocab_size()
    listing = "".join(f"{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n" for i in range(size))
    publish(Path(f"{args.output_prefix}.model"), model)
    publish(Path(f"{args.output_prefix}.vocab"), listing.encode())
    print(f"{args.output_prefix}.model: {args.model_type}, {size} tokens")


if __name__ == "__main__":
    sys.exit(run(main))
