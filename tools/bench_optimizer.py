"""Times the optimizer on a GPU, and measures what a rank holds, on layers of Llama-3-8B.

    python tools/bench_optimizer.py                  # TB/s against a copy, and against torch.optim.AdamW(fused=True)
    python tools/bench_optimizer.py --memory         # resident weights + gradients + optimizer, by CUDA's allocator
    python tools/bench_optimizer.py --only bf16 --layers 4

An update is counted at the bytes that it can't avoid: gradient 4, and for FP32 state master 8, moments 16, BF16 weight
2 (30 a parameter); an FP8 primary weight 1 instead of 2. The copy beside it moves as many bytes in the same run. Times
are medians of three in a row.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator

import bench_timing
import torch
from torch import Tensor, nn

from megafp8.fp8 import get_recipe
from megafp8.fp8.param import Weight
from megafp8.optimizer import AdamWOptions, Optimizer, Sharding
from megafp8.optimizer.adamw import Rates, step_scalars
from megafp8.optimizer.precision import FP32_STATE, Precision
from megafp8.params import Init, ParamSpec, attach_spec

LAYER = {
    "norm1.weight": (4096,),
    "qkv.weight": (6144, 4096),
    "proj.weight": (4096, 4096),
    "norm2.weight": (4096,),
    "fc1.weight": (28672, 4096),
    "fc2.weight": (4096, 14336),
}
RECIPES = {
    "tensorwise": {"name": "tensorwise"},
    "blockwise": {"name": "blockwise"},
    "mxfp8 32x32": {"name": "mxfp8"},
    "mxfp8 1x32": {"name": "mxfp8", "weight_tile": "1d"},
}
PRECISIONS = {
    "fp32": FP32_STATE,
    "remainder": Precision("remainder"),
    "bf16 moments": Precision("fp32", "bf16", "bf16"),
    "fp8 moments": Precision("fp32", "fp8", "fp8"),
    "remainder, fp8 moments": Precision("remainder", "fp8", "fp8"),
}
CONSTANTS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def make_optimizer(
    layers: int,
    recipe: str | None = None,
    *,
    primary: bool = False,
    keep_transposed: bool = True,
    precision: Precision = FP32_STATE,
    fused: bool = True,
    device: str = "cuda",
) -> Optimizer:
    """An optimizer of that many layers, masters and gradients random. recipe: a key of RECIPES, of the linears."""
    recipe = None if recipe is None else get_recipe(**RECIPES[recipe])
    pairs = []
    for layer in range(layers):
        for name, shape in LAYER.items():
            spec = ParamSpec(f"layers.{layer}.{name}", shape, Init("zeros"), len(shape) > 1)
            param = attach_spec(nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device)), spec)
            if recipe is not None and len(shape) > 1:
                param.owner = Weight(param, recipe, keep_transposed=keep_transposed)
            pairs.append((spec, param))
    names = {spec.name: precision for spec, _ in pairs}
    sharding = Sharding(fp8_primary=primary)
    optimizer = Optimizer(pairs, AdamWOptions(), seed=1, sharding=sharding, precisions=names, fused=fused)
    for stored in (*optimizer.masters.stored, *optimizer.grads.state.flats):
        if stored.dtype == torch.float32:
            stored.normal_(std=0.02)
    optimizer.write_weights()
    return optimizer


def milliseconds(run: Callable[[], object], repeats: int = 9) -> float:
    """Median device time of a call. Calls follow each other, so that the host is ahead, as it is in training."""
    return bench_timing.milliseconds(run, torch.device("cuda"), repeats, calls=3, ahead=True)


def updater(optimizer: Optimizer) -> Callable[[], None]:
    """All phases from reduced gradients to new weights, without norm and gather."""
    step = torch.ones((), dtype=torch.int64, device="cuda")
    rates = [Rates(1e-4, 0.1 * group.decay) for group in sorted(set(optimizer.groups().values()))]
    scale, skip = (
        torch.full((), 1e-3, device="cuda", dtype=torch.float64),
        torch.zeros((), dtype=torch.bool, device="cuda"),
    )
    scalars = step_scalars(step, scale, skip, rates, beta1=0.9, beta2=0.95)

    def run() -> None:
        for update, grad in zip(optimizer._updates, optimizer.grads.state.flats, strict=True):
            update(grad, scalars, **CONSTANTS)

    return run


def torch_adamw(numel: int) -> Callable[[], None]:
    """PyTorch's fused AdamW on FP32 parameters, and the cast to BF16 weights."""
    params = [nn.Parameter(torch.randn(numel // 8, device="cuda")) for _ in range(8)]
    weights = [p.detach().bfloat16() for p in params]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def run() -> None:
        optimizer.step()
        torch._foreach_copy_(weights, [p.detach() for p in params])

    return run


def copy_ms(nbytes: float) -> float:
    """Time of a device copy that reads and writes `nbytes` together."""
    source = torch.randint(0, 255, (int(nbytes) // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source))


def update_bytes(precision: Precision, weight: int) -> float:
    """Bytes a parameter that an update can't avoid. weight: bytes of the new one."""
    master = 2 * precision.master_bytes + (2 if precision.master == "remainder" else 0)
    return 4 + master + 2 * precision.moment_bytes + weight


def cases(layers: int) -> Iterator[tuple[str, float, Callable[[], Callable[[], object]]]]:
    """(name, bytes a parameter, what makes the call)."""
    numel = sum(map(_numel, LAYER.values())) * layers
    yield "torch fused AdamW + cast", 34, lambda: torch_adamw(numel)
    yield "AdamW, fp32 state", 30, lambda: updater(make_optimizer(layers))
    for name, precision in list(PRECISIONS.items())[1:]:
        make = lambda p=precision: updater(make_optimizer(layers, precision=p))  # noqa: E731
        yield f"AdamW, {name}", update_bytes(precision, 2), make
    for recipe in RECIPES:
        make = lambda r=recipe: updater(make_optimizer(layers, r, primary=True))  # noqa: E731
        yield f"AdamW, FP8 primary {recipe}", 29 if "1x32" not in recipe else 30, make
    yield "gradient norm", 4, lambda: norm(make_optimizer(layers))
    yield "whole step, fp32 state", 34, lambda: step(make_optimizer(layers))
    yield "whole step, FP8 primary blockwise", 33, lambda: step(make_optimizer(layers, "blockwise", primary=True))


def norm(optimizer: Optimizer) -> Callable[[], Tensor]:
    return lambda: optimizer._measure.norm(optimizer.grads.parts())


def step(optimizer: Optimizer) -> Callable[[], object]:
    tokens = torch.full((), 8192.0, device="cuda")
    return lambda: optimizer.step(lr=1e-4, weight_decay=0.1, valid_tokens=tokens)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def bench(layers: int, only: str) -> Iterator[dict]:
    """One result a case: milliseconds, TB/s, percent of a copy, parameters."""
    numel = sum(map(_numel, LAYER.values())) * layers
    for name, nbytes, make in cases(layers):
        if only not in name:
            continue
        run = make()
        time = milliseconds(run)
        del run
        gc.collect()
        yield {
            "case": name,
            "bytes": nbytes,
            "ms": time,
            "tb_per_s": nbytes * numel / time / 1e9,
            "percent_of_copy": 100 * copy_ms(nbytes * numel) / time,
        }


def memory(layers: int) -> Iterator[dict]:
    """Bytes a parameter that stay allocated: weights, FP8 copies of forward and backward, gradients, optimizer."""
    numel = sum(map(_numel, LAYER.values())) * layers
    variants = [("BF16", None, False, True)]
    for recipe in RECIPES:
        variants += [
            (f"{recipe}, BF16 weights", recipe, False, True),
            (f"{recipe}, FP8 primary", recipe, True, True),
            (f"{recipe}, FP8 primary, transposed on use", recipe, True, False),
        ]
    reference = None
    for name, recipe, primary, keep in variants:
        gc.collect()
        before = torch.cuda.memory_allocated()
        optimizer = make_optimizer(layers, recipe, primary=primary, keep_transposed=keep)
        step(optimizer)()
        for param in optimizer.weights.params.values():
            if isinstance(getattr(param, "owner", None), Weight):
                for gemm in ("fprop", "dgrad"):
                    param.owner.operand(gemm)
        torch.cuda.synchronize()
        held = (torch.cuda.memory_allocated() - before) / numel
        reference = held if reference is None else reference
        del optimizer, param
        yield {"case": name, "bytes": held, "of_bf16": held / reference}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="of Llama-3-8B, 218 million parameters each (default: 2)")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--json", metavar="FILE", help="also write the results there, one JSON object a line")
    args = parser.parse_args(argv)
    if args.layers < 1:
        print(f"bench_optimizer: --layers {args.layers}: give 1 or more", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench_optimizer: needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.layers} layers")
    results = []
    if args.memory:
        print(f"{'held':45}{'bytes a parameter':>18}{'of BF16':>10}")
        for r in memory(args.layers):
            results.append(r)
            print(f"{r['case']:45}{r['bytes']:18.4f}{r['of_bf16']:10.4f}", flush=True)
    else:
        print(f"{'case':45}{'bytes':>7}{'ms':>9}{'TB/s':>8}{'% of copy':>11}")
        for r in bench(args.layers, args.only):
            results.append(r)
            numbers = f"{r['bytes']:7.2f}{r['ms']:9.3f}{r['tb_per_s']:8.2f}{r['percent_of_copy']:11.1f}"
            print(f"{r['case']:45}{numbers}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            file.writelines(json.dumps(r) + "\n" for r in results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
