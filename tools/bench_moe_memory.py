"""What the experts of a layer hold for backward, and how long they take: by recipe and option, on one rank of many.

One rank of an expert-parallel group runs alone: its experts, tokens dealt out in turn, as with
`--moe-router-force-load-balancing`, and ranks beside it that do as it does (a fake process group; what it receives is
what it sent). Bytes a routed token:

    formula    as megafp8/plan counts them: with hidden size h, expert width f and no scales, BF16 2h + 6f (inputs of
               fc1 and fc2, fc1's output), FP8 h + 2f (FP8 input of fc1, FP8 output of fc1; the rest is made anew)
    measured   by the allocator, from the dispatch of tokens to the layer's output: inputs of experts counted, the
               output and copies of weights not; on the CPU, the storages that still live

Times are of forward and backward with FP32 gradients: `experts` of the experts alone, `layer` with router, permutation,
exchange and sum as well.

    python tools/bench_moe_memory.py                                     # DeepSeek-V3's experts, 4096 tokens
    python tools/bench_moe_memory.py --shapes mixtral qwen3-moe --tokens 8192 --ep 8 --png moe.png --json moe.json
    python tools/bench_moe_memory.py --device cpu --shapes tiny --tokens 2048 --repeats 1   # fewer: mostly padding
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from bench_timing import between, mark
from moe_memory_chart import draw
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megafp8.config import Config
from megafp8.config.parse import build_config
from megafp8.config.tool_parser import ToolParser, check_least, check_output
from megafp8.core.build import BuildContext
from megafp8.core.moe.layer import MoELayer
from megafp8.core.transformer.core_attention import Sequences
from megafp8.fp8 import DelayedScaling, policy
from megafp8.lone import fake_parallel
from megafp8.parallel import DONE, Axis, ParallelContext, Pending
from megafp8.params import GradSink, initial_value, named_specs
from megafp8.plan.layer_activations import LayerPlan, Sizes
from megafp8.plan.shapes import LayerShape
from megafp8.step import StepContext
from megafp8.training.build import pick_device


@dataclass(frozen=True)
class Shape:
    """hidden: h; ffn: f, an expert's width; experts in all; topk a token. ep: ranks that share them by default."""

    hidden: int
    ffn: int
    experts: int
    topk: int
    ep: int


SHAPES = {
    "deepseek-v3": Shape(7168, 2048, 256, 8, 32),
    "mixtral": Shape(4096, 14336, 8, 2, 1),
    "qwen3-moe": Shape(4096, 1536, 128, 8, 8),
    "tiny": Shape(256, 128, 8, 2, 2),
}
BLOCKWISE = {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
# name -> (formula without scales, flags)
VARIANTS: dict[str, tuple[str, dict]] = {
    "bf16": ("2h + 6f", {}),
    "bf16, moe_act": ("2h + 4f", {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)}),
    "blockwise": ("h + 2f", BLOCKWISE),
    "blockwise, bf16 fc1 output": ("h + 4f", BLOCKWISE | {"activation_func_fp8_input_store": False}),
    "blockwise, fp8 dispatch": ("h + 2f", BLOCKWISE | {"moe_fp8_dispatch": True}),
    "mxfp8": ("h + 2f", {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}),
    "tensorwise": ("h + 2f", {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}),
    "delayed": ("h + 2f", {"fp8_format": "hybrid", "fp8_recipe": "delayed"}),
}


class Mirror(Axis):
    """Ranks that all do what this one does: what they send it is what it sends them."""

    def post_deal(self, x: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, Pending]:
        assert sum(sent) == sum(received), "tokens are not dealt out evenly"
        return x.clone(), DONE


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside that still live: the CPU's answer to `torch.cuda.memory_allocated`."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}  # 0 bytes: was there before, of which a view was made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) in (Tensor, Parameter):
                self._made.setdefault(StorageWeakRef(leaf.untyped_storage()), 0)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor:
                storage = leaf.untyped_storage()
                self._made.setdefault(StorageWeakRef(storage), storage.nbytes())
        return result

    def __call__(self) -> int:
        gc.collect()
        return sum(size for ref, size in self._made.items() if not ref.expired())


class _Start:
    """Inside, `bytes` is what was allocated when the layer began to send its tokens to experts."""

    def __init__(self, layer: MoELayer, allocated: Callable[[], int]) -> None:
        self._layer, self._dispatcher, self._allocated, self.bytes = layer, layer.dispatcher, allocated, 0

    def __enter__(self) -> _Start:
        self._layer.dispatcher = self
        return self

    def __exit__(self, *error: object) -> None:
        self._layer.dispatcher = self._dispatcher

    def __getattr__(self, name: str) -> object:
        return getattr(self._dispatcher, name)

    def send(self, *args: object, **options: object) -> object:
        self.bytes = self._allocated()
        return self._dispatcher.send(*args, **options)


class Grads(GradSink):
    """FP32 gradient buffers, made when first asked for."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, param: Tensor) -> Tensor:
        if id(param) not in self._buffers:
            self._buffers[id(param)] = torch.zeros(param.shape, device=param.device)
        return self._buffers[id(param)]

    def target(self, param: Tensor) -> tuple[Tensor, bool]:
        return self.buffer(param), True

    def ready(self, param: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Result:
    """Bytes are by routed token; times in ms, None where they were not taken."""

    shape: str
    variant: str
    formula: str
    ep: int
    tokens: int
    routed: int
    formula_bytes: float
    measured_bytes: float
    experts_ms: float | None
    layer_ms: float | None


def config_of(shape: Shape, tokens: int, ep: int, flags: dict, device: str) -> Config:
    """One layer of that shape; `tokens` tokens are a microbatch of a rank."""
    parallel = {"expert_model_parallel_size": ep} if ep > 1 else {}
    return build_config(
        env={"WORLD_SIZE": str(ep)},
        check_files=False,
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=shape.hidden // 64,
        num_experts=shape.experts,
        moe_ffn_hidden_size=shape.ffn,
        moe_router_topk=shape.topk,
        moe_router_force_load_balancing=True,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        bf16=True,
        seq_length=tokens,
        micro_batch_size=1,
        train_iters=1,
        lr=0.0,
        mock_data=True,
        tokenizer_type="NullTokenizer",
        vocab_size=1,
        device=device,
        **parallel,
        **flags,
    )


@contextmanager
def one_rank(config: Config, device: torch.device) -> Iterator[ParallelContext]:
    with fake_parallel(config, device_type=device.type) as parallel:
        axis = parallel.ep_etp
        yield replace(parallel, ep_etp=Mirror(axis.size, axis.rank, axis.group)) if axis.size > 1 else parallel


def formula_bytes(config: Config, device: torch.device) -> float:
    """Bytes a routed token that the planner counts for the experts, scales included."""
    t = config.train
    plan = LayerPlan(
        LayerShape("layers.0", True),
        Sizes.of(config),
        policy.from_config(config),
        device,
        tuple(t.recompute_modules or ()),
        config.fp8.activation_func_fp8_input_store,
    )
    held = sum(item.bytes for item in plan.items() if item.module.startswith("mlp.experts"))
    return held / (config.data.seq_length * config.model.moe_router_topk)


class Bench:
    """A layer, its tokens, and the ways to run it."""

    def __init__(self, config: Config, parallel: ParallelContext, device: torch.device) -> None:
        self.layer = MoELayer("layers.0.mlp", BuildContext.of(config, parallel, device, policy.from_config(config)))
        self._fill()
        self.tokens, self.device = config.data.seq_length, device
        self.routed = self.tokens * config.model.moe_router_topk
        self.sequences = Sequences(1, self.tokens)
        self.step = StepContext(grads=Grads(), scaling=DelayedScaling.of(self.layer))
        generator = torch.Generator(device).manual_seed(0)
        shape = (self.tokens, config.model.hidden_size)
        self.x = torch.randn(shape, generator=generator, device=device).bfloat16().requires_grad_()
        self.grad = torch.randn(shape, generator=generator, device=device).bfloat16()

    @torch.no_grad()
    def _fill(self) -> None:
        """Normal weights: on a GPU drawn there, which takes no time; their values don't matter."""
        for spec, param in named_specs(self.layer):
            if param.device.type == "cpu":
                param.copy_(initial_value(spec, 0))
            else:
                param.normal_(std=spec.init.std)

    def run_layer(self) -> None:
        self.layer(self.x, self.sequences, self.step).backward(self.grad)
        self.x.grad = None

    def held(self) -> int:
        """Bytes that the layer holds after forward, from the dispatch of its tokens on, its output left out."""
        gc.collect()  # what earlier runs left behind must not go in between
        with self._watched() as allocated, _Start(self.layer, allocated) as start:
            y = self.layer(self.x, self.sequences, self.step)
            held = allocated() - start.bytes - y.untyped_storage().nbytes()
        del y
        return held

    @contextmanager
    def _watched(self) -> Iterator[Callable[[], int]]:
        if self.device.type == "cuda":
            yield torch.cuda.memory_allocated
            return
        with LiveBytes() as live:
            yield live

    def experts_times(self, repeats: int) -> list[float]:
        """ms of the experts alone, from their rows to the gradients of those."""
        seen, marks = [], []
        hook = self.layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        self.layer(self.x, self.sequences, self.step)
        hook.remove()
        for _ in range(repeats):
            parts = {f.name: getattr(seen[0], f.name) for f in fields(seen[0])}
            parts = {name: part.detach().requires_grad_() if getattr(part, "requires_grad", False) else part
                     for name, part in parts.items()}  # fmt: skip
            rows = replace(seen[0], **parts)
            start = mark(self.device)
            y = self.layer.experts(rows, self.step)
            y.backward(y.detach())
            marks.append((start, mark(self.device)))
        return [between(*pair) for pair in marks]

    def layer_times(self, repeats: int) -> list[float]:
        marks = []
        for _ in range(repeats):
            start = mark(self.device)
            self.run_layer()
            marks.append((start, mark(self.device)))
        return [between(*pair) for pair in marks]


def measure(name: str, variant: str, tokens: int, ep: int | None, repeats: int, device: torch.device) -> Result:
    shape, (formula, flags) = SHAPES[name], VARIANTS[variant]
    ep = ep or shape.ep
    if tokens * shape.topk % shape.experts:
        raise ValueError(f"--tokens {tokens} x {shape.topk} can't be dealt out to {shape.experts} experts evenly")
    config = config_of(shape, tokens, ep, flags, device.type)
    with one_rank(config, device) as parallel:
        bench = Bench(config, parallel, device)
        bench.run_layer()  # compiles kernels, makes copies of weights
        if bench.step.scaling is not None:  # scales are a history's from the second step on
            bench.step.scaling.advance()
            bench.run_layer()
        held = bench.held()
        medians = [statistics.median(times(repeats)) if repeats else None
                   for times in (bench.experts_times, bench.layer_times)]  # fmt: skip
    routed = bench.routed
    return Result(name, variant, formula, ep, tokens, routed, formula_bytes(config, device), held / routed, *medians)


def table(results: list[Result]) -> Iterator[str]:
    """Each variant beside its shape's first one."""
    yield (
        f"{'shape':12} {'EP':>3} {'routed':>7} {'variant':27} {'kept':8} {'formula':>8} {'measured':>8} {'ratio':>6} "
        f"{'experts':>9} {'speed':>6} {'layer':>9}"
    )
    first: dict[str, Result] = {}
    for r in results:
        base = first.setdefault(r.shape, r)
        speed = f"{base.experts_ms / r.experts_ms:5.2f}x" if r.experts_ms and base.experts_ms else ""
        times = [f"{ms:7.2f}ms" if ms else "" for ms in (r.experts_ms, r.layer_ms)]
        yield (
            f"{r.shape:12} {r.ep:3} {r.routed:7} {r.variant:27} {r.formula:8} {r.formula_bytes:8.0f} "
            f"{r.measured_bytes:8.0f} {r.measured_bytes / base.measured_bytes:5.3f}x {times[0]:>9} {speed:>6} "
            f"{times[1]:>9}"
        )


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["deepseek-v3"])
    names = ", ".join(repr(name) for name in VARIANTS)
    about = f"of {names}; the first is what others are compared with (default: all)"
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME", help=about)
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens of a microbatch, before routing (default 4096)"
    )
    parser.add_argument(
        "--ep", type=int, help="ranks that share the experts (default: by shape, 8 experts a rank or so)"
    )
    parser.add_argument("--repeats", type=int, default=10, help="runs that a time is the median of; 0: no times")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        check_least(args, 1, "tokens", "ep")
        check_least(args, 0, "repeats")
        check_output(args.json, "--json")
        check_output(args.png, "--png")
        args.device = pick_device(args.device).type
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    device, results = torch.device(args.device), []
    for name in args.shapes:
        for variant in args.variants:
            try:
                results.append(measure(name, variant, args.tokens, args.ep, args.repeats, device))
            except ValueError as error:  # what a recipe refuses; the others go on
                print(f"{name}, {variant}: {error}", file=sys.stderr)
    print("\n".join(table(results)))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n")
    if args.png is not None and results:
        draw(results, args.png)
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
