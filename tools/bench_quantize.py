"""Times every quantization kernel on a GPU: TB/s, and percent of a copy that moves as many bytes in the same run.

Bytes are counted as the algorithm needs them: each input read once and each output written once (tensorwise under
current scaling: the input twice; scales are left out, they are below 1 to 3 %). A call's time is a CUDA graph's replay
time over the calls in it, median of several replays, inputs rotating so that L2 does not hold them. Next to a kernel,
where PyTorch can express it: the same function by `torch.compile`.

    python tools/bench_quantize.py                                        # 8192 x 7168 and 16384 x 4096
    python tools/bench_quantize.py --shapes llama3-8b deepseek-v3         # operands of these models
    python tools/bench_quantize.py --kernels norm "SwiGLU row" --candidates   # every configuration of some kernels
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from bench_timing import milliseconds
from megafp8.kernels import norm_quantize, quantize, quantize_configs, quantize_derive, swiglu_quantize
from torch import Tensor

from megafp8.fp8.formats import E4M3, E5M2, OperandSpec, Scale, Tile

# Operands [M, K] by what they are: inputs and gradients of linears, of norms, SwiGLU's results, experts' rows, weights.
ROLES = ("input", "norm", "swiglu", "grouped", "weight")
BARS = [(8192, 7168), (16384, 4096)]
SHAPES: dict[str, dict[str, list[tuple[int, int]]]] = {
    "bars": dict.fromkeys(ROLES, BARS),
    "llama3-8b": {
        "input": [(8192, 4096), (8192, 28672)],
        "norm": [(8192, 4096)],
        "swiglu": [(8192, 14336)],
        "weight": [(6144, 4096), (28672, 4096), (4096, 14336)],
    },
    "llama3-70b": {
        "input": [(8192, 8192), (8192, 57344)],
        "norm": [(8192, 8192)],
        "swiglu": [(8192, 28672)],
        "weight": [(10240, 8192), (57344, 8192), (8192, 28672)],
    },
    "deepseek-v3": {
        "input": [(8192, 7168), (8192, 1536)],
        "norm": [(8192, 7168), (8192, 1536)],
        "swiglu": [(32768, 2048)],
        "grouped": [(32768, 7168), (32768, 2048)],
        "weight": [(4096, 7168), (7168, 2048)],
    },
}
BLOCKWISE = OperandSpec(E4M3, Tile("1d", 128), Scale.POW2)
BLOCKWISE_FP32 = OperandSpec(E4M3, Tile("1d", 128), Scale.FP32)
MXFP8 = OperandSpec(E4M3, Tile("1d", 32), Scale.E8M0)
SQUARES = OperandSpec(E4M3, Tile("2d", 128), Scale.POW2)
SQUARES_32 = OperandSpec(E4M3, Tile("2d", 32), Scale.E8M0)
TENSORWISE = OperandSpec(E4M3, Tile("tensor"), Scale.FP32)
GRADIENT = OperandSpec(E5M2, Tile("tensor"), Scale.FP32)


class Case(NamedTuple):
    """One kernel: bytes read and written an element of the [M, K] operand, the call for input set i, the entry of the
    table of configurations, and PyTorch's version of the call with its input sets, or None."""

    name: str
    role: str
    reads: float
    writes: float
    run: Callable[[int], object]
    entry: str
    eager: tuple[Callable[[Tensor], object], list[Tensor]] | None = None


def cases(M: int, K: int) -> Iterator[Case]:
    """Every kernel at an `[M, K]` operand; fused SwiGLU makes one from `[M, 2K]`."""
    yield from _quantizers(M, K)
    yield from _grouped(M, K)
    yield from _producers(M, K)


def _inputs(rows: int, columns: int, sets: int = 3) -> list[Tensor]:
    return [torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") for _ in range(sets)]


def _quantizers(M: int, K: int) -> Iterator[Case]:
    xs = _inputs(M, K)
    scale, history = torch.full((1,), 0.5, device="cuda"), torch.zeros(1, device="cuda")

    def q(spec: OperandSpec, *orientations: bool, **options: Tensor) -> Callable[[int], object]:
        return lambda i: quantize.quantize(xs[i % 3], spec, *orientations, **options)

    yield Case("blockwise row", "input", 2, 1, q(BLOCKWISE), "rows", (torch_blockwise, xs))
    yield Case("blockwise row, FP32 scales", "input", 2, 1, q(BLOCKWISE_FP32), "rows")
    yield Case("blockwise column", "input", 2, 1, q(BLOCKWISE, False, True), "columns")
    yield Case("blockwise row+column", "input", 2, 2, q(BLOCKWISE, True, True), "both", (torch_blockwise_both, xs))
    yield Case("blockwise row+column, FP32 scales", "input", 2, 2, q(BLOCKWISE_FP32, True, True), "both")
    yield Case("blockwise 128x128 row+column", "weight", 2, 2, q(SQUARES, True, True), "squares")
    yield Case("mxfp8 row", "input", 2, 1, q(MXFP8), "rows")
    yield Case("mxfp8 row+column", "input", 2, 2, q(MXFP8, True, True), "both of 32")
    yield Case("mxfp8 32x32 row+column", "weight", 2, 2, q(SQUARES_32, True, True), "squares of 32")
    yield Case("tensorwise row, current scaling", "input", 4, 1, q(TENSORWISE), "amax", (torch_tensorwise, xs))
    yield Case("tensorwise row, delayed scaling", "input", 2, 1, q(TENSORWISE, scale=scale, amax_out=history), "cast")
    yield Case("tensorwise row+column, current scaling", "input", 4, 2, q(GRADIENT, True, True), "cast transposed")
    yield Case(
        "tensorwise row+column, delayed scaling",
        "input",
        2,
        2,
        q(GRADIENT, True, True, scale=scale, amax_out=history),
        "cast transposed",
    )


def _grouped(M: int, K: int) -> Iterator[Case]:
    xs = _inputs(M, K)
    offsets = torch.arange(9, device="cuda") * (M // 8 // 16 * 16)
    index = torch.randperm(M, device="cuda")
    stored = [quantize.quantize(x, BLOCKWISE)[0] for x in xs]

    def grouped(spec: OperandSpec, *orientations: bool, **options: object) -> Callable[[int], object]:
        options = {"alignment": 16} | options
        return lambda i: quantize_derive.quantize_grouped(xs[i % 3], offsets, spec, *orientations, **options)

    yield Case("grouped row+column, 8 experts", "grouped", 2, 2, grouped(BLOCKWISE), "grouped")
    yield Case("grouped column, 8 experts", "grouped", 2, 1, grouped(BLOCKWISE, False), "grouped columns")
    picked = grouped(BLOCKWISE, True, False, index=index)
    yield Case("grouped row, rows by index", "grouped", 2, 1, picked, "grouped rows")
    picked = grouped(BLOCKWISE, True, True, index=index, derived=True)
    yield Case("grouped row, derived column, rows by index", "grouped", 2, 2, picked, "grouped derived")
    yield Case(
        "column derived from row bytes",
        "grouped",
        1,
        1,
        lambda i: quantize_derive.derive_colwise(*stored[i % 3], BLOCKWISE),
        "derived",
    )
    yield Case(
        "column derived from row bytes, 8 experts",
        "grouped",
        1,
        1,
        lambda i: quantize_derive.derive_colwise(*stored[i % 3], BLOCKWISE, offsets, 16),
        "derived",
    )
    yield Case("transposed bytes", "weight", 1, 1, lambda i: quantize_derive.transpose(stored[i % 3][0]), "transpose")


def _producers(M: int, K: int) -> Iterator[Case]:
    weight = torch.randn(K, dtype=torch.bfloat16, device="cuda")
    scale, history = torch.full((1,), 0.5, device="cuda"), torch.zeros(1, device="cuda")
    xs, gated = _inputs(M, K), _inputs(M, 2 * K, 2)
    kept = [quantize.quantize(x, BLOCKWISE)[0] for x in gated]
    topk = torch.rand(M, device="cuda")
    delayed = {"scale": scale, "amax_out": history}

    def norm(spec: OperandSpec, colwise: bool, **options: object) -> Callable[[int], object]:
        return lambda i: norm_quantize.rms_norm_quantize(xs[i % 3], weight, spec, colwise=colwise, **options)

    def swiglu(spec: OperandSpec, colwise: bool, **options: object) -> Callable[[int], object]:
        return lambda i: swiglu_quantize.swiglu_quantize(gated[i % 2], spec, colwise=colwise, **options)

    def gradient(inputs: list, spec: OperandSpec, **options: object) -> Callable[[int], object]:
        return lambda i: swiglu_quantize.swiglu_grad_quantize(xs[i % 3], inputs[i % 2], spec, **options)

    def torch_norm(x: Tensor) -> object:
        return torch_blockwise(F.rms_norm(x, (K,), weight, 1e-5))

    def torch_swiglu(x: Tensor) -> object:
        gate, up = x.float().chunk(2, dim=1)
        return torch_blockwise((F.silu(gate) * up).bfloat16())

    yield Case("RMSNorm row", "norm", 2, 1, norm(BLOCKWISE, False), "norm rows", (torch_norm, xs))
    yield Case("RMSNorm row+column", "norm", 2, 2, norm(BLOCKWISE, True), "norm both")
    yield Case("RMSNorm tensorwise row, current scaling", "norm", 4, 1, norm(TENSORWISE, False), "norm rows")
    yield Case("RMSNorm tensorwise row, delayed scaling", "norm", 2, 1, norm(TENSORWISE, False, **delayed), "norm rows")
    yield Case("RMSNorm tensorwise row+column, current scaling", "norm", 4, 2, norm(TENSORWISE, True), "norm both")
    yield Case("SwiGLU row", "swiglu", 4, 1, swiglu(BLOCKWISE, False), "swiglu rows", (torch_swiglu, gated))
    yield Case("SwiGLU row+column", "swiglu", 4, 2, swiglu(BLOCKWISE, True), "swiglu both")
    yield Case("SwiGLU row+column, row weights", "swiglu", 4, 2, swiglu(BLOCKWISE, True, weights=topk), "swiglu both")
    yield Case("SwiGLU tensorwise row+column, current scaling", "swiglu", 8, 2, swiglu(TENSORWISE, True), "swiglu both")
    keeping = swiglu(BLOCKWISE, False, x_spec=BLOCKWISE)
    yield Case("SwiGLU row, fc1's output as bytes", "swiglu", 4, 3, keeping, "swiglu rows, plain")
    full, tensor = {"y_spec": BLOCKWISE}, {"y_spec": TENSORWISE, "y_scale": scale}
    yield Case("SwiGLU gradient, y column", "swiglu", 6, 5, gradient(gated, BLOCKWISE, **full), "swiglu gradient, y")
    yield Case("SwiGLU gradient", "swiglu", 6, 4, gradient(gated, BLOCKWISE), "swiglu gradient")
    weighted = gradient(gated, BLOCKWISE, weights=topk, **full)
    yield Case("SwiGLU gradient, y column, row weights", "swiglu", 6, 5, weighted, "swiglu gradient, y")
    of_bytes = gradient(kept, BLOCKWISE, **full)
    yield Case("SwiGLU gradient, y column, fc1's output in FP8", "swiglu", 4, 5, of_bytes, "swiglu gradient, y")
    current = gradient(gated, GRADIENT, **tensor)
    yield Case("SwiGLU gradient tensorwise, y column", "swiglu", 12, 5, current, "swiglu gradient, y, tensor")
    given = gradient(gated, GRADIENT, scale=scale, amax_out=history, **tensor)
    entry = "swiglu gradient, y, tensor"
    yield Case("SwiGLU gradient tensorwise, y column, delayed scaling", "swiglu", 6, 5, given, entry)


def torch_blockwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blockwise rows as PyTorch would write them (no care for NaN, Inf and zero tiles)."""
    tiles = x.float().view(x.shape[0], -1, 128)
    scale = 448.0 / tiles.abs().amax(-1, keepdim=True)
    scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
    return (tiles * scale).to(torch.float8_e4m3fn).view(x.shape), 1.0 / scale


def torch_blockwise_both(x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch_blockwise(x), torch_blockwise(x.t().contiguous())


def torch_tensorwise(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = 448.0 / x.abs().amax().float()
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), 1.0 / scale


def microseconds(run: Callable[[int], object], calls: int = 6, replays: int = 7) -> float:
    """Device time of one call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [run(i) for i in range(calls)][-1:]
    torch.cuda.synchronize()
    graph.replay()
    replay = milliseconds(graph.replay, torch.device("cuda"), replays, warmup=0)
    del kept
    return replay / calls * 1e3


def copy_microseconds(nbytes: int) -> float:
    """Time of a copy that reads and writes `nbytes` together: the driver's, or a kernel's where that is faster."""
    sources = [torch.randint(0, 1 << 30, (nbytes // 8,), dtype=torch.int32, device="cuda") for _ in range(3)]
    target = torch.empty_like(sources[0])
    by_driver = microseconds(lambda i: target.copy_(sources[i % 3]))
    return min(by_driver, microseconds(lambda i: torch.bitwise_not(sources[i % 3], out=target)))


def bench(name: str, M: int, K: int, args: argparse.Namespace, deadline: float) -> Iterator[dict]:
    """One result a kernel and configuration: name, shape, microseconds, TB/s, percent of a copy, PyTorch's time."""
    copies: dict[int, float] = {}
    for case in cases(M, K):
        if (M, K) not in SHAPES[name].get(case.role, []) or not wanted(case.name, args.kernels):
            continue
        nbytes = int((case.reads + case.writes) * M * K)
        for config in quantize_configs.CONFIGS[case.entry][: None if args.candidates else 1]:
            if time.monotonic() > deadline:
                return
            if nbytes not in copies:
                copies[nbytes] = copy_microseconds(nbytes)
            result = {"kernel": case.name, "shape": [M, K], "config": list(config), "bytes_read": case.reads}
            try:
                with quantize_configs.using(case.entry, config):
                    us = microseconds(case.run)
            except Exception as error:  # a configuration that does not run must not hide the others
                print(f"{case.name}, {tuple(config)}: {error}", file=sys.stderr)
                torch.cuda.synchronize()
                continue
            result |= {"us": us, "tb_per_s": nbytes / us / 1e6, "percent_of_copy": 100 * copies[nbytes] / us}
            result["compiled_us"] = None
            if case.eager is not None and args.compile and not args.candidates:
                compiled, inputs = torch.compile(case.eager[0], dynamic=False), case.eager[1]
                result["compiled_us"] = microseconds(lambda i, f=compiled, xs=inputs: f(xs[i % len(xs)]))
            yield result


def wanted(name: str, parts: list[str]) -> bool:
    return not parts or any(part.lower() in name.lower() for part in parts)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["bars"], help="which operands [M, K]")
    parser.add_argument("--kernels", nargs="*", default=[], help="only kernels whose name contains one of these")
    parser.add_argument("--candidates", action="store_true", help="every configuration, not only the one in use")
    parser.add_argument("--compile", action="store_true", help="PyTorch's compiled versions beside the kernels")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no measurement after so many")
    parser.add_argument("--json", metavar="FILE", help="also append the results there, one JSON object a line")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    deadline = time.monotonic() + args.seconds
    if not torch.cuda.is_available():
        print("bench_quantize: needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in args.shapes:
        for M, K in dict.fromkeys(shape for shapes in SHAPES[name].values() for shape in shapes):
            header = f"{'us':>12}{'TB/s':>8}{'% of copy':>11}{'read/element':>14}{'compiled us':>13}"
            print(f"\n{f'{name} {M} x {K}':54}{header}")
            for r in bench(name, M, K, args, deadline):
                print(line(r, args.candidates), flush=True)
                if args.json:
                    with open(args.json, "a") as file:
                        file.write(json.dumps(r) + "\n")
    return 0


def line(r: dict, with_config: bool) -> str:
    compiled = f"{r['compiled_us']:13.1f}" if r["compiled_us"] else " " * 13 * with_config
    numbers = f"{r['us']:12.1f}{r['tb_per_s']:8.2f}{r['percent_of_copy']:11.1f}{r['bytes_read']:14g}{compiled}"
    return f"{r['kernel']:54}{numbers}" + (f"  {tuple(r['config'])}" if with_config else "")


if __name__ == "__main__":
    sys.exit(main())
