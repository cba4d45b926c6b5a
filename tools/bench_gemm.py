"""Times FP8 GEMMs on a GPU: the project's kernels beside cuBLASLt and BF16, on random data with L2 flushed.

One line a GEMM: TFLOPS of every backend, then of the project's best kernel GB/s (operands and scales read once, the
result written once, and read where it is added to) and its speed relative to BF16 and to cuBLASLt in the same
accumulation mode; then what `--fp8-gemm-backend auto` picks, and how far that is behind the best. A time is the median
of device times, without what the host takes to launch. Backends take turns, call by call, and the GPU rests for twice
as long as a call takes: at its power limit it is slower for whoever comes later.

    python tools/bench_gemm.py                                    # every shape
    python tools/bench_gemm.py --shapes grouped --json gemm.json
    python tools/bench_gemm.py --skip tl --write-table            # refresh what `auto` goes by
    python tools/bench_gemm.py --check-auto --quick               # is auto's choice the fastest? A minute's answer

`--check-auto` compares what `auto` picks with the fastest of what it may pick from, each GEMM in the same run, and says
which picks are more than 2% behind (exit code 1; the verdict is the last line of `--json` too). `--quick` looks at a
part of the shapes, every kind of GEMM included, for at most a minute.

Kinds: `tensorwise`, `tensorwise fast` (accumulated by the tensor cores alone), `1D2D` (fprop and dgrad), and wgrads,
added into an FP32 buffer: `tensorwise +=` and `1D1D +=` (`cublaslt` writes, `cublaslt+add` also adds). Grouped ones:
fprop and wgrad of experts; BF16 is `torch._grouped_mm`, for wgrad followed by the addition; `cublaslt` takes one expert
after the other, whose sizes the host knows here. `scaled` are MXFP8's kernels, which decode operands on Hopper.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import bench_timing
import torch
import torch.nn.functional as F
from megafp8.kernels import gemm, gemm_scaled, grouped_gemm
from torch import Tensor

from megafp8.fp8 import gemm_speed

# model -> (layer, N, K) of Y [tokens, N] = X [tokens, K] @ W [N, K].T
LAYERS = {
    "llama3-8b": [("qkv", 6144, 4096), ("proj", 4096, 4096), ("fc1", 28672, 4096), ("fc2", 4096, 14336)],
    "llama3-70b": [("qkv", 10240, 8192), ("proj", 8192, 8192), ("fc1", 57344, 8192), ("fc2", 8192, 28672)],
    "deepseek-v3": [("q_a", 1536, 7168), ("q_b", 24576, 1536), ("kv_b", 32768, 512), ("proj", 7168, 16384),
                    ("shared fc1", 4096, 7168), ("shared fc2", 7168, 2048)],
    "square": [("8192", 8192, 8192)],
}  # fmt: skip
TOKENS = {"llama3-8b": 8192, "llama3-70b": 8192, "deepseek-v3": 4096, "square": 8192}
# (groups, tokens a group) x (N, K)
GROUPS = [(8, 4096), (4, 8192), (32, 1024)]
EXPERT = [("fc1", 4096, 7168), ("fc2", 7168, 2048)]

TW, ROW, SQUARE = (F.ScalingType.TensorWise, F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
OWN = ("gluon", "tl")
KINDS = {"tensorwise": "tensorwise", "tensorwise fast": "tensorwise fast", "1D2D": "1d2d",
         "tensorwise +=": "tensorwise+=", "1D1D +=": "1d1d+="}  # fmt: skip
"""What the table of measured speed calls the kinds that `auto` chooses between backends for."""
BEHIND = 0.02
"""How far what `auto` picks may be behind the best."""
QUICK_SECONDS = 50
"""After which `--quick` begins no other shape: with the last one it stays below a minute."""


class Case(NamedTuple):
    """One GEMM: floating-point operations, bytes, and a call for each backend."""

    name: str
    kind: str
    shape: tuple[int, ...]
    flops: int
    nbytes: int
    runs: dict[str, Callable[[], object]]


def shapes(selection: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """(layer's name, (M, N, K)) of a model's linears."""
    for model, layers in LAYERS.items():
        if selection in ("all", model):
            for layer, N, K in layers:
                yield f"{model} {layer}", (TOKENS[model], N, K)


def fp8(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


def scales(rows: int, columns: int) -> Tensor:
    """1D scales `[rows, columns]`, contiguous along rows."""
    return torch.rand(columns, rows, device="cuda").add_(0.5).t()


def square_scales(rows: int, columns: int) -> Tensor:
    """2D scales with rows padded to a multiple of four, as cuBLASLt wants them."""
    return torch.rand(rows, -(-columns // 4) * 4, device="cuda").add_(0.5)


def rival(a: Tensor, b: Tensor, sa: Tensor, a_kind: F.ScalingType, sb: Tensor, b_kind: F.ScalingType,
          dtype: torch.dtype, fast: bool = False) -> Tensor:  # fmt: skip
    if b_kind is SQUARE:
        sb = sb.t()
    return F.scaled_mm(a, b.t(), sa, a_kind, sb, b_kind, output_dtype=dtype, use_fast_accum=fast)


def dense_cases(name: str, M: int, N: int, K: int) -> Iterator[Case]:
    """Tensorwise and 1D2D at (M, N, K), wgrads of the same layer at (N, K, M)."""
    a, b, one = fp8(M, K), fp8(N, K), torch.ones(1, device="cuda")
    out = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
    flops, operands = 2 * M * N * K, (M + N) * K
    a_bf16, b_bf16 = a.bfloat16(), b.bfloat16().t()
    bf16 = {"bf16": lambda: torch.mm(a_bf16, b_bf16, out=out)}
    for kind, fast in (("tensorwise", False), ("tensorwise fast", True)):
        runs = {own: lambda own=own, fast=fast: gemm.gemm_tensorwise(
            a, b, one, one, out=out, fast_accum=fast, backend=own) for own in OWN}  # fmt: skip
        runs["cublaslt"] = lambda fast=fast: rival(a, b, one, TW, one, TW, torch.bfloat16, fast)
        yield Case(name, kind, (M, N, K), flops, operands + 2 * M * N, runs | bf16)
    sa, padded = scales(M, K // 128), square_scales(N // 128, K // 128)
    sb = padded.narrow(1, 0, K // 128)
    runs = {own: lambda own=own: gemm.gemm_1d2d(a, b, sa, sb, out=out, backend=own) for own in OWN}
    runs["cublaslt"] = lambda: rival(a, b, sa, ROW, padded, SQUARE, torch.bfloat16)
    yield Case(name, "1D2D", (M, N, K), flops, operands + M * K // 32 + 2 * M * N, runs | bf16)
    yield from wgrad_cases(name, N, K, M)


def wgrad_cases(name: str, M: int, N: int, K: int) -> Iterator[Case]:
    """FP32 accumulation, `[M, N] += [M, K] @ [N, K].T`: 1D1D, and tensorwise of E5M2 by E4M3."""
    a, b, one = fp8(M, K), fp8(N, K), torch.ones(1, device="cuda")
    e5m2 = torch.randn(M, K, device="cuda").to(torch.float8_e5m2)
    sa, sb = scales(M, K // 128), scales(N, K // 128)
    grad = torch.zeros(M, N, device="cuda")
    a_bf16, b_bf16 = a.bfloat16(), b.bfloat16().t()
    bf16 = {"bf16": lambda: grad.add_(a_bf16 @ b_bf16)}
    flops, nbytes = 2 * M * N * K, (M + N) * K + 8 * M * N
    runs = {own: lambda own=own: gemm.gemm_tensorwise(
        e5m2, b, one, one, out=grad, accumulate=True, backend=own) for own in OWN}  # fmt: skip
    runs["cublaslt"] = lambda: rival(e5m2, b, one, TW, one, TW, torch.float32)
    runs["cublaslt+add"] = lambda: grad.add_(rival(e5m2, b, one, TW, one, TW, torch.float32))
    yield Case(name, "tensorwise +=", (M, N, K), flops, nbytes, runs | bf16)
    runs = {own: lambda own=own: gemm.gemm_1d1d(a, b, sa, sb, out=grad, accumulate=True, backend=own) for own in OWN}
    runs["cublaslt"] = lambda: rival(a, b, sa, ROW, sb, ROW, torch.float32)
    runs["cublaslt+add"] = lambda: grad.add_(rival(a, b, sa, ROW, sb, ROW, torch.float32))
    yield Case(name, "1D1D +=", (M, N, K), flops, nbytes + (M + N) * K // 32, runs | bf16)


def grouped_cases(groups: int, per_group: int, name: str, N: int, K: int) -> Iterator[Case]:
    """1D2D over rows and 1D1D over tokens, groups of one size."""
    T = groups * per_group
    ends = (torch.arange(groups, device="cuda") + 1).mul(per_group).to(torch.int32)
    a, b = fp8(T, K), fp8(groups * N, K).view(groups, N, K)
    sa = scales(T, K // 128)
    padded = square_scales(groups * N // 128, K // 128).view(groups, N // 128, -1)
    sb = padded.narrow(2, 0, K // 128)
    out = torch.empty(T, N, dtype=torch.bfloat16, device="cuda")
    a_bf16, b_bf16 = a.bfloat16(), b.bfloat16().transpose(1, 2)
    runs = {own: lambda own=own: grouped_gemm.grouped_gemm_1d2d(
        a, b, sa, sb, ends, out=out, backend=own) for own in OWN}  # fmt: skip
    runs["bf16"] = lambda: torch._grouped_mm(a_bf16, b_bf16, offs=ends)

    def own(of: Tensor, dim: int, size: int) -> list[Tensor]:
        return [of.narrow(dim, g * size, size) for g in range(groups)]

    own_scales = [scales(per_group, K // 128) for _ in range(groups)]
    operands = list(zip(own(a, 0, per_group), b.unbind(), own_scales, padded.unbind(), strict=True))

    def one_by_one() -> Tensor:
        return torch.cat([rival(some, weight, scale, ROW, square, SQUARE, torch.bfloat16)
                          for some, weight, scale, square in operands])  # fmt: skip

    runs["cublaslt"] = one_by_one
    flops, title = 2 * T * N * K, f"{groups} x {per_group} {name}"
    yield Case(title, "grouped 1D2D", (T, N, K), flops, T * (K + K // 32) + groups * N * K + 2 * T * N, runs)
    codes = [torch.full(shape, 127, dtype=torch.uint8, device="cuda") for shape in (
        (T, K // 32), (groups, N // 32, K // 32), (N, T // 32), (K, T // 32))]  # fmt: skip
    mx = {"scaled": lambda: gemm_scaled.grouped_gemm_mxfp8(a, b, codes[0], codes[1], ends, out=out)}
    nbytes = T * (K + K // 32) + groups * N * K + 2 * T * N
    yield Case(title, "grouped MXFP8", (T, N, K), flops, nbytes, mx | {"bf16": runs["bf16"]})
    x, y = fp8(N, T), fp8(K, T)
    sx, sy = scales(N, T // 128 + groups), scales(K, T // 128 + groups)
    grad = torch.zeros(groups, N, K, device="cuda")
    x_bf16, y_bf16 = x.bfloat16(), y.bfloat16().t()
    runs = {own: lambda own=own: grouped_gemm.grouped_wgrad_1d1d(
        x, y, sx, sy, ends, out=grad, accumulate=True, padding=16, backend=own) for own in OWN}  # fmt: skip
    runs["bf16"] = lambda: grad.add_(torch._grouped_mm(x_bf16, y_bf16, offs=ends))

    pairs = list(zip(own(x, 1, per_group), own(y, 1, per_group), own(sx, 1, per_group // 128),
                     own(sy, 1, per_group // 128), grad.unbind(), strict=True))  # fmt: skip

    def add_one_by_one() -> None:
        for one, other, scale, other_scale, sum_ in pairs:
            sum_.add_(rival(one, other, scale, ROW, other_scale, ROW, torch.float32))

    runs["cublaslt"] = add_one_by_one
    nbytes = (N + K) * (T + T // 32) + 8 * groups * N * K
    yield Case(title, "grouped 1D1D +=", (N, K, T), flops, nbytes, runs)
    mx = {"scaled": lambda: gemm_scaled.grouped_wgrad_mxfp8(
        x, y, codes[2], codes[3], ends, out=grad, accumulate=True, padding=16)}  # fmt: skip
    yield Case(title, "grouped MXFP8 +=", (N, K, T), flops, nbytes, mx | {"bf16": runs["bf16"]})


def seconds(
    runs: dict[str, Callable[[], object]], flush: Tensor, repeats: int, sleep_cycles: int = 500_000
) -> dict[str, float]:
    """Median device times, the runs in turn. The device sleeps first (500,000 cycles are about 0.3 ms), so that it is
    rested, and a launch is queued before the clock starts."""
    for run in runs.values():
        run()
        run()

    def rest() -> None:
        flush.zero_()
        torch.cuda._sleep(sleep_cycles)

    times = bench_timing.in_turn(runs, torch.device("cuda"), repeats, before=rest)
    return {name: statistics.median(found) / 1e3 for name, found in times.items()}


def bench(case: Case, flush: Tensor, repeats: int, skip: tuple[str, ...] = ()) -> dict:
    """TFLOPS of every backend, and what the line says of the best kernel of the project."""
    rest = max(500_000, int(2 * case.flops / 1e15 * 1.7e9))  # twice the time at 1 PFLOPS, at 1.7 GHz
    times = seconds({name: run for name, run in case.runs.items() if name not in skip}, flush, repeats, rest)
    best = min((own for own in (*OWN, "scaled") if own in times), key=times.__getitem__)
    return {
        "name": case.name, "kind": case.kind, "shape": list(case.shape), "best": best,
        "tflops": {backend: case.flops / time / 1e12 for backend, time in times.items()},
        "gb_per_s": case.nbytes / times[best] / 1e9,
        **{f"ratio_to_{other}": times[other] / times[best] for other in times if other not in (*OWN, "scaled")},
        **picked(case, times),
    }  # fmt: skip


def measured(case: Case, times: dict[str, float]) -> dict[str, float]:
    """Seconds of what `auto` chooses between, in its order: cuBLASLt, with the addition where there is one, kernels."""
    return {"cublaslt": times.get("cublaslt+add", times.get("cublaslt")), "triton": times["gluon"]}


def picked(case: Case, times: dict[str, float]) -> dict:
    """What `auto` picks, the best of what it may pick, and the speed of the one relative to the other.

    Experts always go to the kernels, which alone don't wait for their sizes.
    """
    if "gluon" not in times or "cublaslt" not in times:
        return {}
    of, weight = measured(case, times), case.shape[:2] if case.kind.endswith("+=") else case.shape[1:]
    name, best = "triton", min(of, key=of.__getitem__)
    if case.kind in KINDS:
        name = gemm_speed.fastest(torch.cuda.get_device_name(), KINDS[case.kind], tuple(weight), tuple(of))
    return {"auto": name, "auto_ratio": of[best] / of[name], "auto_ms": of[name] * 1e3, "best_ms": of[best] * 1e3,
            "fastest": best}  # fmt: skip


def verdict(results: list[dict]) -> dict:
    """Whether `auto` was ever more than `BEHIND` behind the best; without a GEMM to judge by, it fails."""
    checked = [result for result in results if "auto" in result]
    behind = [f"{r['name']} {r['kind']}" for r in checked if 1 - r["auto_ratio"] > BEHIND]
    worst = max((1 - r["auto_ratio"] for r in checked), default=0.0)
    return {"check": "auto", "gemms": len(checked), "kinds": sorted({r["kind"] for r in checked}), "worst": worst,
            "limit": BEHIND, "behind": behind, "passed": bool(checked) and not behind}  # fmt: skip


def verdict_line(said: dict) -> str:
    if not said["gemms"]:
        return "auto: FAIL, no GEMM was measured that it chooses a backend for (it needs gluon and cublaslt)"
    word, behind = "pass" if said["passed"] else "FAIL", ""
    if said["behind"]:
        behind = f"; more than {said['limit']:.0%}: {', '.join(said['behind'])}"
    many = f"{said['gemms']} GEMMs of {len(said['kinds'])} kinds"
    return f"auto: {word}, {many}, at most {said['worst']:.1%} behind the best{behind}"


def table(results: list[dict]) -> dict[str, list]:
    """What `gemm_speed` looks up: kind -> [[M, N, K, {backend: TFLOPS}]]."""
    rows: dict[str, list] = {}
    for result in results:
        if result["kind"] in KINDS:
            tflops = result["tflops"]
            rival = tflops.get("cublaslt+add", tflops["cublaslt"])
            row = [*result["shape"], {"cublaslt": round(rival), "triton": round(tflops["gluon"])}]
            rows.setdefault(KINDS[result["kind"]], []).append(row)
    return rows


def write_table(results: list[dict], device: str, path: Path) -> None:
    """Replaces a device's figures in the table, of the GEMMs that were measured. One GEMM a line."""
    everything = json.loads(path.read_text()) if path.exists() else {}
    kinds = everything.setdefault(device, {})
    for kind, rows in table(results).items():
        shapes = [row[:3] for row in rows]
        kinds[kind] = [row for row in kinds.get(kind, []) if row[:3] not in shapes] + rows
    kinds = [
        f' "{name}": {{\n'
        + ",\n".join(f'  "{k}": [\n' + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
                     for k, rows in kinds.items())
        + "\n }" for name, kinds in everything.items()
    ]  # fmt: skip
    path.write_text("{\n" + ",\n".join(kinds) + "\n}\n")


def line(result: dict) -> str:
    shape = "x".join(map(str, result["shape"]))
    tflops = "  ".join(f"{backend} {value:5.0f}" for backend, value in result["tflops"].items())
    ratios = "  ".join(f"{value:.2f}x {key[9:]}" for key, value in result.items() if key.startswith("ratio_to_"))
    auto = ""
    if "auto" in result:
        ratio, mine, best = (result[key] for key in ("auto_ratio", "auto_ms", "best_ms"))
        auto = f"  auto {result['auto']} {ratio:.2f} ({mine:.3f} ms; {result['fastest']} {best:.3f})"
    head = f"{result['name']:24}{shape:18}{result['kind']:16}"
    return f"{head}{tflops}  TFLOPS  {result['gb_per_s']:.0f} GB/s  {ratios}{auto}"


def makers(selection: str, quick: bool = False) -> list[Callable[[], Iterator[Case]]]:
    """What makes the cases of each shape, operands included. quick: dense and grouped in turn, small first."""
    dense = [partial(dense_cases, name, *shape) for name, shape in shapes(selection)]
    grouped = []
    if selection in ("all", "grouped"):
        grouped = [partial(grouped_cases, *sizes, *layer) for sizes in GROUPS for layer in EXPERT]
    if not quick:
        return dense + grouped
    dense.sort(key=lambda maker: math.prod(maker.args[1:]))
    return [maker for pair in zip_longest(dense, grouped) for maker in pair if maker is not None]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", choices=["all", "grouped", *LAYERS], default="all")
    parser.add_argument("--only", default="", help="only kinds that contain this")
    parser.add_argument("--repeats", type=int, help="timed calls a backend (default: 11, 5 with --quick)")
    parser.add_argument("--check-auto", action="store_true",
                        help="say whether what auto picks is ever more than 2%% behind; exit with 1 if so")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="at most a minute: without tl, a part of the shapes")
    parser.add_argument("--skip", nargs="*", default=[], metavar="BACKEND", help="backends to leave out, such as tl")
    parser.add_argument("--json", metavar="FILE", help="also write the results there, one JSON object a line")
    parser.add_argument("--write-table", nargs="?", type=Path, const=gemm_speed.TABLE, metavar="FILE",
                        help="refresh the table that auto goes by (default: the one in the package)")  # fmt: skip
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench_gemm: needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = measure(args)
    if args.write_table:
        write_table(results, torch.cuda.get_device_name(), args.write_table)
    if not args.check_auto:
        return 0
    said = verdict(results)
    save(args.json, [*results, said])
    print(verdict_line(said) + " (by the table before this run)" * (args.write_table is not None))
    return 0 if said["passed"] else 1


def save(path: str | None, lines: list[dict]) -> None:
    if path:
        with open(path, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def measure(args: argparse.Namespace) -> list[dict]:
    """Times the GEMMs that were asked for, prints a line for each, and saves what there is so far."""
    start, flush = time.monotonic(), torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    skip = (*args.skip, "tl") if args.quick else tuple(args.skip)
    results, todo = [], makers(args.shapes, args.quick)
    for done, maker in enumerate(todo):
        if args.quick and time.monotonic() - start > QUICK_SECONDS:
            print(f"--quick: {len(todo) - done} of {len(todo)} shapes left out")
            break
        for case in maker():
            if args.only in case.kind:
                results.append(bench(case, flush, args.repeats or (5 if args.quick else 11), skip))
                print(line(results[-1]), flush=True)
                save(args.json, results)
    return results


if __name__ == "__main__":
    sys.exit(main())
