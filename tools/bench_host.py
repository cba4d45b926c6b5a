"""What the host does for one transformer layer, forward and backward: Python, autograd, allocations, without kernels.

Kernels are replaced by functions that allocate their results and compute nothing, and everything is told that it runs
on a GPU. So the time left is that of the code between the kernels, measured on any machine: small models are bound by
it, and CUDA graphs would hide it. Launches are not counted in it; with --launches those of Triton's kernels are, up to
the driver's own part.

    python tools/bench_host.py                                # CPU milliseconds a layer, by recipe
    python tools/bench_host.py --recipes blockwise --profile 25

Other layouts are those of one rank of several, alone (`host_ranks.py`), Triton's launches with them; what such a layer
launches is counted, too: PyTorch's operations, Triton's kernels, products that only a GPU has, collectives.

    python tools/bench_host.py --layouts tp2 tp2-overlap ep2 --recipes bf16 blockwise
    python tools/bench_host.py --layouts ep2 --recipes bf16 --profile 25     # operations by code line, too
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace

import bench_layer_memory
import host_ranks
import torch
from driverless import no_driver
from torch import Tensor
from torch.nn import functional as F

from megafp8.core.transformer import activation, attention, heads, norm
from megafp8.fp8 import gemm, quantizer, scaled_mm, triton_gemm
from megafp8.fp8.formats import OperandSpec
from megafp8.fp8.storage import QuantizedStorage

RECIPES = ("bf16", "blockwise", "tensorwise", "delayed")
Stored = tuple[Tensor, Tensor]


def _stored(rows: int, columns: int, spec: OperandSpec) -> Stored:
    data = torch.empty(rows, columns, dtype=spec.format.dtype)
    if spec.tile.kind == "tensor":
        return data, torch.empty(1)
    rows, columns = spec.tile.scale_shape(rows, columns)
    if spec.tile.kind == "1d":
        return data, torch.empty(columns, -(-rows // 4) * 4)[:, :rows].t()
    return data, torch.empty(rows, -(-columns // 4) * 4)[:, :columns]


def _pair(x: Tensor, spec: OperandSpec, rowwise: bool, colwise: bool) -> tuple[Stored | None, Stored | None]:
    rows, columns = x.shape
    return _stored(rows, columns, spec) if rowwise else None, _stored(columns, rows, spec) if colwise else None


class _Norms:
    """The kernels of `norm_quantize` and `norm_grad`."""

    WIDEST = 16384

    @staticmethod
    def rms_norm_quantize(x, weight, spec, *, rowwise, colwise, **options):
        row, col = _pair(x, spec, rowwise, colwise)
        return SimpleNamespace(rowwise=row, colwise=col, rstd=x.new_empty(x.shape[0], dtype=torch.float32))

    @staticmethod
    def norm_columns_quantize(x, weight, rstd, spec, **options):
        return _pair(x, spec, False, True)[1]

    @staticmethod
    def rms_norm_grad(grad, x, weight, rstd, **options):
        return torch.empty_like(x), torch.empty(1, x.shape[1])

    @staticmethod
    def sum_parts(parts, dtype, out=None, adds=False):
        return torch.empty(parts.shape[1], dtype=dtype) if out is None else out


class _SwiGLU:
    """The kernels of `swiglu_quantize`."""

    @staticmethod
    def swiglu_quantize(x, spec, *, rowwise=True, colwise=False, high_precision=False, **options):
        half = x[:, : x.shape[1] // 2]
        y = torch.empty(half.shape, dtype=x.dtype) if high_precision else None
        row, col = _pair(half, spec, rowwise, colwise)
        return SimpleNamespace(rowwise=row, colwise=col, y=y)

    @staticmethod
    def swiglu_grad_quantize(grad, x, spec, *, rowwise, colwise, high_precision, y_spec=None, **options):
        row, col = _pair(x, spec, rowwise, colwise)
        dx = torch.empty_like(x) if high_precision else None
        y = None if y_spec is None else _pair(grad, y_spec, False, True)[1]
        return SimpleNamespace(rowwise=row, colwise=col, dx=dx, y_colwise=y, dweights=None)


class _Quantize:
    """The kernels of `quantize`."""

    @staticmethod
    def quantize(x, spec, rowwise, colwise, *scaling, **more):
        return _pair(x, spec, rowwise, colwise)

    @staticmethod
    def amax(x, tile, orientation="rowwise"):
        return torch.empty(1)


def _multiply(a: QuantizedStorage, b: QuantizedStorage, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    return torch.empty(a.data.shape[0], b.data.shape[0], dtype=out_dtype) if out is None else out


def _split_heads(qkv: Tensor, turn, queries_per_group: int, channels: int, norms) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.view(qkv.shape[0], -1, queries_per_group + 2, channels).split((queries_per_group, 1, 1), 2)
    return tuple(x.reshape(qkv.shape[0], -1, channels) for x in (q, k, v))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def _scaled_mm(a: Tensor, b: Tensor, *scales, output_dtype: torch.dtype, **options) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=output_dtype)


def _launching() -> Iterator[tuple[object, str, object]]:
    """(owner, name, what stands there where Triton's kernels are launched on nothing)."""
    from megafp8.kernels import quantize

    yield scaled_mm, "F", SimpleNamespace(scaled_mm=_scaled_mm)
    yield quantizer, "_backend", lambda device, spec: quantize
    yield heads, "_usable", lambda x, *channels: True


def _replacements() -> Iterator[tuple[object, str, object]]:
    """(owner, name, what stands there without kernels)."""
    yield scaled_mm, "matmul", lambda a, b, bias, out_dtype, *rest: _multiply(a, b, out_dtype)
    yield triton_gemm, "matmul", lambda a, b, bias, out_dtype, out=None, *rest: _multiply(a, b, out_dtype, out)
    yield triton_gemm, "kernels", lambda name: ()
    yield quantizer, "_backend", lambda device, spec: _Quantize
    yield attention, "split_heads", _split_heads
    kernels = (_Norms, _SwiGLU, _Norms)
    for module in (norm, activation):
        yield module, "fused_kernels", lambda: kernels


def _device() -> Iterator[tuple[object, str, object]]:
    """(owner, name, what stands there on a Hopper GPU)."""
    able = gemm.Capability(cublaslt=True, triton=True, name="NVIDIA H200")
    yield gemm, "capability", lambda device: able
    yield F, "scaled_dot_product_attention", lambda q, k, v, **options: _Attention.apply(q, k, v)
    for module in (norm, activation):
        yield module, "fuses", lambda *args: True


@contextmanager
def no_kernels(*, launches: bool = False) -> Iterator[None]:
    """Inside, FP8 modules take the paths of a Hopper GPU, and kernels give results that nobody has computed; launches:
    the host does all that it does to launch them."""
    before = []
    try:
        for owner, name, value in (*_device(), *(_launching() if launches else _replacements())):
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def layer_of(recipe: str) -> bench_layer_memory.Layer:
    argv = ["--model", "tiny", "--seq-length", "32", "--micro-batch-size", "1", "--device", "cpu"]
    config = bench_layer_memory.config_of(bench_layer_memory.arguments().parse_args(argv), recipe)
    return bench_layer_memory.Layer(config, torch.device("cpu"))


def microbatches(recipe: str) -> Callable[[], None]:
    """Forward and backward of a layer under a recipe."""
    return runs(layer_of(recipe))


def runs(layer: bench_layer_memory.Layer) -> Callable[[], None]:
    leaves = (layer.x, *layer.layer.parameters())

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        layer.forward().backward(layer.dy)

    return run


def milliseconds(run: Callable[[], None], repeats: int, calls: int = 20) -> float:
    """CPU time of a call: the process's, so that others count as little as can be; the least of several rounds."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(calls):
            run()
        times.append(1e3 * (time.process_time() - start) / calls)
    return min(times)


def calls_of(run: Callable[[], None]) -> Counter[str]:
    """How often Python calls each function in a call, C functions included and what stands for kernels left out: the
    same on every machine."""
    calls: Counter[str] = Counter()
    own = {__file__, bench_layer_memory.__file__, host_ranks.__file__}

    def see(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event in ("call", "c_call") and code.co_filename not in own:
            calls[code.co_qualname if event == "call" else f"{argument.__qualname__} in {code.co_qualname}"] += 1

    run()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--launches", action="store_true", help="with what launching Triton's kernels takes")
    help_layouts = "ranks of these layouts, with launches, instead of a layer that has all for itself"
    parser.add_argument("--layouts", nargs="+", choices=host_ranks.LAYOUTS, default=(), help=help_layouts)
    parser.add_argument("--repeats", type=int, default=9, help="rounds of 20 microbatches (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=60, help="microbatches of a layout before (default: %(default)s)")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="print what is called most often")
    parser.add_argument("--output", type=Path, help="JSON file: recipe (and layout) -> {ms, calls, ...}")
    return parser


def of_rank(recipe: str, layout: str, args: argparse.Namespace) -> dict[str, float]:
    """The record of one rank of a layout."""
    products: Counter[str] = Counter()
    with (
        no_kernels(launches=True),
        host_ranks.pretending(products),
        host_ranks.rank_of(recipe, layout) as (layer, meter),
    ):
        run = runs(layer)
        launched = host_ranks.launched_by(run, meter, products)
        with no_driver(notes=False):
            for _ in range(args.warmup):  # until most numbers of experts' rows have been met
                run()
            calls = calls_of(run)
            record = {"ms": milliseconds(run, args.repeats), "calls": calls.total()} | launched.totals()
    text = (
        "{:12}{:12}{ms:8.3f} ms of the host in{calls:6} calls; launches{operations:4} operations,{kernels:4} kernels,"
    )
    text += "{products:3} products,{collectives:3} collectives"
    print(text.format(layout, recipe, **record), flush=True)
    for counts in (calls, *vars(launched).values()):
        for name, count in counts.most_common(args.profile):
            print(f"{count:8}  {name}")
    return record


def alone(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The records of a layer on one rank, by recipe."""
    results = {}
    with ExitStack() as stack:
        stack.enter_context(no_kernels(launches=args.launches))
        if args.launches:
            stack.enter_context(no_driver(notes=False))
        for recipe in args.recipes:
            run = microbatches(recipe)
            calls = calls_of(run)
            results[recipe] = {"ms": milliseconds(run, args.repeats), "calls": calls.total()}
            print("{:12}{ms:8.3f} ms of the host in{calls:6} calls".format(recipe, **results[recipe]), flush=True)
            for name, count in calls.most_common(args.profile):
                print(f"{count:8}  {name}")
    return results


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    torch.set_num_threads(1)
    if args.layouts:
        pairs = [(layout, recipe) for layout in args.layouts for recipe in args.recipes]
        pairs = [pair for pair in pairs if pair[0] != "ep2-fp8" or pair[1] == "blockwise"]  # others can't
        results = {f"{layout} {recipe}": of_rank(recipe, layout, args) for layout, recipe in pairs}
    else:
        results = alone(args)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
