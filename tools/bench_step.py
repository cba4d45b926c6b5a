"""The whole training step, by recipe: tokens/s, TFLOPS, peak memory, host time, and where the time goes by kernel.

Two scopes: `layers`, forward and backward of the transformer layers alone; `step`, whole steps of the training loop,
with data, loss, gradient norm and optimizer. Recipes and BF16 take turns in each round; figures are medians. BF16 is
the same model under torch.compile or as it is, whichever is faster; beside it stands a plain nn.Module, compiled.
Conversions of formats are checked against the ledger (docs/conversions.md).

    python tools/bench_step.py                                          # Llama-3-8B, 6 layers, 2 x 4096 tokens
    python tools/bench_step.py --preset deepseek-v3 --recipes bf16 blockwise --output step.json --png step.png
    python tools/bench_step.py --preset tiny --device cpu --no-compile --rounds 2
    python tools/bench_step.py --preset llama3-8b --ledger blockwise    # the ledger alone
    python tools/bench_step.py --crossover crossover.json               # from which sizes on FP8 pays
    python tools/bench_step_all.py OUT                                  # all of it, in some minutes
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_crossover
import bench_timing
import torch
from bench_clocks import Clocks
from host_profile import host_profile
from kernel_names import unlisted
from step_report import draw, table, where_time_goes
from step_work import Compiled, Layers, Plain, Steps

from megafp8.config import Config, parse_args, with_vocab_size
from megafp8.config.tool_parser import ToolParser, check_least, check_output, split_flags
from megafp8.plan.conversions import conversions, markdown
from megafp8.plan.flops import training_flops_per_token
from megafp8.training.build import pick_device
from megafp8.training.throughput import GIB

LLAMA = "--group-query-attention --num-query-groups 8 --rotary-base 500000 --vocab-size 128255"
PRESETS = {
    "llama3-8b": f"{LLAMA} --num-layers 6 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--seq-length 4096 --micro-batch-size 2",
    "llama3-70b": f"{LLAMA} --num-layers 1 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    "--seq-length 4096 --micro-batch-size 2",
    "qwen3-30b-a3b": "--num-layers 4 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --num-experts 128 "
    "--moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
    "--seq-length 4096 --micro-batch-size 8 --vocab-size 151935",
    # The experts of one of 32 ranks, and as many rows as reach them: each token goes to all eight.
    "deepseek-v3": "--num-layers 2 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--multi-latent-attention --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 8 --moe-layer-freq [0]*1+[1]*1 --moe-ffn-hidden-size 2048 "
    "--moe-router-topk 8 --moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid "
    "--seq-length 4096 --micro-batch-size 1 --vocab-size 32767",
    "tiny": "--num-layers 1 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 32 --micro-batch-size 2 --vocab-size 255",
    "tiny-moe": "--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-experts 4 "
    "--moe-ffn-hidden-size 128 --moe-router-topk 2 --seq-length 32 --micro-batch-size 2 --vocab-size 255",
}
COMMON = (
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --untie-embeddings-and-output-weights --bf16 --lr 1e-4 --train-iters 10000 --mock-data "
    "--tokenizer-type NullTokenizer --eval-iters 0"
)
PRIMARY = "--use-distributed-optimizer --fp8-param-gather"
RECIPES = {
    "bf16": "",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "blockwise, FP8 weights": f"--fp8-format e4m3 --fp8-recipe blockwise {PRIMARY}",
    "tensorwise, FP8 weights": f"--fp8-format hybrid --fp8-recipe tensorwise {PRIMARY}",
}
SHOWN = ["bf16", "blockwise", "tensorwise"]
HOST_CALLS = 5
BASE, PLAIN = "bf16", "plain nn.Module, compiled"


@dataclass(frozen=True)
class Size:
    """microbatches: of a step. seq_length: None for the preset's; as many sequences as make up the preset's tokens."""

    microbatches: int = 1
    seq_length: int | None = None

    @property
    def label(self) -> str:
        length = "" if self.seq_length is None else f", sequences of {self.seq_length}"
        return length + ("" if self.microbatches == 1 else f", {self.microbatches} microbatches")


def config_of(args: argparse.Namespace, recipe: str, size: Size = Size()) -> Config:
    """The configuration of a recipe; raises ValueError for flags that don't go together."""
    config = _config(args, recipe, "")
    if size == Size():
        return config
    samples, length = config.train.micro_batch_size, size.seq_length or config.data.seq_length
    if size.seq_length is not None:
        samples = max(1, samples * config.data.seq_length // length)
    shape = f"--seq-length {length} --micro-batch-size {samples} --global-batch-size {size.microbatches * samples}"
    return _config(args, recipe, shape)


def _config(args: argparse.Namespace, recipe: str, shape: str) -> Config:
    own = (PRESETS[args.preset], COMMON, f"--device {args.device}", RECIPES[recipe])
    given = split_flags(args.flags, "--flags")
    config = parse_args([*shlex.split(" ".join(own)), *given, *shape.split()], env={})
    return with_vocab_size(config, config.data.vocab_size + 1)


@dataclass
class Candidate:
    """run: what is timed; config: what it does. build_s, first_s: to build it, and to its first call's end."""

    run: Callable[[], None]
    config: Config
    device: torch.device
    build_s: float
    first_s: float = 0.0
    peak_gib: float | None = None

    @staticmethod
    def of(make: Callable[[], Callable[[], None]], config: Config, device: torch.device, warmup: int) -> Candidate:
        """Built and warmed up. Its peak counts from what was allocated before: others may be there already."""
        cuda = device.type == "cuda"
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        held, start = torch.cuda.memory_allocated(device) if cuda else 0, time.perf_counter()
        run = make()
        one = Candidate(run, config, device, time.perf_counter() - start)
        for number in range(warmup):
            run()
            if not number:
                bench_timing.wait(device)
                one.first_s = time.perf_counter() - start
        bench_timing.wait(device)
        one.peak_gib = (torch.cuda.max_memory_allocated(device) - held) / GIB if cuda else None
        return one

    def host_ms(self) -> float:
        """Time in which the host queues a call, with nothing queued before that could hold it up; median of some."""
        times = []
        for _ in range(HOST_CALLS):
            bench_timing.wait(self.device)
            start = time.perf_counter()
            self.run()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)

    def syncs(self) -> list[str] | None:
        """Where a call waits for the device, "file:line" each time."""
        if self.device.type != "cuda":
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # PyTorch's note that the mode is a prototype is no wait.
        waits = [warning for warning in caught if "synchronizing CUDA operation" in str(warning.message)]
        return [f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits]

    def record(self, ms: float, base_ms: float, tokens: int, flops: float) -> dict[str, Any]:
        return {
            "ms": ms, "tokens": tokens, "tokens_per_second": 1e3 * tokens / ms, "tflops": tokens * flops / ms / 1e9,
            "peak_gib": self.peak_gib, "ratio": base_ms / ms, "host_ms": self.host_ms(), "syncs": self.syncs(),
            "build_s": self.build_s, "first_step_s": self.first_s,
        }  # fmt: skip

    def looked_into(self, calls: list[bench_timing.Call], microbatches: int = 1) -> dict[str, Any]:
        """Where the time of its calls goes, and what the ledger lacks of the last one."""
        if not calls:
            return {}
        more = where_time_goes(calls)
        if self.device.type == "cuda":
            launches = ((kernel.name, kernel.ms) for kernel in calls[-1].kernels)
            more["unlisted"] = asdict(unlisted(launches, conversions(self.config), microbatches))
        return more


@dataclass
class Measured:
    """Of candidates that took turns: median milliseconds, kernels of some rounds, and the clocks meanwhile."""

    ms: dict[str, float]
    calls: dict[str, list[bench_timing.Call]]
    clocks: dict[str, Any] | None
    host_rows: int

    @staticmethod
    def of(candidates: dict[str, Candidate], args: argparse.Namespace, device: torch.device) -> Measured:
        runs = {name: one.run for name, one in candidates.items()}
        with Clocks(device) as clocks:
            times = bench_timing.in_turn(runs, device, args.rounds)
        calls = bench_timing.calls_in_turn(runs, device, args.profiled) if args.profiled else {}
        medians = {name: statistics.median(ms) for name, ms in times.items()}
        return Measured(medians, calls, clocks.found, args.host_profile)

    def record(self, name: str, one: Candidate, base_ms: float, size: Size, flops: float) -> dict[str, Any]:
        tokens = size.microbatches * one.config.train.micro_batch_size * one.config.data.seq_length
        record = one.record(self.ms[name], base_ms, tokens, flops)
        record |= one.looked_into(self.calls.get(name, []), size.microbatches) | {"clocks": self.clocks}
        return record | ({"host_profile": host_profile(one.run, self.host_rows)} if self.host_rows else {})


def layer_flops(config: Config) -> float:
    """Forward and backward of the layers, FLOPs a token."""
    m = config.model
    return training_flops_per_token(config) - 6 * m.hidden_size * m.padded_vocab_size


def measure_layers(args: argparse.Namespace, size: Size, device: torch.device) -> dict[str, dict[str, Any]]:
    """All recipes at once, in turn."""
    configs = {recipe: config_of(args, recipe, size) for recipe in args.recipes if "FP8 weights" not in recipe}
    candidates = {}
    for recipe, config in configs.items():
        make = lambda config=config: Layers(config, device, args.gradients)  # noqa: E731
        candidates[recipe] = Candidate.of(make, config, device, args.warmup)
    base = configs[BASE]
    if args.compile:
        rivals = {f"{BASE}, compiled": lambda: Compiled(base, device, args.gradients), PLAIN: plain(base, device)}
        for name, make in rivals.items():
            try:
                candidates[name] = Candidate.of(make, base, device, args.warmup)
            except Exception as error:  # a benchmark goes on without a rival that can't be compiled
                traceback.print_exc()
                print(f"bench_step: goes on without {name}: {type(error).__name__}", file=sys.stderr)
    found = Measured.of(candidates, args, device)
    base_ms, flops = min(ms for name, ms in found.ms.items() if name.startswith(BASE)), layer_flops(base)
    return {name: found.record(name, one, base_ms, size, flops) for name, one in candidates.items()}


def plain(config: Config, device: torch.device) -> Callable[[], Plain]:
    def make() -> Plain:
        if config.model.num_experts or config.model.multi_latent_attention:
            raise ValueError("written for layers with grouped queries and SwiGLU only")
        return Plain(config, device)

    return make


def measure_steps(args: argparse.Namespace, size: Size, device: torch.device) -> dict[str, dict[str, Any]]:
    """BF16 stays, recipes come one after the other and take turns with it: two models and optimizers at a time."""
    configs = {recipe: config_of(args, recipe, size) for recipe in args.recipes}
    records: dict[str, dict[str, Any]] = {}

    def candidate(recipe: str) -> Candidate:
        return Candidate.of(lambda: Steps(configs[recipe], device), configs[recipe], device, args.warmup)

    base = candidate(BASE)
    flops = training_flops_per_token(base.config)
    for recipe in args.recipes:
        one = base if recipe == BASE else candidate(recipe)
        found = Measured.of({BASE: base, recipe: one}, args, device)
        records[recipe] = found.record(recipe, one, found.ms[BASE], size, flops)
        records[recipe] |= {"data_wait_ms": one.run.data_wait_ms, "losses": one.run.losses}
        del one, found
    return records


def arguments() -> ToolParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="llama3-8b", help="the model (default: %(default)s)")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=SHOWN,
                        help="bf16 is always among them (default: %(default)s)")  # fmt: skip
    parser.add_argument("--scopes", nargs="+", choices=("layers", "step"), default=["layers", "step"])
    parser.add_argument("--gradients", choices=("fp32", "bf16"), default="fp32", help="of weights, in the scope "
                        "layers: added to FP32 buffers, or left in BF16 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--flags", default="", help="training flags for all recipes, in one string")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1], help="of a step: one scope for each "
                        "number (default: 1)")  # fmt: skip
    parser.add_argument("--seq-lengths", type=int, nargs="+", default=[None], metavar="LENGTH", help="a scope for "
                        "each, in place of the preset's length, with as many tokens as the preset")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each recipe (default: %(default)s)")
    parser.add_argument("--profiled", type=int, default=3, help="rounds after those in which kernels are listed, 0 for "
                        "none (default: %(default)s)")  # fmt: skip
    parser.add_argument("--host-profile", type=int, default=0, metavar="ROWS", help="print so many functions in which "
                        "the host spends most of its time in a call")  # fmt: skip
    parser.add_argument("--warmup", type=int, default=3, help="calls before (default: %(default)s)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out what is compiled")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--png", type=Path, help="picture of where the time goes")
    parser.add_argument("--ledger", choices=RECIPES, help="print the recipe's ledger of conversions, measure nothing")
    bench_crossover.add_arguments(parser)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ValueError for numbers and files that can't be, before anything is built."""
    check_least(args, 1, "rounds", "warmup", "microbatches", "seq_lengths", "crossover_hidden", "crossover_tokens")
    check_least(args, 0, "profiled", "host_profile")
    for flag, path in (("--output", args.output), ("--png", args.png), ("--crossover", args.crossover)):
        check_output(path, flag)
    bench_crossover.check_table(args.crossover)
    if args.crossover and args.recipes is not SHOWN:
        measured = " and ".join(bench_crossover.RECIPES)
        raise ValueError(f"--recipes {' '.join(args.recipes)} with --crossover: it measures {measured}; leave it out")


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    sizes = {
        "layers": [Size(1, length) for length in args.seq_lengths],
        "step": [Size(count, length) for count in args.microbatches for length in args.seq_lengths],
    }
    try:
        check_arguments(args)
        args.recipes = [BASE, *(recipe for recipe in args.recipes if recipe != BASE)]
        device = pick_device(args.device)
        asked, args.device = args.device, device.type
        if args.ledger:
            print("\n".join(markdown(conversions(config_of(args, args.ledger)))))
            return 0
        if args.crossover:
            return bench_crossover.run(args, device)
        if (asked, args.device) == ("auto", "cpu") and not args.preset.startswith("tiny"):
            raise ValueError(f"--preset {args.preset}: there is no GPU; give --preset tiny, or --device cpu for hours")
        for recipe in args.recipes:
            for size in {size for scope in args.scopes for size in sizes[scope]}:
                config_of(args, recipe, size)
    except ValueError as error:
        print(f"bench_step.py: error: {error}", file=sys.stderr)
        return 2
    results = {
        "preset": args.preset, "gradients": args.gradients, "flags": args.flags, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "scopes": {},
    }  # fmt: skip
    for scope, measure in (("layers", measure_layers), ("step", measure_steps)):
        for size in sizes[scope] if scope in args.scopes else ():
            results["scopes"][scope + size.label] = measure(args, size, device)
    print("\n".join(table(results)))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))
    if args.png:
        draw(results, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
