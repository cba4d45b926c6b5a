"""Times every quantization kernel on a GPU: TB/s, and percent of a copy that moves as many bytes in the same run.

Bytes are counted as the algorithm needs them: each input read once and each output written once (tensorwise under
current scaling: the input twice; scales are left out, they are below 1 to 3 %). A call's time is a CUDA graph's replay
time over the calls in it, median of several replays, inputs rotating so that L2 does not hold them. Next to a kernel,
where PyTorch can express it: the same function by `torch.compile`.

    python tools/bench_quantize.py                        # 8192 x 7168 and 16384 x 4096
    python tools/bench_quantize.py --shapes llama3-8b     # activations and weights of that model's linears
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from megafp8.kernels import norm_quantize, quantize, quantize_derive, swiglu_quantize
from torch import Tensor

from megafp8.fp8.formats import E4M3, E5M2, OperandSpec, Scale, Tile

SHAPES = {
    "bars": [(8192, 7168), (16384, 4096)],
    "llama3-8b": [(8192, 4096), (8192, 14336), (6144, 4096), (28672, 4096), (4096, 14336)],
    "llama3-70b": [(8192, 8192), (8192, 28672), (10240, 8192), (57344, 8192), (8192, 28672)],
    "deepseek-v3": [(16384, 7168), (16384, 2048), (32768, 2048), (4096, 7168), (7168, 2048)],
}
BLOCKWISE = OperandSpec(E4M3, Tile("1d", 128), Scale.POW2)
BLOCKWISE_FP32 = OperandSpec(E4M3, Tile("1d", 128), Scale.FP32)
MXFP8 = OperandSpec(E4M3, Tile("1d", 32), Scale.E8M0)
SQUARES = OperandSpec(E4M3, Tile("2d", 128), Scale.POW2)
SQUARES_32 = OperandSpec(E4M3, Tile("2d", 32), Scale.E8M0)
TENSORWISE = OperandSpec(E4M3, Tile("tensor"), Scale.FP32)
GRADIENT = OperandSpec(E5M2, Tile("tensor"), Scale.FP32)


class Case(NamedTuple):
    """One kernel: bytes an element of the [M, K] operand, the call for input set i, PyTorch's version or None."""

    name: str
    bytes_per_element: float
    run: Callable[[int], object]
    eager: Callable[[Tensor], object] | None = None


def cases(M: int, K: int) -> Iterator[Case]:
    """Every kernel at an `[M, K]` operand; fused SwiGLU makes one from `[M, 2K]`."""
    device = torch.device("cuda")
    xs = [torch.randn(M, K, dtype=torch.bfloat16, device=device) for _ in range(3)]
    gated = [torch.randn(M, 2 * K, dtype=torch.bfloat16, device=device) for _ in range(2)]
    weight = torch.randn(K, dtype=torch.bfloat16, device=device)
    scale = torch.full((1,), 0.5, device=device)
    history = torch.zeros(1, device=device)
    offsets = torch.arange(9, device=device) * (M // 8 // 16 * 16)
    rowwise = quantize.quantize(xs[0], BLOCKWISE)[0]
    q = quantize.quantize

    yield Case("blockwise row", 3, lambda i: q(xs[i % 3], BLOCKWISE), torch_blockwise)
    yield Case("blockwise row, FP32 scales", 3, lambda i: q(xs[i % 3], BLOCKWISE_FP32))
    yield Case("blockwise column", 3, lambda i: q(xs[i % 3], BLOCKWISE, False, True))
    yield Case("blockwise row+column", 4, lambda i: q(xs[i % 3], BLOCKWISE, True, True), torch_blockwise_both)
    yield Case("blockwise row+column, FP32 scales", 4, lambda i: q(xs[i % 3], BLOCKWISE_FP32, True, True))
    yield Case("blockwise 128x128 row+column", 4, lambda i: q(xs[i % 3], SQUARES, True, True))
    yield Case("mxfp8 row", 3, lambda i: q(xs[i % 3], MXFP8))
    yield Case("mxfp8 row+column", 4, lambda i: q(xs[i % 3], MXFP8, True, True))
    yield Case("mxfp8 32x32 row+column", 4, lambda i: q(xs[i % 3], SQUARES_32, True, True))
    yield Case("tensorwise row, current scaling", 5, lambda i: q(xs[i % 3], TENSORWISE), torch_tensorwise)
    yield Case("tensorwise row, delayed scaling", 3, lambda i: q(xs[i % 3], TENSORWISE, scale=scale, amax_out=history))
    yield Case("tensorwise row+column, current scaling", 6, lambda i: q(xs[i % 3], GRADIENT, True, True))
    yield Case("tensorwise row+column, delayed scaling", 4, lambda i: q(xs[i % 3], GRADIENT, True, True, scale=scale))
    yield Case(
        "grouped row+column, 8 experts",
        4,
        lambda i: quantize_derive.quantize_grouped(xs[i % 3], offsets, BLOCKWISE, alignment=16),
    )
    yield Case("column derived from row bytes", 2, lambda i: quantize_derive.derive_colwise(*rowwise, BLOCKWISE))
    yield Case("transposed bytes", 2, lambda i: quantize_derive.transpose(rowwise[0]))
    yield Case("RMSNorm row", 3, lambda i: norm_quantize.rms_norm_quantize(xs[i % 3], weight, BLOCKWISE))
    yield Case(
        "RMSNorm row+column", 4, lambda i: norm_quantize.rms_norm_quantize(xs[i % 3], weight, BLOCKWISE, colwise=True)
    )
    yield Case("SwiGLU row", 5, lambda i: swiglu_quantize.swiglu_quantize(gated[i % 2], BLOCKWISE))
    yield Case("SwiGLU row+column", 6, lambda i: swiglu_quantize.swiglu_quantize(gated[i % 2], BLOCKWISE, colwise=True))
    yield Case(
        "SwiGLU gradient row+column, y column",
        11,
        lambda i: swiglu_quantize.swiglu_grad_quantize(xs[i % 3], gated[i % 2], BLOCKWISE, y_spec=BLOCKWISE),
    )


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
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls * 1e3)
    del kept
    return statistics.median(times)


def copy_microseconds(nbytes: int) -> float:
    """Time of a device copy that reads and writes `nbytes` together."""
    sources = [torch.randint(0, 255, (nbytes // 2,), dtype=torch.uint8, device="cuda") for _ in range(3)]
    target = torch.empty_like(sources[0])
    return microseconds(lambda i: target.copy_(sources[i % 3]))


def bench(M: int, K: int, only: str, with_compile: bool) -> Iterator[dict]:
    """One result a kernel: name, shape, microseconds, TB/s, percent of a copy, PyTorch's microseconds."""
    copies: dict[int, float] = {}
    for case in cases(M, K):
        if only not in case.name:
            continue
        nbytes = int(case.bytes_per_element * M * K)
        if nbytes not in copies:
            copies[nbytes] = copy_microseconds(nbytes)
        time = microseconds(case.run)
        result = {
            "kernel": case.name,
            "shape": [M, K],
            "us": time,
            "tb_per_s": nbytes / time / 1e6,
            "percent_of_copy": 100 * copies[nbytes] / time,
            "compiled_us": None,
        }
        if case.eager is not None and with_compile:
            xs = [torch.randn(M, K, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
            compiled = torch.compile(case.eager, dynamic=False)
            result["compiled_us"] = microseconds(lambda i, f=compiled, xs=xs: f(xs[i % 3]))
        yield result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", choices=SHAPES, default="bars", help="which operands [M, K]")
    parser.add_argument("--only", default="", help="only kernels whose name contains this")
    parser.add_argument("--no-compile", action="store_true", help="leave PyTorch's compiled versions out")
    parser.add_argument("--json", metavar="FILE", help="also write the results there, one JSON object a line")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_quantize: needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = []
    for M, K in SHAPES[args.shapes]:
        print(f"\n{M} x {K}{'us':>42}{'TB/s':>8}{'% of copy':>11}{'compiled us':>13}")
        for r in bench(M, K, args.only, not args.no_compile):
            results.append(r)
            compiled = f"{r['compiled_us']:13.1f}" if r["compiled_us"] else ""
            numbers = f"{r['us']:12.1f}{r['tb_per_s']:8.2f}{r['percent_of_copy']:11.1f}{compiled}"
            print(f"{r['kernel']:42}{numbers}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            file.writelines(json.dumps(r) + "\n" for r in results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
