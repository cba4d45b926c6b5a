#!/usr/bin/env python3
"""Loss, perplexity and bits per byte of a checkpoint on data sets.

    tools/evaluate.py --load runs/quickstart/checkpoints --data-path runs/quickstart/data_text_document --split 90,10,0
    tools/evaluate.py --load DIR --valid-data-path wiki=data/wiki_text_document code=data/code_text_document
    torchrun --nproc-per-node 8 tools/evaluate.py --load DIR --valid-data-path wiki=... code=... --output results.json

With --data-path the validation part of --split is read, with --valid-data-path the whole of each set; every token once
and in order. NAME=PREFIX makes each prefix a set of its own; several of --data-path without names are one blend. Beside
the loss (mean over the predicted tokens, in nats) stand the bits for a byte of text, which compare across tokenizers,
and the unigram entropy of the tokens: the loss of a model that knows their frequencies and nothing else.

Under torchrun every process takes its share of the samples, and the numbers stay the same; layout flags spread a model
that is too large for one device, whatever the layout of its training.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from megafp8.config.mistakes import say_mistake
from megafp8.config.publish import publish
from megafp8.config.tool_parser import ToolParser, check_least, check_output
from megafp8.config.validate import require_checkpoints

AXES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")


def add_load_and_data(parser: argparse.ArgumentParser, valid_help: str) -> None:
    """Which checkpoint, and the data that `open_sets` opens. valid_help: what --valid-data-path is for."""
    parser.add_argument("--load", required=True, metavar="DIR", help="directory of checkpoints, or one of them")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint (default: the latest)")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data-path", nargs="+", metavar="PREFIX", help="data whose validation part of --split is read")
    data.add_argument("--valid-data-path", nargs="+", metavar="PREFIX", help=valid_help)
    parser.add_argument("--split", metavar="A,B,C", help="shares of training, validation, test (default: the run's)")


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load_and_data(parser, "data sets, each read whole; [NAME=]PREFIX ...")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="names of --valid-data-path's sets, as NAME=PREFIX")
    parser.add_argument("--micro-batch-size", type=int, default=8, metavar="N", help="samples at once (default: 8)")
    parser.add_argument("--max-samples", type=int, metavar="N", help="stop after so many samples of each set")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="where the tokenizer lies now, if it has moved")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the results there too")
    layout = parser.add_argument_group(
        "layout, under torchrun (default: 1 each; the other processes share the samples)"
    )
    for axis in AXES:
        flag = f"--{axis.replace('_', '-')}-parallel-size"
        layout.add_argument(flag, type=int, metavar="N", help="as in training")
    return parser


def named_prefixes(args: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Name of each set -> its prefixes (a blend, if there are several). ValueError for names that don't fit."""
    flag, values = ("--data-path", args.data_path) if args.data_path else ("--valid-data-path", args.valid_data_path)
    names = getattr(args, "names", None)
    pairs = [re.fullmatch(r"([\w.+-]+)=(.+)", value) for value in values]
    pairs = [None if Path(f"{value}.idx").exists() else pair for value, pair in zip(values, pairs, strict=True)]
    if any(pairs):
        plain = next((value for value, pair in zip(values, pairs, strict=True) if pair is None), None)
        if plain is not None or names:
            what = f"{flag} {plain} has no name" if plain else f"--names and NAME=PREFIX of {flag}"
            raise ValueError(f"{what}; give all sets as NAME=PREFIX, without --names, or none")
        names, values = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    elif flag == "--data-path":
        if names:
            raise ValueError("--names are for --valid-data-path; give --data-path NAME=PREFIX ...")
        return {"valid": tuple(values)}
    elif len(values) == 1:
        names = names or ["valid"]
    names = names or [str(number) for number in range(len(values))]
    if len(names) != len(values) or len(set(names)) != len(names):
        raise ValueError(f"{flag}: {len(values)} sets and the names {' '.join(names)}; give each set one of its own")
    return {name: (prefix,) for name, prefix in zip(names, values, strict=True)}


def open_sets(args: argparse.Namespace, trained) -> tuple[dict, object]:
    """(name -> data set, mask options); ValueError when there is nothing to evaluate."""
    from megafp8.data import SampleCounts, build_datasets

    if args.micro_batch_size < 1:
        raise ValueError(f"--micro-batch-size {args.micro_batch_size}: give 1 or more")
    changes = {"train_data_path": None, "valid_data_path": None, "test_data_path": None, "data_path": None}
    changes |= {"mock_data": False, "multiple_validation_sets": False, "validation_set_names": None}
    split = {"split": args.split} if args.data_path and args.split else {} if args.data_path else {"split": None}
    sets = {}
    for name, prefixes in named_prefixes(args).items():
        config = trained.config.replace(
            **changes | split | {"data_path" if args.data_path else "valid_data_path": prefixes}
        )
        datasets = build_datasets(
            config.data, trained.tokenizer, SampleCounts(0, None, 0), seed=0, shuffle_eval=False, drop_last_eval=False
        )
        if not datasets.valid:
            raise ValueError("; ".join(datasets.notes) or f"{prefixes[0]}: nothing to evaluate there")
        sets[name] = datasets.valid["valid"]
    return sets, datasets.masks


def layout_sizes(args: argparse.Namespace) -> dict[str, int]:
    """The layout flags that were given."""
    names = [f"{axis}_parallel_size" for axis in AXES]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what is wrong with flags and files, before torch takes its seconds to load."""
    from megafp8.data import IndexedDataset

    check_least(args, 1, "micro_batch_size", "max_samples", *layout_sizes(args))
    require_checkpoints(args.load)
    check_output(args.output)
    for prefix in (value for prefixes in named_prefixes(args).values() for value in prefixes):
        if not re.fullmatch(r"[0-9.e-]+", prefix):  # a blend's weight
            IndexedDataset(prefix)


def evaluate_all(args: argparse.Namespace) -> tuple[dict[str, dict[str, float]], object]:
    """Results by name, and the layout that they were computed in."""
    from tqdm import tqdm

    from megafp8.training.build import pick_device
    from megafp8.training.evaluation import arrange, evaluate_set
    from megafp8.training.inference import load_trained

    sizes = layout_sizes(args)
    trained = load_trained(
        args.load,
        pick_device(args.device),
        step=args.ckpt_step,
        layout=lambda config: arrange(config, sizes, args.micro_batch_size),
        tokenizer_model=args.tokenizer_model,
    )
    sets, masks = open_sets(args, trained)
    shown = trained.parallel.is_first and sys.stderr.isatty()
    results = {}
    for name, dataset in sets.items():
        total = min(len(dataset), args.max_samples or len(dataset))
        with tqdm(total=total, unit="sample", desc=name, disable=not shown, leave=False) as bar:
            results[name] = evaluate_set(
                trained,
                dataset,
                masks,
                micro_batch_size=args.micro_batch_size,
                max_samples=args.max_samples,
                advance=bar.update,
            )
    return results, trained.parallel


def table(results: dict[str, dict[str, float]]) -> str:
    """The results as lines of text, a set each."""
    width = max(len("set"), *map(len, results))
    lines = [
        f"{'set':{width}} {'tokens':>12} {'loss':>9} {'perplexity':>12} {'bits/byte':>10} {'unigram entropy':>16} "
        f"{'of it':>7}"
    ]
    for name, r in results.items():
        bits = f"{r['bits_per_byte']:.4f}" if "bits_per_byte" in r else "-"
        share = r["loss"] / r["unigram_entropy"] if r["unigram_entropy"] else float("inf")
        lines.append(
            f"{name:{width}} {r['tokens']:>12} {r['loss']:>9.4f} {r['perplexity']:>12.2f} {bits:>10} "
            f"{r['unigram_entropy']:>16.4f} {share:>7.3f}"
        )
    return "\n".join(lines)


def mistake(text: str) -> int:
    """Says what it was and leaves the job, if this process has joined one."""
    say_mistake(f"evaluate.py: error: {text}")
    if "torch" in sys.modules:
        from megafp8.parallel import abandon_parallel

        abandon_parallel()
    return 2


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        check(args)
        results, parallel = evaluate_all(args)
        if parallel.is_first:
            print(table(results))
            if args.output:
                publish(args.output, json.dumps(results, indent=2) + "\n")
    except ValueError as error:
        return mistake(str(error))
    except OSError as error:
        return mistake(f"{error.filename or ''}: {error.strerror or error}")
    from megafp8.parallel import close_parallel

    close_parallel(parallel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
