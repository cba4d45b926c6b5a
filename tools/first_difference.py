#!/usr/bin/env python3
"""Finds the first tensor in which two runs, or two layouts of one run, differ.

    tools/first_difference.py record one.json --steps 2 -- <flags of pretrain_gpt.py>
    torchrun --nproc-per-node 4 tools/first_difference.py record four.json --steps 2 -- <the same> \\
        --tensor-model-parallel-size 2 --sequence-parallel
    tools/first_difference.py compare one.json four.json

`record` trains for some steps and writes a norm and a hash of every layer's output, its gradient, every parameter's
gradient and new weight, in the order in which they come about. `compare` names the first one whose bits differ, and the
first whose norm is off by more than rounding. Exit codes: 0 no norm is off, 1 one is, 2 a mistake.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from megafp8.config.tool_parser import ToolParser

KEYS = ("step", "kind", "name")


def record(output: Path, steps: int, flags: list[str]) -> None:
    """Trains as `flags` say, for `steps` steps, and writes the trace; nothing is saved or evaluated."""
    from megafp8.config import parse_args
    from megafp8.parallel import build_parallel, close_parallel
    from megafp8.training.build import build_parts, pick_device
    from megafp8.training.trace import tracing
    from megafp8.training.trainer import Trainer

    config = parse_args(flags).replace(save=None, eval_iters=0, log_dir=None, tensorboard_dir=None, wandb_project="")
    if config.train.recompute_granularity is not None:
        raise ValueError("--recompute-granularity: activations would be traced twice; leave it out")
    device = pick_device(config.train.device)
    parallel = build_parallel(config, device)
    parts = build_parts(config, parallel, device)
    trainer = Trainer(parts)
    trainer.total_iterations = trainer.progress.iteration + steps
    with tracing(parts.model, parts.optimizer, parallel) as trace:
        trainer.run()
    if parallel.is_first:
        output.write_text("".join(json.dumps(entry.to_json()) + "\n" for entry in trace.entries))
    close_parallel(parallel)


def read(path: Path) -> list[dict]:
    """The entries of a trace. Raises ValueError when the file isn't one."""
    try:
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        if not entries or any(not {"norm", "hash", *KEYS} <= set(entry) for entry in entries):
            raise ValueError
    except (OSError, ValueError, TypeError):
        raise ValueError(f"{path}: no trace there; write one with the record command") from None
    return entries


def is_off(a: float, b: float, tolerance: float) -> bool:
    """Whether two norms differ by more than `tolerance` of the larger; NaN equals NaN."""
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or math.isinf(b):
        return str(a) != str(b)
    return abs(a - b) > tolerance * max(abs(a), abs(b))


def label(entry: dict) -> str:
    return f"step {entry['step']}: {entry['kind']} of {entry['name']}".replace("activation of", "output of")


def compare(first: list[dict], second: list[dict], tolerance: float) -> tuple[dict | None, dict | None, list[str]]:
    """(first entry whose bits differ, first whose norm is off, labels of entries that only one trace has)."""
    others = {tuple(entry[key] for key in KEYS): entry for entry in second}
    mine = {tuple(entry[key] for key in KEYS) for entry in first}
    pairs = [(entry, others.get(tuple(entry[key] for key in KEYS))) for entry in first]
    alone = [label(a) for a, b in pairs if b is None]
    alone += [label(entry) for key, entry in others.items() if key not in mine]
    pairs = [(a, b) for a, b in pairs if b is not None]
    bits = next((a | {"other": b} for a, b in pairs if a["hash"] != b["hash"]), None)
    norms = next((a | {"other": b} for a, b in pairs if is_off(a["norm"], b["norm"], tolerance)), None)
    return bits, norms, alone


def report(bits: dict | None, norms: dict | None, alone: list[str], tolerance: float) -> int:
    for name in alone[:5]:
        print(f"only in one of the traces: {name}")
    if bits is None:
        print("every tensor has the same bits in both")
        return 1 if alone else 0
    print(f"first with other bits:  {label(bits)}")
    if norms is None:
        print(f"no norm is off by more than {tolerance:g} of it: this is rounding")
        return 1 if alone else 0
    other = norms["other"]["norm"]
    change = abs(norms["norm"] - other) / max(abs(norms["norm"]), abs(other), 1e-300)
    print(f"first with another norm: {label(norms)}")
    print(f"    {norms['norm']:.9e} against {other:.9e}, {change:.1e} of it")
    return 1


def main(argv: list[str] | None = None) -> int:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="train some steps and write a trace")
    one.add_argument("output", type=Path, help="file to write")
    one.add_argument("--steps", type=int, default=1, help="steps to trace (default 1)")
    two = commands.add_parser("compare", help="compare two traces")
    two.add_argument("first", type=Path)
    two.add_argument("second", type=Path)
    two.add_argument("--tolerance", type=float, default=1e-5, help="of a norm that is off (default 1e-5: FP32)")
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])  # what follows is for pretrain_gpt.py
    try:
        if args.command == "record":
            record(args.output, args.steps, argv[end + 1 :])
            return 0
        return report(*compare(read(args.first), read(args.second), args.tolerance), args.tolerance)
    except ValueError as error:
        print(f"first_difference.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
