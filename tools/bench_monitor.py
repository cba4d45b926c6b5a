#!/usr/bin/env python3
"""What the monitor costs: stretches of training in which it looks at an iteration against others.

    tools/bench_monitor.py --output runs/bench_monitor
    tools/bench_monitor.py --output runs/bench_monitor --size tiny --device cpu      whether it works; no figure counts

The model is one layer as in Llama-3-8B. Times are those between log lines, of STRETCH iterations each: in between the
host runs ahead of the GPU, as in a training, so that a look's wait for the device counts. A look in the middle of a
stretch is what is timed; stretches that begin or end with one say nothing, since part of it falls into the neighbour.

Prints for each recipe the time of an iteration, what a look adds, and whether looking at every 100th iteration costs
less than 1% of the time. Exit code 0 if so, 1 if not; on the CPU always 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

FLAGS = (
    "--num-layers 1 --group-query-attention --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --lr 1e-4 --lr-warmup-iters 0 --eval-iters 0 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0"
)
SIZES = {
    "llama3-8b": "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8 "
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 2 --vocab-size 4096 "
    "--num-workers 2",
    "tiny": "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 2 --vocab-size 64 --num-workers 0",
}
STRETCH, EVERY = 10, 25  # looks at 25, 75, 125 ... are in the middle of a stretch
ITERATIONS = {"llama3-8b": 230, "tiny": 40}
WARM_UP = {"llama3-8b": 30, "tiny": 0}  # iterations in which kernels are compiled
RECIPES = {
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
}
LIMIT = 0.01


def stretches(lines: list[dict], warm_up: int) -> tuple[list[float], list[float]]:
    """Milliseconds an iteration of stretches with a look in their middle, and of those without.

    lines: of metrics.jsonl, one an iteration; `elapsed_ms` is the mean of a stretch in each of its lines.
    """
    looked, plain = [], []
    for line in lines:
        last = line["iteration"]
        if last % STRETCH or last <= warm_up:
            continue
        looks = [i for i in range(last - STRETCH, last + 1) if i % EVERY == 0]  # the one before it counts, too
        if not looks:
            plain.append(line["elapsed_ms"])
        elif looks[0] not in (last - STRETCH, last):
            looked.append(line["elapsed_ms"])
    return looked, plain


def cost(lines: list[dict], warm_up: int) -> dict[str, float | list[float]]:
    """iteration_ms, look_ms (what one adds), and the share of time that looking at every 100th iteration takes; and of
    either kind of stretch the quickest and the slowest, so that noise shows."""
    looked, plain = stretches(lines, warm_up)
    iteration, look = median(plain), (median(looked) - median(plain)) * STRETCH
    spread = {"looked_ms": [min(looked), max(looked)], "plain_ms": [min(plain), max(plain)]}
    return {"iteration_ms": iteration, "look_ms": look, "share": look / iteration / 100} | spread


def verdict(name: str, of: dict) -> str:
    iteration, look, share = (of[key] for key in ("iteration_ms", "look_ms", "share"))
    costs = f"{iteration:.1f} ms an iteration, a look adds {look:.1f} ms: every 100th costs {share:.2%} of the time"
    return f"{name}: {costs}, {'below' if share < LIMIT else 'NOT below'} {LIMIT:.0%}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory of the runs' logs")
    parser.add_argument("--size", choices=SIZES, default="llama3-8b", help="of the model (default: llama3-8b)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="(default: cuda)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by recipe")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import pretrain_gpt
    from megafp8.config.publish import publish

    found = {}
    for name, recipe in RECIPES.items():
        directory = args.output / name
        for file in ("metrics.jsonl", "fp8_monitor.jsonl"):
            (directory / file).unlink(missing_ok=True)
        words = [*FLAGS.split(), *SIZES[args.size].split(), *recipe.split(), "--device", args.device]
        words += ["--train-iters", str(ITERATIONS[args.size]), "--log-interval", str(STRETCH)]
        words += ["--fp8-monitor-interval", str(EVERY), "--log-dir", str(directory)]
        if code := pretrain_gpt.main(words):
            return code
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        found[name] = cost(lines, WARM_UP[args.size]) | {"limit": LIMIT}
        print(verdict(name, found[name]), flush=True)
        if args.json:
            publish(args.json, json.dumps(found, indent=1) + "\n")
    if args.device == "cpu":
        print("on the CPU no figure counts: it works, which is all that was asked")
        return 0
    return int(any(of["share"] >= LIMIT for of in found.values()))


if __name__ == "__main__":
    sys.exit(main())
