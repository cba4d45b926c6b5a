"""Times a layer's whole mixture of experts, forward and backward: router, permutation, experts, shared expert, sum.

All experts are on one rank, and no token travels. Recipes take turns, call after call in a queue that is never empty,
as in training; weights are those of a step's second microbatch, whose FP8 copies are there. Gradients are FP32.

    python tools/bench_moe_block.py                                     # DeepSeek-V3's: what one of 32 ranks works on
    python tools/bench_moe_block.py --shapes qwen3-30b-a3b --recipes bf16 tensorwise --parts --json block.json
    python tools/bench_moe_block.py --device cpu --shapes tiny --rounds 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench_layer_memory import Gradients, lay_side_by_side
from bench_moe import parts, print_parts
from bench_timing import in_turn, wait

from megafp8.config.model import ModelConfig
from megafp8.config.tool_parser import ToolParser, check_least, check_output
from megafp8.core.build import BuildContext
from megafp8.core.moe.layer import MoELayer
from megafp8.core.transformer.core_attention import Sequences
from megafp8.fp8 import DelayedScaling, get_recipe
from megafp8.fp8.policy import Policy
from megafp8.step import StepContext
from megafp8.training.build import pick_device


@dataclass(frozen=True)
class Shape:
    """hidden: h; ffn: f, an expert's width; shared: the shared expert's, None for none."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    shared: int | None = None
    sigmoid: bool = False


SHAPES = {
    "deepseek-v3": Shape(4096, 7168, 2048, 8, 8, shared=2048, sigmoid=True),
    "qwen3-30b-a3b": Shape(32768, 2048, 768, 128, 8),
    "mixtral-8x7b": Shape(8192, 4096, 14336, 8, 2),
    "tiny": Shape(64, 256, 128, 4, 2, shared=128),
}
RECIPES = ("bf16", "blockwise", "tensorwise", "delayed", "mxfp8")


@dataclass(frozen=True)
class Result:
    """ms: median of forward and backward, in a full queue. host_ms: until all of it is queued."""

    shape: str
    recipe: str
    ms: float
    host_ms: float
    speed: float
    parts: dict[str, float]


class Block:
    """One mixture in one recipe; a call runs it forward and backward."""

    def __init__(self, shape: Shape, recipe: str, device: torch.device) -> None:
        model = ModelConfig(
            num_layers=1,
            hidden_size=shape.hidden,
            num_experts=shape.experts,
            moe_ffn_hidden_size=shape.ffn,
            moe_shared_expert_intermediate_size=shape.shared,
            moe_router_topk=shape.topk,
            moe_router_score_function="sigmoid" if shape.sigmoid else "softmax",
            moe_router_load_balancing_type=("aux_loss",),
            moe_aux_loss_coeff=(1e-3,),
            swiglu=True,
            add_bias_linear=False,
        )
        recipe_of = Policy(None if recipe == "bf16" else get_recipe(recipe))
        build = BuildContext(model, dtype=torch.bfloat16, device=device, recipe_of=recipe_of)
        self.layer, generator = MoELayer("layers.0.mlp", build), torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for param in self.layer.parameters():
                param.normal_(std=0.02, generator=generator)
        sink = Gradients(self.layer)
        lay_side_by_side(self.layer, sink.buffers)
        self.step = StepContext(grads=sink, scaling=DelayedScaling.of(self.layer))
        self.sequences = Sequences(1, shape.tokens)
        self.x, self.dy = (
            torch.randn(shape.tokens, shape.hidden, generator=generator, device=device).bfloat16() for _ in range(2)
        )
        self.x.requires_grad_()

    def __call__(self) -> None:
        self.layer(self.x, self.sequences, self.step).backward(self.dy)
        self.x.grad = None

    def warm_up(self) -> None:
        """Compiles kernels, makes copies of weights, and scales of a history."""
        self()
        if self.step.scaling is not None:
            self.step.scaling.advance()
        for _ in range(2):
            self()


def host_ms(block: Block, device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        block()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(name: str, args: argparse.Namespace, device: torch.device) -> list[Result]:
    blocks = {recipe: Block(SHAPES[name], recipe, device) for recipe in args.recipes}
    for block in blocks.values():
        block.warm_up()
    times = in_turn(blocks, device, args.rounds, calls=args.calls)
    base, results = statistics.median(times[args.recipes[0]]), []
    for recipe, block in blocks.items():
        ms = statistics.median(times[recipe])
        found = parts(block, device) if args.parts else {}
        results.append(Result(name, recipe, ms, host_ms(block, device, 5), base / ms, found))
    return results


def main(argv: list[str]) -> int:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["deepseek-v3"])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["bf16", "blockwise", "tensorwise"],
                        help="speed is that of the first, in each (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, help="rounds that times are medians of (default 7)")
    parser.add_argument("--calls", type=int, default=4, help="calls of a recipe a round (default 4)")
    parser.add_argument("--parts", action="store_true", help="device time by kernel")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, results = parser.parse_args(argv), []
    try:
        check_least(args, 1, "rounds", "calls")
        check_output(args.json, "--json")
        device = pick_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    print(f"{'shape':14} {'recipe':10} {'fwd+bwd':>10} {'speed':>6} {'host':>9}")
    for name in args.shapes:
        for r in measure(name, args, device):
            results.append(r)
            print(f"{r.shape:14} {r.recipe:10} {r.ms:8.2f}ms {r.speed:5.2f}x {r.host_ms:7.2f}ms", flush=True)
            print_parts(r.parts)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
