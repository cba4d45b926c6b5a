"""Every figure of docs/conversions.md and of whole steps on the GPU that is here, one run after the other.

    python tools/bench_step_all.py OUT                    tables, JSON and pictures into the directory OUT
    python tools/bench_step_all.py OUT --rehearse         one round each: compiles kernels, lists conversions
    python tools/bench_step_all.py OUT --only qwen3-30b-a3b crossover

In one process, since each would need seconds to start. A run that fails prints its traceback and doesn't stop the
others; where it leaves the GPU unusable, they go on in a new process.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from contextlib import redirect_stdout
from pathlib import Path

import bench_step
import torch

from megafp8.config.publish import writable_directory
from megafp8.config.tool_parser import ToolParser
from megafp8.training.build import pick_device

TRIO = ("bf16", "blockwise", "tensorwise")
LAYERS, STEP = ("--scopes", "layers", "--recipes"), ("--scopes", "step", "--recipes")
SMALL_MODEL = "--num-layers 2 --seq-length 2048 --micro-batch-size 1 --vocab-size 32767"
SHORT = ("--no-compile", "--rounds", "5")
RUNS = {
    "layers": (*LAYERS, *TRIO, "delayed", "--no-compile"),
    "deepseek-v3": (*LAYERS, *TRIO, "--preset", "deepseek-v3", *SHORT),
    "deepseek-v3-moe-layer": (*LAYERS, *TRIO, "--preset", "deepseek-v3", *SHORT,
                              "--flags", "--num-layers 1 --moe-layer-freq [1]"),
    "qwen3-30b-a3b": (*LAYERS, *TRIO, "--preset", "qwen3-30b-a3b", *SHORT),
    "step": (*STEP, *TRIO, "blockwise, FP8 weights", "tensorwise, FP8 weights", "--rounds", "5"),
    "llama3-70b": (*LAYERS, *TRIO, "--preset", "llama3-70b", *SHORT),
    "lengths": (*LAYERS, *TRIO, *SHORT, "--seq-lengths", "2048", "32768", "--flags", "--num-layers 3"),
    "crossover": ("--rounds", "3", "--crossover-hidden", "1024", "2048", "4096",
                  "--crossover-tokens", "2048", "8192", "32768"),
    "base": (*LAYERS, "bf16", "--flags", "--num-layers 3"),  # compiled, and beside a plain module
    "host": (*STEP, *TRIO[:2], "--microbatches", "16", "--rounds", "1", "--warmup", "2", "--profiled", "0",
             "--host-profile", "45", "--flags", SMALL_MODEL),
    "microbatches": (*STEP, *TRIO[:2], "--microbatches", "1", "4", "64", "--rounds", "2", "--warmup", "1",
                     "--profiled", "0", "--flags", SMALL_MODEL),
}  # fmt: skip
"""What is run, in the order of importance."""
PICTURES = ("layers", "step", "deepseek-v3", "qwen3-30b-a3b")


class Twice:
    """A stream that writes to two."""

    def __init__(self, *streams) -> None:
        self.streams = streams

    def write(self, text: str) -> None:
        for stream in self.streams:
            stream.write(text)

    def flush(self) -> None:
        for stream in self.streams:
            stream.flush()


def arguments_of(name: str, out: Path, *, rehearse: bool) -> list[str]:
    argv = list(RUNS[name])
    if name == "crossover":
        return [*argv, "--crossover", str(out / "crossover.json")]
    argv += ["--output", str(out / f"{name}.json")]
    if rehearse:  # the last of an option counts
        return [*argv, "--rounds", "1", "--warmup", "1", "--profiled", "1"]
    return [*argv, *(("--png", str(out / f"{name}.png")) if name in PICTURES else ())]


def run(name: str, out: Path, *, rehearse: bool) -> bool:
    """Whether it came to its end; its table is in OUT/NAME.txt."""
    start, argv = time.perf_counter(), arguments_of(name, out, rehearse=rehearse)
    print(f"== {name}: bench_step.py {' '.join(argv)}", flush=True)
    try:
        with (out / f"{name}.txt").open("w") as file, redirect_stdout(Twice(sys.stdout, file)):
            good = bench_step.main(argv) == 0
    except Exception:
        good = False
        traceback.print_exc(file=sys.stdout)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"== {name} {'took' if good else 'FAILED after'} {time.perf_counter() - start:.0f} s", flush=True)
    return good


def usable() -> bool:
    """Whether the GPU still does anything: after a fault in a kernel it refuses all in this process."""
    try:
        return not torch.cuda.is_available() or torch.ones(1, device="cuda").item() == 1
    except RuntimeError:
        return False


def main(argv: list[str] | None = None) -> int:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="these, in this order")
    parser.add_argument("--rehearse", action="store_true", help="one round each: figures are not to be quoted")
    args = parser.parse_args(argv)
    if not writable_directory(args.out):
        parser.error(f"OUT {args.out}: can't write there; give another directory")
    try:
        pick_device("cuda")
    except ValueError:
        parser.error("torch sees no CUDA GPU, which these models want; tools/bench_step.py --preset tiny runs anywhere")
    failed = 0
    for number, name in enumerate(args.only, 1):
        failed += not run(name, args.out, rehearse=args.rehearse)
        rest = args.only[number:]
        if rest and not usable():
            options = ["--only", *rest, *(["--rehearse"] if args.rehearse else [])]
            os.execv(sys.executable, [sys.executable, __file__, str(args.out), *options])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
