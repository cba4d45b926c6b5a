#!/usr/bin/env python3
"""Converts checkpoints from and to Hugging Face models, and looks into them.

    tools/convert_checkpoint.py from-hf --hf Llama-3.2-1B --save runs/llama
    tools/convert_checkpoint.py to-hf --load runs/llama --hf out/llama [--fp8]
    tools/convert_checkpoint.py verify --load runs/llama --hf Llama-3.2-1B      logits against transformers
    tools/convert_checkpoint.py from-llama2c --bin stories260K.bin --tokenizer-model tok512.model --save runs/stories
    tools/convert_checkpoint.py info runs/llama            diff runs/a runs/b
    tools/convert_checkpoint.py prune --load runs/llama --save runs/weights
    tools/convert_checkpoint.py average --load runs/llama --steps 800 900 1000 --save runs/mean

Tensors are read and written one at a time. Outputs are new directories, complete or not there. Exit status: 0, 1 when
`diff` or `verify` finds a difference, 2 for a mistake. See docs/conversion.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megafp8.config.tool_parser import ToolParser
from megafp8.config.validate import require_checkpoints

TOKENIZER_FIELDS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    sub = command("from-hf", from_hf, "a Hugging Face model becomes a checkpoint")
    sub.add_argument("--hf", required=True, type=Path, metavar="DIR", help="config.json and safetensors files")
    add_import_arguments(sub)

    sub = command("from-llama2c", from_llama2c, "a .bin file of llama2.c becomes a checkpoint")
    sub.add_argument("--bin", required=True, type=Path, metavar="FILE")
    add_import_arguments(sub)

    sub = command("to-hf", to_hf, "a checkpoint becomes a Hugging Face model")
    add_load(sub)
    sub.add_argument("--hf", required=True, type=Path, metavar="DIR", help="new directory")
    sub.add_argument("--family", metavar="NAME", help="model_type (default: the original's, or the first that fits)")
    sub.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto", help="default: as in the checkpoint")
    sub.add_argument("--fp8", action="store_true", help="linears in block-FP8 (DeepSeek's weight_scale_inv)")
    sub.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="model whose config.json and tokenizer files these are (default: what from-hf kept)",
    )
    sub.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file, e.g. 500MB (default: 5GB)")

    sub = command("verify", verify, "logits of a checkpoint against those that transformers computes")
    add_load(sub)
    sub.add_argument("--hf", required=True, type=Path, metavar="DIR")
    sub.add_argument("--num-tokens", type=int, default=64, metavar="N", help="of two random sequences (default: 64)")
    sub.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        metavar="X",
        help="largest difference of a logit, both in FP32 (default: 1e-4)",
    )

    sub = command("info", info, "what a checkpoint or a Hugging Face model holds")
    sub.add_argument("path", type=Path, metavar="DIR")
    sub.add_argument("--ckpt-step", type=int, metavar="N")
    sub.add_argument("--tensors", action="store_true", help="list every tensor")

    sub = command("diff", diff, "how two checkpoints, or two Hugging Face models, differ")
    sub.add_argument("paths", type=Path, nargs=2, metavar="DIR")
    sub.add_argument("--weights", action="store_true", help="compare weights only, not optimizer and random states")

    sub = command("prune", prune, "a checkpoint without optimizer and random states")
    add_load(sub)
    sub.add_argument("--save", required=True, type=Path, metavar="DIR", help="new directory of checkpoints")

    sub = command("average", average, "the mean of several checkpoints' weights")
    sub.add_argument(
        "--load", required=True, nargs="+", type=Path, metavar="DIR", help="directories of checkpoints, or checkpoints"
    )
    sub.add_argument("--steps", nargs="+", type=int, metavar="N", help="iterations of the one directory in --load")
    sub.add_argument("--save", required=True, type=Path, metavar="DIR", help="new directory of checkpoints")
    return parser


def add_load(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--load", required=True, type=Path, metavar="DIR", help="directory of checkpoints, or one of them")
    sub.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint (default: the latest)")


def add_import_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--save", required=True, type=Path, metavar="DIR", help="new directory of checkpoints")
    sub.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="precision to train in: default BF16 where the files are BF16 or FP8, else FP32",
    )
    sub.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sample for tools (default: the model's)")
    sub.add_argument("--tokenizer-type", metavar="NAME", help="default: what lies beside the model")
    sub.add_argument("--tokenizer-model", metavar="PATH")
    sub.add_argument("--vocab-file", metavar="FILE")
    sub.add_argument("--merge-file", metavar="FILE")


def import_options(args: argparse.Namespace):
    from megafp8.training.hf_import import ImportOptions

    given: dict[str, Any] = {name: getattr(args, name) for name in TOKENIZER_FIELDS if getattr(args, name)}
    if given and "tokenizer_type" not in given:
        by_suffix = "SentencePieceTokenizer" if str(args.tokenizer_model).endswith(".model") else "HuggingFaceTokenizer"
        given["tokenizer_type"] = by_suffix if args.tokenizer_model else "GPT2BPETokenizer"
    paths = TOKENIZER_FIELDS[1:]
    given |= {name: str(Path(given[name]).absolute()) for name in paths if name in given and Path(given[name]).exists()}
    return ImportOptions(args.dtype, args.seq_length, given)


def from_hf(args: argparse.Namespace) -> int:
    from megafp8.training.hf_import import ARGS_FILE, import_hf

    say(import_hf(args.hf, args.save, import_options(args)))
    print(f"{args.save}: train on with pretrain_gpt.py --config {args.save / ARGS_FILE} --load {args.save} --finetune")
    return 0


def from_llama2c(args: argparse.Namespace) -> int:
    from megafp8.training.hf_import import ARGS_FILE, import_llama2c

    say(import_llama2c(args.bin, args.save, import_options(args)))
    print(f"{args.save}: train on with pretrain_gpt.py --config {args.save / ARGS_FILE} --load {args.save} --finetune")
    return 0


def to_hf(args: argparse.Namespace) -> int:
    from megafp8.checkpoint.hf.companions import KEPT
    from megafp8.training.hf_export import ExportOptions, export_hf

    found = checkpoint_in(args.load, args.ckpt_step)
    kept = next((d / KEPT for d in (args.load, args.load.parent) if (d / KEPT / "config.json").is_file()), None)
    options = ExportOptions(args.family, args.dtype, args.fp8, args.like or kept, size_of(args.max_shard_size))
    say(export_hf(found, args.hf, options))
    print(f"{args.hf}: written")
    return 0


def verify(args: argparse.Namespace) -> int:
    from megafp8.training.hf_verify import largest_difference

    if args.num_tokens < 1:
        raise ValueError(f"--num-tokens {args.num_tokens}: give 1 or more")
    found = checkpoint_in(args.load, args.ckpt_step)
    difference = largest_difference(found, args.hf, args.num_tokens)
    good = difference <= args.tolerance
    print(f"largest difference of a logit: {difference:.3e} ({'within' if good else 'ABOVE'} {args.tolerance:g})")
    return 0 if good else 1


def info(args: argparse.Namespace) -> int:
    from megafp8.checkpoint.hf.compare import open_any

    with open_any(args.path, args.ckpt_step) as opened:
        print(opened.title)
        for group, (count, elements, size) in sorted(opened.groups.items()):
            print(f"  {group}: {count} tensors, {elements:,} elements, {size / 10**6:,.1f} MB")
        for name, tensor in opened.tensors.items() if args.tensors else ():
            print(f"  {name}  {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
    return 0


def diff(args: argparse.Namespace) -> int:
    from megafp8.checkpoint.hf.compare import Opened, differences_of, open_any
    from megafp8.checkpoint.hf.write import progress

    def part(opened: Opened) -> Opened:
        kept = {n: t for n, t in opened.tensors.items() if not args.weights or "/" not in n or n.startswith("model/")}
        return Opened(opened.title, kept, opened.read)

    with open_any(args.paths[0]) as first, open_any(args.paths[1]) as second:
        a, b = part(first), part(second)
        with progress(a.tensors, "comparing") as count:
            lines = differences_of(a, b, count)
    print("\n".join(lines or [f"{len(a.tensors)} tensors, all the same"]))
    return 1 if lines else 0


def prune(args: argparse.Namespace) -> int:
    from megafp8.checkpoint.hf import rewrite

    say(rewrite.prune(checkpoint_in(args.load, args.ckpt_step), args.save))
    return 0


def average(args: argparse.Namespace) -> int:
    from megafp8.checkpoint.hf import rewrite

    if args.steps and len(args.load) > 1:
        raise ValueError("--steps: of one directory in --load; give one, or leave --steps out")
    pairs = [(args.load[0], step) for step in args.steps] if args.steps else [(path, None) for path in args.load]
    say(rewrite.average([checkpoint_in(path, step) for path, step in pairs], args.save))
    return 0


def checkpoint_in(load: Path, step: int | None):
    """The checkpoint that --load and --ckpt-step name. Raises ValueError when there is none."""
    from megafp8.checkpoint import find_checkpoint
    from megafp8.checkpoint.directory import checkpoints_below, saved_iterations
    from megafp8.checkpoint.index import INDEX_FILE

    if not (load / INDEX_FILE).is_file() and not saved_iterations(load):
        below = checkpoints_below(load)
        raise ValueError(f"--load {load}: no checkpoint there{f'; there is {below}' if below else ''}")
    return find_checkpoint(load, step)


def size_of(text: str) -> int:
    """Bytes of a size such as 500MB."""
    for suffix, unit in SIZES.items():
        number = text.upper().removesuffix(suffix)
        if number != text.upper() and number.isdecimal() and int(number) > 0:
            return int(number) * unit
    raise ValueError(f"--max-shard-size {text}: give a number and {', '.join(SIZES)}, e.g. 5GB")


def say(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}")


def check_directories(args: argparse.Namespace) -> None:
    """Raises ValueError for a directory of the other kind, before torch takes its seconds to load."""
    if args.command in ("to-hf", "verify"):
        require_checkpoints(str(args.load))
    if args.command == "verify" and not (args.hf / "config.json").is_file():
        raise ValueError(f"--hf {args.hf}: no Hugging Face model there; to-hf writes one")
    if args.command == "from-hf":
        if not args.hf.is_dir():
            raise ValueError(f"--hf {args.hf}: no such directory; give one that a model was downloaded to")
        if any(args.hf.glob("iter_*")) and not (args.hf / "config.json").exists():
            raise ValueError(
                f"--hf {args.hf}: a checkpoint, not a Hugging Face model; to-hf --load {args.hf} makes one"
            )


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        check_directories(args)
        return args.run(args)
    except ValueError as error:
        print(f"convert_checkpoint.py: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"convert_checkpoint.py: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
