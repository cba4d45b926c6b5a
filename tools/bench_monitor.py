#!/usr/bin/env python3
"""What the monitor costs on this GPU: iterations it looks at against the others, of one layer as in Llama-3-8B.

    tools/bench_monitor.py --output runs/bench_monitor

Prints both medians, and what looking at every 100th iteration adds to the time.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

FLAGS = (
    "--num-layers 1 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 2 "
    "--global-batch-size 2 --lr 1e-4 --lr-warmup-iters 0 --eval-iters 0 --bf16 --mock-data --tokenizer-type "
    "NullTokenizer --vocab-size 4096 --log-interval 1 --attention-dropout 0 --hidden-dropout 0 --train-iters 48"
)
EVERY, WARM_UP = 6, 12
RECIPES = {
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory of the runs' logs")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import pretrain_gpt

    for name, recipe in RECIPES.items():
        directory = args.output / name
        (directory / "metrics.jsonl").unlink(missing_ok=True)
        words = [*FLAGS.split(), *recipe.split(), "--fp8-monitor-interval", str(EVERY), "--log-dir", str(directory)]
        if code := pretrain_gpt.main(words):
            return code
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
        looked, plain = (
            median(line["elapsed_ms"] for line in lines if (line["iteration"] % EVERY == 0) == watched)
            for watched in (True, False)
        )
        cost = (looked - plain) / plain / 100
        print(f"{name}: {plain:.1f} ms, looked at {looked:.1f} ms: every 100th costs {cost:.2%} of the time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
