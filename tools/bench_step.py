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
    bash tools/bench_step_all.sh OUT                                     # all of it, in eight minutes
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import shlex
import statistics
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bench_crossover
import bench_timing
import torch
from bench_layer_memory import Gradients, PlainLayer, lay_side_by_side
from step_report import breakdown, draw, slowest, table
from torch import Tensor, nn

from megafp8.config import Config, parse_args, with_vocab_size
from megafp8.core.build import BuildContext
from megafp8.core.gpt import initialize
from megafp8.core.transformer.block import TransformerBlock
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.rope import inverse_frequencies, rotation
from megafp8.fp8 import DelayedScaling, policy
from megafp8.parallel import ParallelContext
from megafp8.params import InitialValues, ParamSpec, unpadded
from megafp8.plan.conversions import conversions, markdown, unknown
from megafp8.plan.flops import training_flops_per_token
from megafp8.step import StepContext
from megafp8.training import build as job
from megafp8.training.progress import read_records
from megafp8.training.throughput import GIB
from megafp8.training.trainer import Trainer

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
BASE, PLAIN = "bf16", "plain nn.Module, compiled"


def config_of(args: argparse.Namespace, recipe: str) -> Config:
    """The configuration of a recipe; raises ValueError for flags that don't go together."""
    batch = f"--device {args.device}"
    if args.microbatches > 1:
        one = config_of(argparse.Namespace(**{**vars(args), "microbatches": 1}), recipe)
        batch += f" --global-batch-size {args.microbatches * one.train.micro_batch_size}"
    config = parse_args(
        shlex.split(" ".join((PRESETS[args.preset], COMMON, batch, RECIPES[recipe], args.flags))), env={}
    )
    return with_vocab_size(config, config.data.vocab_size + 1)


def quick_values(device: torch.device) -> InitialValues:
    """Random initial values made on the device, the same for each recipe; the CPU's take minutes at these sizes."""

    def initial(spec: ParamSpec, seed: int) -> Tensor:
        value = torch.zeros(spec.local_shape, device=device)
        own, generator = unpadded(value, spec), torch.Generator(device).manual_seed(zlib.crc32(spec.name.encode()))
        own.fill_(1.0) if spec.init.kind == "ones" else own.normal_(std=0.02, generator=generator)
        return value

    return initial


class Layers:
    """Forward and backward of a configuration's layers; weight gradients in FP32 buffers, or BF16 in `.grad`."""

    def __init__(self, config: Config, device: torch.device, gradients: str) -> None:
        build = BuildContext.of(config, ParallelContext(), device, policy.from_config(config))
        self.config, batch, length = config, config.train.micro_batch_size, config.data.seq_length
        self.block = TransformerBlock(range(config.model.num_layers), build)
        initialize(self.block, 0, quick_values(device))
        self.x = torch.randn(batch * length, config.model.hidden_size, device=device).bfloat16().requires_grad_()
        self.dy = torch.randn_like(self.x)
        positions = torch.arange(length, device=device).repeat(batch)
        turn = rotation(positions, inverse_frequencies(config.model, device))
        self.scaling = DelayedScaling.of(self.block)
        sink = Gradients(self.block) if gradients == "fp32" else None
        lay_side_by_side(self.block, sink.buffers if sink is not None else {})
        self.arguments = Sequences(batch, length, turn), StepContext(grads=sink, scaling=self.scaling)
        self.leaves, self.forward = (self.x, *self.block.parameters()), self.block.__call__

    def compile(self) -> None:
        self.forward = torch.compile(self.block)

    def __call__(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None
        self.forward(self.x, *self.arguments).backward(self.dy)
        if self.scaling is not None:
            self.scaling.advance()


class Plain:
    """The same layers in plain PyTorch under torch.compile, BF16 gradients."""

    def __init__(self, config: Config, device: torch.device) -> None:
        count, batch, length = config.model.num_layers, config.train.micro_batch_size, config.data.seq_length
        self.layers = nn.ModuleList(torch.compile(PlainLayer(config, device)) for _ in range(count))
        self.x = torch.randn(batch, length, config.model.hidden_size, device=device).bfloat16().requires_grad_()
        self.dy = torch.randn_like(self.x)
        self.turn = rotation(torch.arange(length, device=device), inverse_frequencies(config.model, device))

    def __call__(self) -> None:
        for leaf in (self.x, *self.layers.parameters()):
            leaf.grad = None
        y = self.x
        for layer in self.layers:
            y = layer(y, self.turn)
        y.backward(self.dy)


class Steps:
    """Whole steps of the training loop on mock data. losses: of all steps so far."""

    def __init__(self, config: Config, device: torch.device) -> None:
        with quickly_initialized(device), redirect_stdout(io.StringIO()):
            self.trainer = Trainer(job.build_parts(config, ParallelContext(), device))
        self.batches, self.records = self.trainer._training_batches(), []

    def __call__(self) -> None:
        self.records += self.trainer._iteration(self.batches)

    @property
    def data_wait_ms(self) -> float:
        """Mean time of a step so far in which the loop waited for data."""
        return 1e3 * self.trainer._runner.times.waited / len(self.records)

    @property
    def losses(self) -> list[float]:
        return [line["lm_loss"] for line in read_records(self.records)]


@contextmanager
def quickly_initialized(device: torch.device) -> Iterator[None]:
    """Inside, weights and masters that are built start from `quick_values`."""
    originals, initial = (job.build_model, job.build_optimizer), quick_values(device)
    job.build_model, job.build_optimizer = (partial(original, initial=initial) for original in originals)
    try:
        yield
    finally:
        job.build_model, job.build_optimizer = originals


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
        """Time in which the host queues a call."""
        bench_timing.wait(self.device)
        start = time.perf_counter()
        self.run()
        return 1e3 * (time.perf_counter() - start)

    def syncs(self) -> int | None:
        """How often a call waits for the device."""
        if self.device.type != "cuda":
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in caught)

    def record(self, ms: float, base_ms: float | None, tokens: int, flops: float) -> dict[str, Any]:
        return {
            "ms": ms, "tokens_per_second": 1e3 * tokens / ms, "tflops": tokens * flops / ms / 1e9,
            "peak_gib": self.peak_gib, "ratio": None if base_ms is None else base_ms / ms, "host_ms": self.host_ms(),
            "syncs": self.syncs(), "build_s": self.build_s, "first_step_s": self.first_s,
        }  # fmt: skip


def looked_into(one: Candidate, record: dict[str, Any], microbatches: int) -> dict[str, Any]:
    """The record with where its time goes, its slowest kernels, and conversions that the ledger lacks."""
    cuda = one.device.type == "cuda"
    steps = 2 if cuda else 1
    found = bench_timing.kernels(lambda: [one.run() for _ in range(steps)], one.device)
    more = {"breakdown": breakdown(found, steps, record["ms"]), "slowest": slowest(found, steps, 25)}
    if cuda:
        more["unknown"] = unknown((k.name for k in found), conversions(one.config), steps * microbatches)
    return record | more


def layer_flops(config: Config) -> float:
    """Forward and backward of the layers, FLOPs a token."""
    m = config.model
    return training_flops_per_token(config) - 6 * m.hidden_size * m.padded_vocab_size


def measure_layers(args: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """All recipes at once, in turn."""
    configs = {recipe: config_of(args, recipe) for recipe in args.recipes if "FP8 weights" not in recipe}
    candidates = {}
    for recipe, config in configs.items():
        make = lambda config=config: Layers(config, device, args.gradients)  # noqa: E731
        candidates[recipe] = Candidate.of(make, config, device, args.warmup)
    base = configs[BASE]
    if args.compile:
        for name, make in ((f"{BASE}, compiled", compiled_layers(base, device, args)), (PLAIN, plain(base, device))):
            try:
                candidates[name] = Candidate.of(make, base, device, args.warmup)
            except Exception as error:  # a benchmark goes on without a rival that can't be compiled
                print(f"bench_step: {name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
    times = bench_timing.in_turn({name: c.run for name, c in candidates.items()}, device, args.rounds)
    medians = {name: statistics.median(found) for name, found in times.items()}
    base_ms = min(ms for name, ms in medians.items() if name.startswith(BASE))
    tokens, flops = base.train.micro_batch_size * base.data.seq_length, layer_flops(base)
    records = {name: c.record(medians[name], base_ms, tokens, flops) for name, c in candidates.items()}
    return {name: looked_into(c, records[name], 1) for name, c in candidates.items()}


def compiled_layers(config: Config, device: torch.device, args: argparse.Namespace) -> Callable[[], Layers]:
    def make() -> Layers:
        layers = Layers(config, device, args.gradients)
        layers.compile()
        return layers

    return make


def plain(config: Config, device: torch.device) -> Callable[[], Plain]:
    def make() -> Plain:
        if config.model.num_experts or config.model.multi_latent_attention:
            raise ValueError("written for layers with grouped queries and SwiGLU only")
        return Plain(config, device)

    return make


def measure_steps(args: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """BF16 stays, recipes come one after the other and take turns with it: two models and optimizers at a time."""
    configs = {recipe: config_of(args, recipe) for recipe in args.recipes}
    found: dict[str, dict[str, Any]] = {}

    def candidate(recipe: str) -> Candidate:
        return Candidate.of(lambda: Steps(configs[recipe], device), configs[recipe], device, args.warmup)

    base = candidate(BASE)
    tokens = args.microbatches * base.config.train.micro_batch_size * base.config.data.seq_length
    flops = training_flops_per_token(base.config)
    for recipe in args.recipes:
        one = base if recipe == BASE else candidate(recipe)
        times = bench_timing.in_turn({BASE: base.run, recipe: one.run}, device, args.rounds)
        medians = {name: statistics.median(ms) for name, ms in times.items()}
        record = one.record(medians[recipe], medians[BASE], tokens, flops)
        more = {"data_wait_ms": one.run.data_wait_ms, "losses": one.run.losses}
        found[recipe] = looked_into(one, record, args.microbatches) | more
        del one
    return found


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="llama3-8b", help="the model (default: %(default)s)")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["bf16", "blockwise", "tensorwise"],
                        help="bf16 is always among them (default: %(default)s)")  # fmt: skip
    parser.add_argument("--scopes", nargs="+", choices=("layers", "step"), default=["layers", "step"])
    parser.add_argument("--gradients", choices=("fp32", "bf16"), default="fp32", help="of weights, in the scope "
                        "layers: added to FP32 buffers, or left in BF16 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--flags", default="", help="training flags for all recipes, in one string")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each recipe (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="calls before (default: %(default)s)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out what is compiled")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--png", type=Path, help="picture of where the time goes")
    parser.add_argument("--ledger", choices=RECIPES, help="print the recipe's ledger of conversions, measure nothing")
    bench_crossover.add_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    args.recipes = [BASE, *(recipe for recipe in args.recipes if recipe != BASE)]
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    args.device = device.type
    try:
        if args.ledger:
            print("\n".join(markdown(conversions(config_of(args, args.ledger)))))
            return 0
        if args.crossover:
            return bench_crossover.run(args, device)
        base = config_of(args, BASE)
        results = {
            "preset": args.preset, "gradients": args.gradients, "microbatches": args.microbatches, "flags": args.flags,
            "tokens": base.train.micro_batch_size * base.data.seq_length, "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "scopes": {},
        }  # fmt: skip
        for scope, measure in (("layers", measure_layers), ("step", measure_steps)):
            if scope in args.scopes:
                results["scopes"][scope] = measure(args, device)
    except ValueError as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(results)))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))
    if args.png:
        draw(results, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
