"""One rank of a tensor- or expert-parallel job on a machine without a GPU, and a count of what it would launch.

Collectives return at once (`megafp8/lone.py`). Tensors say that they lie on a GPU, so that the code takes the paths of
one; launches of Triton's kernels go nowhere (`driverless.py`), and what only a GPU multiplies is an allocation here.
Results hold garbage: but the numbers that the host reads, rows by rank and expert, are believable ones.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bench_layer_memory
import torch
from driverless import no_driver
from megafp8.kernels import best_experts, place_rows, zeros
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megafp8 import lone
from megafp8.fp8 import backend, grouped_matmul
from megafp8.lone import lone_parallel
from megafp8.meter import Meter

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TOKENS, NUM_EXPERTS = 128, 128
"""Of a layer with experts: few tokens, since a CPU sorts slowly."""
EXPERTS = (
    f"--num-experts {NUM_EXPERTS} --moe-router-topk 8 --moe-ffn-hidden-size 128 --moe-token-dispatcher-type alltoall"
)
LAYOUTS = {
    "alone": "",
    "tp2": TP2,
    "tp2-overlap": f"{TP2} --tp-comm-overlap",
    "experts": EXPERTS,
    "ep2": f"{EXPERTS} --expert-model-parallel-size 2",
    "ep2-fp8": f"{EXPERTS} --expert-model-parallel-size 2 --moe-fp8-dispatch",
}

PACKAGE, KERNELS = Path(lone.__file__).parent, Path(zeros.__file__).parent
NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach"}
"""Operations that run nothing on a device, besides views."""
STANDS = ("megafp8/lone.py", "kernels/zeros.py")
"""Where operations stand for collectives, and zeros that a GPU fills many at a time."""
Run = Callable[[], None]


@dataclass
class Launched:
    """What forward and backward of a layer start on the device. operations: PyTorch's, by name and code line; kernels:
    Triton's, by name; products: what only a GPU multiplies; collectives: by kind and group."""

    operations: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    products: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)

    def totals(self) -> dict[str, int]:
        return {name: counts.total() for name, counts in vars(self).items()}


class _Operations(TorchDispatchMode):
    """Counts operations that run kernels: no views, no allocations."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NOTHING and not (line := _line()).startswith(STANDS):
            self.found[f"{name} at {line}"] += 1
        return func(*args, **kwargs or {})


def _line() -> str:
    """The innermost line of megafp8 that runs; autograd where there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents or KERNELS in path.parents:
            return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


class _Norm(torch.autograd.Function):
    """One kernel each way on a GPU, where a CPU has many."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, found: Counter[str]) -> Tensor:
        ctx.like, ctx.found = (x, weight), found
        found["rms_norm"] += 1
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.found["rms_norm_backward"] += 1
        return *(torch.empty_like(t) for t in ctx.like), None


class _Products:
    """What stands for functions that only a GPU has: allocations, counted."""

    def __init__(self, found: Counter[str]) -> None:
        self.found = found

    def mm(self, original: Callable) -> Callable:
        """For `torch.mm` and `addmm`, whose other forms stay."""

        def run(*args: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
            if out_dtype is None:
                return original(*args, out=out)
            self.found[original.__name__] += 1
            shape = args[-2].shape[0], args[-1].shape[1]
            if shape == (TOKENS, NUM_EXPERTS):  # a router's: no two microbatches choose alike
                with _disable_current_modes():
                    return torch.randn(shape)
            return torch.empty(shape, dtype=out_dtype) if out is None else out

        return run

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        self.found["mm"] += 1
        return torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.matmul(x, weight.t())

    def put(self, value: Tensor, out: Tensor | None, adds: bool) -> Tensor:
        """Of stacks of experts, which a CPU would add for longer than all else takes."""
        self.found["put"] += out is not None
        return value if out is None else out

    def grouped_mm(self, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        self.found["grouped_mm"] += 1
        shape = (a.shape[0], b.shape[-1]) if b.dim() == 3 else (len(offs), a.shape[0], b.shape[1])
        return torch.empty(shape, dtype=a.dtype)

    def scaled_mm(self, a: Tensor, b: Tensor, *scales: Any, output_dtype: torch.dtype, **options: Any) -> Tensor:
        self.found["scaled_mm"] += 1
        return torch.empty(a.shape[0], b.shape[1], dtype=output_dtype)

    def norm(self, x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
        return _Norm.apply(x, weight, self.found)

    def rms_norm(self, x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        self.found["rms_norm"] += 1
        return torch.empty_like(x), torch.empty(*x.shape[:-1], 1)


def _zeros(device: torch.device, count: int = 1) -> Tensor:
    """A GPU hands out pieces of one fill."""
    return torch.empty(count)


@contextmanager
def pretending(products: Counter[str]) -> Iterator[None]:
    """Inside, tensors say that they are on a GPU."""
    stands = _Products(products)
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.Tensor, "is_cuda", property(lambda x: True)),
            (lone.Copying, "timed", lambda copying, x: nullcontext()),
            (backend, "zero", _zeros),
            (torch, "mm", stands.mm(torch.mm)),
            (torch, "addmm", stands.mm(torch.addmm)),
            (torch.Tensor, "__matmul__", lambda a, b: stands.matmul(a, b)),
            (torch.nn.functional, "linear", stands.linear),
            (grouped_matmul, "put", stands.put),
            (torch, "_grouped_mm", stands.grouped_mm),
            (torch.nn.functional, "scaled_mm", stands.scaled_mm),
            (torch.nn.functional, "rms_norm", stands.norm),
            (place_rows, "place", _place(place_rows.place)),
            (best_experts, "best", _best(best_experts.best)),
            (torch.cuda, "get_device_capability", lambda device: (9, 0)),
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)),
            (torch.ops.aten, "_fused_rms_norm", stands.rms_norm),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@cache
def _counts(choices: int, experts: int, alignment: int) -> Iterator[Tensor]:
    """Rows of each expert, in one microbatch after the other: no two alike."""
    draws = torch.randint(experts, (256, choices))
    rows = torch.stack([torch.bincount(draw, minlength=experts) for draw in draws])
    return itertools.cycle(((rows + alignment - 1) // alignment * alignment).unbind())


def _place(place: Callable) -> Callable:
    """Finds rows on nothing; then how many each expert has, which the host reads, is made up."""

    def run(experts: Tensor, num_experts: int, alignment: int, total: int) -> Any:
        placed = place(experts, num_experts, alignment, total)
        with _disable_current_modes():
            placed.room.copy_(next(_counts(experts.numel(), num_experts, alignment)))
        return placed

    return run


def _best(best: Callable) -> Callable:
    """Chooses experts on nothing; then they are experts that there are."""

    def run(scores: Tensor, count: int) -> Tensor:
        with _disable_current_modes():
            return best(scores, count).zero_()

    return run


@contextmanager
def rank_of(recipe: str, layout: str) -> Iterator[tuple[bench_layer_memory.Layer, Meter]]:
    """A layer of the first rank, and what counts its messages."""
    model, length = ("tiny", TOKENS) if "--num-experts" in LAYOUTS[layout] else ("small", 1024)
    argv = ["--model", model, "--seq-length", str(length), "--micro-batch-size", "1", "--device", "cpu"]
    argv += [f"--flags={LAYOUTS[layout]}"]
    config = bench_layer_memory.config_of(
        bench_layer_memory.arguments().parse_args(argv), recipe, 2 if "2" in layout else 1
    )
    meter = Meter()
    with lone_parallel(config, meter=meter) as parallel:
        yield bench_layer_memory.Layer(config, torch.device("cpu"), parallel), meter


def launched_by(run: Run, meter: Meter, products: Counter[str]) -> Launched:
    """What a call launches; kernels are known already, and what is made once has been made."""
    found = Launched()
    with no_driver() as launches:
        for _ in range(2):
            run()
        launches.clear()
        products.clear()
        before = meter.copy()
        with _Operations(found.operations):
            run()
        found.kernels.update(launch.kernel.__name__ for launch in launches)
    found.products.update(products)
    found.collectives.update({" over ".join(key): calls for key, (_, calls) in meter.since(before).items()})
    return found
