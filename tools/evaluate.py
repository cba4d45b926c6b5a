#!/usr/bin/env python3
"""Loss and perplexity of a checkpoint on data sets.

    tools/evaluate.py --load runs/quickstart/checkpoints --data-path runs/quickstart/data_text_document --split 90,10,0
    tools/evaluate.py --load DIR --valid-data-path wiki books --names wiki books

With --data-path the validation part of --split is read, with --valid-data-path the whole of each set; every token once
and in order. Beside the loss (mean over the predicted tokens, in nats) stands the unigram entropy of those tokens: the
loss of a model that knows their frequencies and nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path


def add_load_and_data(parser: argparse.ArgumentParser, valid_help: str) -> None:
    """Which checkpoint, and the data that `open_sets` opens. valid_help: what --valid-data-path is for."""
    parser.add_argument("--load", required=True, metavar="DIR", help="directory of checkpoints, or one of them")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint (default: the latest)")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data-path", nargs="+", metavar="PREFIX", help="data whose validation part of --split is read")
    data.add_argument("--valid-data-path", nargs="+", metavar="PREFIX", help=valid_help)
    parser.add_argument("--split", metavar="A,B,C", help="shares of training, validation, test (default: the run's)")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load_and_data(parser, "data sets, each read whole")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="names of --valid-data-path's sets")
    parser.add_argument("--micro-batch-size", type=int, default=8, metavar="N", help="samples at once (default: 8)")
    parser.add_argument("--max-samples", type=int, metavar="N", help="stop after so many samples of each set")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="where the tokenizer lies now, if it has moved")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the results there too")
    return parser


def open_sets(args: argparse.Namespace, trained) -> tuple[dict, object]:
    """(name -> data set, mask options); ValueError when there is nothing to evaluate."""
    from megafp8.data import SampleCounts, build_datasets

    if args.micro_batch_size < 1:
        raise ValueError(f"--micro-batch-size {args.micro_batch_size}: give 1 or more")
    changes = {"train_data_path": None, "test_data_path": None, "mock_data": False}
    if args.data_path:
        changes |= {"data_path": tuple(args.data_path), "valid_data_path": None}
        changes |= {"split": args.split} if args.split else {}
    else:
        several = len(args.valid_data_path) > 1
        names = tuple(args.names) if args.names else None
        changes |= {"data_path": None, "split": None, "valid_data_path": tuple(args.valid_data_path)}
        changes |= {"multiple_validation_sets": several, "validation_set_names": names}
    config = trained.config.replace(**changes)
    datasets = build_datasets(
        config.data, trained.tokenizer, SampleCounts(0, None, 0), seed=0, shuffle_eval=False, drop_last_eval=False
    )
    if not datasets.valid:
        raise ValueError("; ".join(datasets.notes) or "--data-path: nothing to evaluate there")
    return dict(datasets.valid), datasets.masks


def evaluate_set(trained, dataset, masks, micro_batch_size: int, max_samples: int | None) -> dict[str, float]:
    """Loss, perplexity, number of tokens and their unigram entropy."""
    import torch
    from tqdm import tqdm

    from megafp8.data import build_loader
    from megafp8.training.step import run_stage

    loader = build_loader(
        dataset,
        masks,
        seq_length=trained.config.data.seq_length,
        micro_batch_size=micro_batch_size,
        drop_last=False,
    )
    count = min(len(dataset), max_samples or len(dataset))
    loss, valid = 0.0, 0.0
    frequencies = torch.zeros(trained.config.model.unpadded_vocab_size, dtype=torch.float64)
    with torch.no_grad(), tqdm(total=count, unit="sample", disable=not sys.stderr.isatty(), leave=False) as bar:
        for start in range(0, count, micro_batch_size):
            batch = next(loader)
            batch.loss_mask[count - start :] = 0
            counted = batch.labels[batch.loss_mask > 0]
            frequencies += torch.bincount(counted, minlength=len(frequencies))
            loss += run_stage(trained.model, batch.to(trained.device), trained.step).item()
            valid += batch.loss_mask.sum().item()
            bar.update(min(micro_batch_size, count - start))
    if not valid:
        raise ValueError("no token to predict: the data set holds less than two tokens, or its masks hide them all")
    share = frequencies[frequencies > 0] / frequencies.sum()
    mean = loss / valid
    return {
        "loss": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "tokens": int(valid),
        "unigram_entropy": float(-(share * share.log()).sum()),
    }


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        from megafp8.training.build import pick_device
        from megafp8.training.inference import load_trained

        device = pick_device(args.device)
        trained = load_trained(args.load, device, step=args.ckpt_step, tokenizer_model=args.tokenizer_model)
        sets, masks = open_sets(args, trained)
        results = {
            name: evaluate_set(trained, dataset, masks, args.micro_batch_size, args.max_samples)
            for name, dataset in sets.items()
        }
    except ValueError as error:
        print(f"evaluate.py: error: {error}", file=sys.stderr)
        return 2
    for name, r in results.items():
        print(
            f"{name}: loss {r['loss']:.4f} | perplexity {r['perplexity']:.2f} | {r['tokens']} tokens | unigram entropy "
            f"{r['unigram_entropy']:.4f} (loss is {r['loss'] / r['unigram_entropy']:.3f} of it)"
        )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
