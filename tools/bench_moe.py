"""Times the experts of one rank, forward and backward, on rows of uneven experts: BF16 beside FP8, part by part.

Both sides start from the same rows in BF16 and give the rows' gradient and FP32 gradients of the weights; BF16 is
`torch._grouped_mm`, its weight gradients added into FP32 buffers. FP8 weights are primary ones: their bytes are there,
the copy that the backward of inputs reads is transposed once, as in a step of several microbatches (`--fresh-weights`:
in every run). Bytes held for backward count the experts' input, not their output, nor copies of weights.

`--wire` times what is done to rows before and after they travel, in BF16 and in FP8, on the way to the experts and for
the gradients of their outputs, until both of their FP8 copies are there. FP8 pays where ranks send slower than `break
even`: bytes saved by the time it costs; always, where it costs none.

    python tools/bench_moe.py                                          # 8 of DeepSeek-V3's experts, 32768 rows
    python tools/bench_moe.py --parts --json moe.json                  # device time by kernel
    python tools/bench_moe.py --wire                                   # what it costs to send rows in FP8
    python tools/bench_moe.py --device cpu --hidden 256 --ffn 128 --rows 512 --experts 4 --repeats 1
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from bench_timing import between, kernels, mark, milliseconds, wait
from torch import Tensor

from megafp8.config.model import ModelConfig
from megafp8.config.tool_parser import ToolParser, check_least, check_output
from megafp8.core.build import BuildContext
from megafp8.core.moe.experts import ExpertRows, Experts
from megafp8.core.moe.permutation import spread
from megafp8.fp8 import get_recipe
from megafp8.fp8.grouped_rows import RowSpec, pack, row_bytes, take_rows, unpack
from megafp8.fp8.policy import Policy
from megafp8.fp8.primary import PrimaryBytes, orientations
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.params import GradSink
from megafp8.step import StepContext
from megafp8.training.build import pick_device

RECIPES = ("bf16", "blockwise", "tensorwise", "mxfp8")


@dataclass(frozen=True)
class Result:
    """ms: median of forward and backward; forward_ms: of forward; bytes: held for backward, a row."""

    name: str
    ms: float
    forward_ms: float
    bytes: float
    speed: float
    share: float


def uneven(rows: int, experts: int) -> list[int]:
    """Rows of each expert: some have twice as many as others, and no multiples of anything."""
    weights = torch.linspace(0.6, 1.4, experts, dtype=torch.float64)
    counts = (weights / weights.sum() * rows).round().int() // 2 * 2 + 1
    counts[-1] += rows - counts.sum()
    return counts.tolist()


class Grads(GradSink):
    """FP32 gradients in one flat buffer, the weights of a kind adjacent, as the optimizer lays them out."""

    def __init__(self, experts: Experts) -> None:
        self._views: dict[int, Tensor] = {}
        for kind in ("fc1", "fc2"):
            params = [getattr(mlp, kind).weight for mlp in experts]
            flat = torch.zeros(len(params), *params[0].shape, device=params[0].device)
            self._views |= {id(param): flat[number] for number, param in enumerate(params)}

    def buffer(self, param: Tensor) -> Tensor:
        return self._views[id(param)]

    def target(self, param: Tensor) -> tuple[Tensor, bool]:
        return self.buffer(param), True

    def ready(self, param: Tensor) -> None:
        pass


class _Rows(torch.autograd.Function):
    """x [R, hidden], each expert's rows filled up, as experts want them."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, spec: RowSpec, ends: Tensor) -> Tensor | QuantizedTensor:
        ctx.index = index
        return x if spec.quantizer is None else take_rows(x, index, spec, x.dtype, ends)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


class Bench:
    """One set of experts and its rows."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.device = torch.device(args.device)
        recipe = None if name == "bf16" else get_recipe(name)
        model = ModelConfig(
            num_layers=1,
            hidden_size=args.hidden,
            num_experts=args.experts,
            moe_ffn_hidden_size=args.ffn,
            swiglu=True,
            add_bias_linear=False,
        )
        build = BuildContext(model, dtype=torch.bfloat16, device=self.device, recipe_of=Policy(recipe))
        self.experts = Experts("layers.0.mlp.experts", build)
        with torch.no_grad():
            for kind in ("fc1", "fc2"):  # side by side, as in the optimizer's buffers
                params = [getattr(mlp, kind).weight for mlp in self.experts]
                flat = torch.randn(len(params), *params[0].shape, device=self.device).mul_(0.02).bfloat16()
                for param, value in zip(params, flat, strict=True):
                    param.data = value
        if recipe is not None:
            self._make_primary()
        self.step, self.fresh = StepContext(grads=Grads(self.experts)), args.fresh_weights
        self.keeps_rows = recipe is None
        self._lay_out(uneven(args.rows, args.experts), args.hidden)

    @torch.no_grad()
    def _make_primary(self) -> None:
        """The weights' FP8 bytes, adjacent, in place of the weights."""
        for kind in ("fc1", "fc2"):
            owners = [getattr(mlp, kind).weight.owner for mlp in self.experts]
            quantizer = owners[0].recipe.quantizer("weight")
            shape = (len(owners), *owners[0].param.shape)
            flats = {o: torch.empty(shape, dtype=torch.uint8, device=self.device) for o in orientations(quantizer)}
            for number, owner in enumerate(owners):
                row = quantizer.quantize(owner.param).rowwise
                flats["rowwise"][number] = row.data.view(torch.uint8)
                data = {o: flat[number].view(row.data.dtype) for o, flat in flats.items()}
                owner.hold_fp8_only(PrimaryBytes(quantizer, data, {"rowwise": row.scale_inv}))

    def _lay_out(self, counts: list[int], hidden: int) -> None:
        spec = self.experts.row_spec(self.step)
        step = spec.alignment
        room = [-(-count // step) * step for count in counts]
        generator = torch.Generator(self.device).manual_seed(0)
        self.x, self.dy = (
            torch.randn(sum(room), hidden, generator=generator, device=self.device).bfloat16() for _ in range(2)
        )
        self.index = torch.arange(sum(room), device=self.device)
        start = 0
        for count, size in zip(counts, room, strict=True):
            for rows in (self.x, self.dy, self.index[:, None]):
                rows[start + count : start + size] = 0 if rows.is_floating_point() else -1
            start += size
        self.x.requires_grad_()
        self.weights = torch.rand(sum(room), device=self.device).requires_grad_()
        self.ends, self.spec = torch.tensor(room, device=self.device).cumsum(0).to(torch.int32), spec

    def forward(self, *, fresh: bool = False) -> Tensor:
        if fresh:
            for mlp in self.experts:
                for linear in (mlp.fc1, mlp.fc2):
                    linear.weight.owner.publish()
        rows = _Rows.apply(self.x, self.index, self.spec, self.ends)
        return self.experts(ExpertRows(rows, self.weights, self.ends, self.spec.alignment), self.step)

    def run(self) -> None:
        self.forward(fresh=self.fresh).backward(self.dy)
        self.x.grad = self.weights.grad = None

    def held(self) -> int:
        """Bytes held after forward; the BF16 rows count where they are what is held."""
        if self.device.type != "cuda":
            return 0
        gc.collect()
        start = torch.cuda.memory_allocated()
        y = self.forward()
        held = torch.cuda.memory_allocated() - start - y.untyped_storage().nbytes()
        del y
        return held + (self.x.nbytes if self.keeps_rows else 0)

    def times(self, repeats: int) -> tuple[float, float]:
        """Median ms of forward and backward, and of forward: run after run, in a queue that is never empty."""
        marks = []
        for _ in range(repeats):
            start = mark(self.device)
            y = self.forward(fresh=self.fresh)
            middle = mark(self.device)
            y.backward(self.dy)
            marks.append((start, middle, mark(self.device)))
            self.x.grad = self.weights.grad = None
            del y
        wait(self.device)
        both = statistics.median(between(start, end) for start, _, end in marks)
        return both, statistics.median(between(start, middle) for start, middle, _ in marks)

    def parts(self) -> dict[str, float]:
        return parts(self.run, self.device)


def parts(run: Callable[[], object], device: torch.device, repeats: int = 3) -> dict[str, float]:
    """Device ms by kernel, the longest first."""
    found: dict[str, float] = {}
    for kernel in kernels(lambda: [run() for _ in range(repeats)], device):
        found[kernel.name[:90]] = found.get(kernel.name[:90], 0.0) + kernel.ms / repeats
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def print_parts(found: dict[str, float]) -> None:
    for kernel, ms in list(found.items())[:24]:
        print(f"    {ms:8.3f}ms  {kernel}")


@dataclass(frozen=True)
class WireResult:
    """Median ms of what is done to rows around one exchange, parts by kernel; saved: bytes that FP8 doesn't send."""

    name: str
    bf16_ms: float
    fp8_ms: float
    saved: int
    bf16_parts: dict[str, float]
    fp8_parts: dict[str, float]

    def print(self) -> None:
        cost = self.fp8_ms - self.bf16_ms
        even = f"{self.saved / cost / 1e6:8.0f} GB/s" if cost > 0 else "always"
        print(
            f"{self.name:10} bf16 {self.bf16_ms:6.3f}ms  fp8 {self.fp8_ms:6.3f}ms  "
            f"saves {self.saved / 1e6:6.0f} MB  break even {even}"
        )
        for form, found in (("bf16", self.bf16_parts), ("fp8", self.fp8_parts)):
            if found:
                print(f"  {form}")
                print_parts(found)


class Wire:
    """Rows on their way, without the way: `topk` copies of each token leave, as many rows arrive."""

    def __init__(self, args: argparse.Namespace, topk: int = 8) -> None:
        device, self.hidden, self.repeats = torch.device(args.device), args.hidden, args.repeats
        self.wants_parts = args.parts
        recipe = get_recipe("blockwise")
        self.input, self.gradient = recipe.quantizer("input"), recipe.quantizer("grad_output")
        tokens = args.rows // topk
        self.x = torch.randn(tokens, args.hidden, device=device).bfloat16()
        self.leaving = torch.randperm(tokens * topk, device=device) // topk
        self.arriving = torch.randperm(len(self.leaving), device=device)

    def to_experts(self, fp8: bool) -> None:
        spec = RowSpec(self.input, colwise=True, alignment=128)
        if fp8:
            rows = spread(pack(self.input.quantize(self.x).rowwise), self.leaving, False)
            take_rows(unpack(self.input, rows, self.hidden), self.arriving, spec, torch.bfloat16)
        else:
            take_rows(spread(self.x, self.leaving, False), self.arriving, spec, torch.bfloat16)

    def gradients(self, fp8: bool) -> None:
        spec = RowSpec(self.gradient, colwise=True, alignment=128)
        if fp8:
            rows = spread(pack(self.gradient.quantize(self.x).rowwise), self.leaving, False)
            take_rows(unpack(self.gradient, rows, self.hidden), self.arriving, spec, torch.bfloat16)
        else:
            take_rows(spread(self.x, self.leaving, False), self.arriving, spec, torch.bfloat16, derives=False)

    def results(self) -> Iterator[WireResult]:
        saved = len(self.leaving) * (2 * self.hidden - row_bytes(self.input, self.hidden))
        for name, run in (("to experts", self.to_experts), ("gradients", self.gradients)):
            bf16, fp8 = (partial(run, on) for on in (False, True))
            ms = [milliseconds(each, self.x.device, self.repeats, warmup=2, ahead=True) for each in (bf16, fp8)]
            found = [parts(each, self.x.device) for each in (bf16, fp8)] if self.wants_parts else [{}, {}]
            yield WireResult(name, *ms, saved, *found)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=7168, help="(default: %(default)s)")
    parser.add_argument("--ffn", type=int, default=2048, help="an expert's width (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--rows", type=int, default=32768, help="routed tokens of all experts")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["bf16", "blockwise"],
                        help="speed and bytes are against the first (default: %(default)s)")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=20, help="runs that a time is of (default: %(default)s)")
    parser.add_argument("--fresh-weights", action="store_true", help="weights have changed before every run")
    parser.add_argument("--parts", action="store_true", help="device time by kernel")
    parser.add_argument("--wire", action="store_true", help="times of rows before and after they travel, instead")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        check_least(args, 1, "hidden", "ffn", "experts", "rows", "repeats")
        check_output(args.json, "--json")
        args.device = pick_device(args.device).type
    except ValueError as error:
        parser.error(str(error))
    return args


def write(args: argparse.Namespace, results: list[Result] | list[WireResult]) -> None:
    if args.json is not None:
        found = {"arguments": {k: str(v) for k, v in vars(args).items()}, "results": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(found, indent=1))


def main(argv: list[str]) -> int:
    args, results = parse_args(argv), []
    if args.wire:
        for result in Wire(args).results():
            result.print()
            results.append(result)
        write(args, results)
        return 0
    print(f"{'recipe':10} {'fwd+bwd':>10} {'forward':>10} {'speed':>6} {'bytes a row':>11} {'of bf16':>7}")
    for name in args.recipes:
        bench = Bench(args, name)
        bench.run()  # compiles kernels, makes copies of weights
        bench.run()
        held = bench.held() / args.rows
        ms, forward = bench.times(args.repeats)
        first = results[0] if results else None
        speed, share = (first.ms / ms, held / (first.bytes or 1)) if first else (1.0, 1.0)
        results.append(Result(name, ms, forward, held, speed, share))
        print(f"{name:10} {ms:8.2f}ms {forward:8.2f}ms {speed:5.2f}x {held:11.0f} {share:6.3f}x", flush=True)
        if args.parts:
            print_parts(bench.parts())
        del bench
        gc.collect()
    write(args, results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
