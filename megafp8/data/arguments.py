"""What the data tools' command lines have in common."""

import argparse
import sys
from collections.abc import Callable

from megafp8.config.config import flag_of
from megafp8.config.validate.idle import TOKENIZER_RULES
from megafp8.data.documents import FORMATS, TEXT_SPLITS, Corpus, find_sources
from megafp8.data.tokenizer import TOKENIZER_TYPES


def run(main: Callable[[list[str]], None], argv: list[str] | None = None) -> int:
    """Run a tool; a user's mistake (ValueError, or a file that can't be read or written) gives one line and exit
    status 2."""
    try:
        main(sys.argv[1:] if argv is None else argv)
    except OSError as error:
        reason = error.strerror or str(error)
        print(f"error: {error.filename}: {reason}" if error.filename else f"error: {reason}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, metavar="TYPE", help="one of " + ", ".join(TOKENIZER_TYPES))
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="SentencePiece .model, directory with tokenizer.json, or TikTokenizer's JSON",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="GPT2BPETokenizer: vocab.json")
    group.add_argument("--merge-file", metavar="FILE", help="GPT2BPETokenizer: merges.txt")
    group.add_argument("--vocab-size", type=int, metavar="N", help="NullTokenizer, TikTokenizer: number of ids")
    group.add_argument("--tiktoken-pattern", metavar="{v1,v2}", help="TikTokenizer: how text is cut into words")
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        default=1000,
        metavar="N",
        help="TikTokenizer: ids reserved before the vocabulary (default 1000)",
    )
    group.add_argument("--tiktoken-special-tokens", nargs="+", metavar="TOKEN", help="TikTokenizer: names of the first")


def idle_tokenizer_flags(args: argparse.Namespace) -> list[str]:
    """A line for each flag of the tokenizer that its type does not read, as a run says it."""
    defaults = {"tiktoken_num_special_tokens": 1000}
    config = argparse.Namespace(data=args)
    return [
        f"{flag_of(name)}: no effect ({rule.why})"
        for rule in TOKENIZER_RULES
        for name in rule.names
        if getattr(args, name) != defaults.get(name) and rule.applies(config)
    ]


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, patterns, directories of files, or a directory saved by Hugging Face datasets",
    )
    group.add_argument(
        "--input-format",
        choices=("auto", *FORMATS),
        default="auto",
        help="default: by suffix (.jsonl .json .txt, also with .gz, and .parquet)",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="fields (columns) that hold text (default: text)",
    )
    group.add_argument(
        "--split-text",
        choices=TEXT_SPLITS,
        default="file",
        help="what is a document in plain text: the file, text between blank lines, or each line (default: file)",
    )
    group.add_argument("--dataset-split", metavar="NAME", help="split of a saved DatasetDict (default: train)")


def input_corpus(args: argparse.Namespace) -> Corpus:
    """What input arguments name."""
    sources = find_sources(args.input, args.input_format)
    return Corpus(tuple(sources), tuple(args.json_keys), args.split_text, args.dataset_split)
