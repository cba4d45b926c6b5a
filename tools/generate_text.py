#!/usr/bin/env python3
"""Samples text from a checkpoint.

tools/generate_text.py --load runs/quickstart/checkpoints --prompt "ROMEO:" --num-tokens 150 --temperature 0.8
tools/generate_text.py --load runs/quickstart/checkpoints --prompt "ROMEO:" --temperature 0        greedy
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megafp8.config.tool_parser import ToolParser
from megafp8.config.validate import require_checkpoints


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", required=True, metavar="DIR", help="directory of checkpoints, or one of them")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration of the checkpoint (default: the latest)")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue (default: none, starts afresh)")
    parser.add_argument("--num-tokens", type=int, default=100, metavar="N", help="tokens to write (default: 100)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0 is greedy (default: 1)")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="sample from the N likeliest; 0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="sample from the likeliest X of the mass")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: 0)")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="where the tokenizer lies now, if it has moved")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the text there too")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for a value that can't be used."""
    if args.num_tokens < 1:
        raise ValueError(f"--num-tokens {args.num_tokens}: give 1 or more")
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature {args.temperature}: give 0 (greedy) or more")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed}: give 0 or more, below 2^63")
    if args.top_k < 0:
        raise ValueError(f"--top-k {args.top_k}: give 0 (off) or more")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p}: give a number above 0, at most 1")


def prompt_ids(tokenizer, prompt: str) -> list[int]:
    """The prompt's ids; an empty prompt becomes the token that separates documents."""
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    start = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    if start is None:
        raise ValueError("--prompt: the tokenizer has no token to start a document with; give a prompt")
    return [start]


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        check(args)
        require_checkpoints(args.load)
        from megafp8.training.build import pick_device
        from megafp8.training.inference import generate, load_trained

        device = pick_device(args.device)
        trained = load_trained(args.load, device, step=args.ckpt_step, tokenizer_model=args.tokenizer_model)
        prompt = prompt_ids(trained.tokenizer, args.prompt)
    except ValueError as error:
        print(f"generate_text.py: error: {error}", file=sys.stderr)
        return 2
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    ids = list(generate(trained, prompt, args.num_tokens, **options))
    # Prompt and continuation are decoded together: a tokenizer may join them with or without a space.
    text = trained.tokenizer.decode([*prompt, *ids])
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
