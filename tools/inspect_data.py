#!/usr/bin/env python3
"""Show what a training run reads: its data sets, splits and blend, and the batch of any iteration.

    python tools/inspect_data.py --data-path data/corpus_text_document --seq-length 512 \\
        --tokenizer-type ByteTokenizer --split 90,8,2
    python tools/inspect_data.py --iteration 100 <the flags of pretrain_gpt.py>

Takes the flags of pretrain_gpt.py, and these of its own:

    --iteration N     show the batch of iteration N (the first is 1)
    --rows N          at most so many of its sequences (default 4)
    --from NAME       training (default), validation, or test
    --ids             show token ids beside the text

Flags of the model and schedule that only training needs may be left out. Documents, tokens, splits and blends are
counted from the files; batches come through the training loop's own loader.
"""

import argparse
import sys

import numpy as np

from megafp8.config import Config, parse_args
from megafp8.config.tool_parser import ToolParser
from megafp8.data import (
    Batch,
    Datasets,
    IndexedDataset,
    Tokenizer,
    build_datasets,
    build_loader,
    build_tokenizer,
    sample_counts,
)
from megafp8.data.arguments import run
from megafp8.data.blend import BlendedDataset
from megafp8.data.gpt_dataset import GPTDataset

# what pretrain_gpt.py requires and the data does not depend on
STAND_INS = {
    "--num-layers": "1",
    "--hidden-size": "64",
    "--num-attention-heads": "1",
    "--micro-batch-size": "1",
    "--train-iters": "1",
    "--lr": "1e-3",
}


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    parser = ToolParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [flags of pretrain_gpt.py] [--iteration N] [--rows N] [--from NAME] [--ids]",
        allow_abbrev=False,
    )
    parser.add_argument("--iteration", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=4, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument(
        "--from",
        dest="split_name",
        choices=("training", "validation", "test"),
        default="training",
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--ids", action="store_true", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args(argv)
    if args.iteration is not None and args.iteration < 1:
        raise ValueError(f"--iteration {args.iteration}: the first is 1")
    return args, parse_args(_with_stand_ins(rest))


def _with_stand_ins(argv: list[str]) -> list[str]:
    given = {word.split("=")[0] for word in argv}
    if "--config" in given:
        return argv
    values = dict(STAND_INS)
    if "--train-samples" in given:
        del values["--train-iters"]
    for i, word in enumerate(argv):
        if word.startswith("--seq-length"):
            values["--max-position-embeddings"] = word.partition("=")[2] or "".join(argv[i + 1 : i + 2])
    return [word for flag, value in values.items() if flag not in given for word in (flag, value)] + argv


def show_files(config: Config) -> None:
    """Documents, tokens and lengths of each file."""
    prefixes = [
        word
        for paths in (
            config.data.data_path,
            config.data.train_data_path,
            config.data.valid_data_path,
            config.data.test_data_path,
        )
        for word in paths or ()
        if not _is_number(word)
    ]
    for prefix in dict.fromkeys(prefixes):
        dataset = IndexedDataset(prefix)
        lengths = np.asarray(dataset.document_lengths)
        low, high = dataset.token_range()
        print(f"{prefix}: {dataset.num_documents} documents, {dataset.num_tokens} tokens ({dataset.dtype})")
        if dataset.num_documents:
            print(
                f"    tokens a document: {lengths.min()} to {lengths.max()}, median {int(np.median(lengths))}; "
                f"{int((lengths == 0).sum())} empty"
            )
            print(f"    token ids: {low} to {high}")


def show_splits(datasets: Datasets) -> None:
    """Which documents each split reads, how often, and the shares of a blend."""
    splits = {
        "training": datasets.train,
        **{f"validation {name!r}": part for name, part in datasets.valid.items()},
        "test": datasets.test,
    }
    for name, dataset in splits.items():
        if dataset is None:
            continue
        print(f"{name}: {len(dataset)} samples can be drawn")
        if not isinstance(dataset, BlendedDataset):
            print(f"    {_describe(dataset)}")
            continue
        for i, part in enumerate(dataset.datasets):
            drawn = int((dataset.data_set == i).sum())
            print(f"    {drawn} samples, {drawn / len(dataset):.2%}: {_describe(part) if part else 'too light'}")
    for note in datasets.notes:
        print(f"note: {note}")


def _describe(part: GPTDataset) -> str:
    documents = np.unique(part.document_index)
    tokens = int(part.documents.document_lengths[documents].sum(dtype=np.int64))
    epochs = len(part.document_index) // len(documents)
    return (
        f"{getattr(part.documents, 'prefix', 'mock data')}, documents {documents[0]} to {documents[-1]}, "
        f"{tokens} tokens, {epochs} epoch{'s' if epochs > 1 else ''}"
    )


def show_iteration(config: Config, datasets: Datasets, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Text and masks of one global batch, document by document."""
    by_name = {
        "training": datasets.train,
        "validation": next(iter(datasets.valid.values()), None),
        "test": datasets.test,
    }
    dataset = by_name[args.split_name]
    if dataset is None:
        raise ValueError(f"--from {args.split_name}: there is no {args.split_name} data")
    size = config.train.global_batch_size
    first = (args.iteration - 1) * size
    if first + size > len(dataset):
        raise ValueError(
            f"--iteration {args.iteration}: {args.split_name} ends with iteration {len(dataset) // size}; "
            "give its number of iterations with --train-iters to see later ones"
        )
    batch = next(
        build_loader(
            dataset, datasets.masks, seq_length=config.data.seq_length, micro_batch_size=size, consumed_samples=first
        )
    )
    for row in range(min(args.rows, size)):
        print(
            f"iteration {args.iteration}, sequence {row + 1} of {size} (sample {first + row}): "
            f"loss on {int(batch.loss_mask[row].sum())} of its tokens"
        )
        _show_row(batch, row, tokenizer, args.ids)


def _show_row(batch: Batch, row: int, tokenizer: Tokenizer, show_ids: bool) -> None:
    tokens, mask, positions = (x[row].numpy() for x in (batch.tokens, batch.loss_mask, batch.position_ids))
    ends = np.flatnonzero(tokens == tokenizer.eod) + 1 if tokenizer.eod is not None else np.empty(0, int)
    borders = np.unique([0, *ends, len(tokens)])
    starts = set(batch.cu_seqlens.tolist()) if batch.cu_seqlens is not None else None
    for start, stop in zip(borders, borders[1:], strict=False):
        apart = starts is not None and row * len(tokens) + start in starts
        masked = [int(i) for i in np.flatnonzero(mask[start:stop] == 0) + start]
        notes = [f"positions {positions[start]} to {positions[stop - 1]}"]
        notes += ["attends to itself only"] if apart else []
        notes += [f"no loss at {', '.join(map(str, masked))}"] if masked else []
        print(f"    tokens {start} to {stop - 1}: {'; '.join(notes)}")
        print(f"        {tokenizer.decode(tokens[start:stop].tolist())!r}")
        if show_ids:
            print(f"        {' '.join(map(str, tokens[start:stop]))}")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def main(argv: list[str]) -> None:
    args, config = parse(argv)
    tokenizer = build_tokenizer(config.data)
    print(f"{tokenizer.name}: {tokenizer.vocab_size} ids, end of document {tokenizer.eod}")
    show_files(config)
    datasets = build_datasets(config.data, tokenizer, sample_counts(config), seed=config.train.seed)
    show_splits(datasets)
    if args.iteration is not None:
        show_iteration(config, datasets, tokenizer, args)


if __name__ == "__main__":
    sys.exit(run(main))
