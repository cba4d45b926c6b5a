"""Parallel linears that tests build, each rank's part of the data, and the whole put together again."""

from __future__ import annotations

import math
from contextlib import ExitStack
from unittest import mock

import torch
from torch import Tensor

from megafp8.config import Config
from megafp8.fp8 import CommPlan, Linear, gemm, get_recipe
from megafp8.parallel import Axis, build_parallel
from megafp8.params import GradSink, Init, ParamSpec
from megafp8.step import StepContext
from tests.distributed.recorder import record

RECIPES = {
    "high precision": None,
    "tensorwise": get_recipe("tensorwise"),
    "blockwise": get_recipe("blockwise"),
    "blockwise fp32 scales": get_recipe("blockwise", power_of_two_scales=False),
    "mxfp8": get_recipe("mxfp8"),
}
K, N = 512, 512
RESULTS = ("y", "dx", "dw", "db")
"""Output, gradient of the input, of the weight, of the bias."""


CASES = [(kind, sp, recipe) for kind in ("column", "row") for sp in (False, True) for recipe in RECIPES]
"""(kind, whether sequence-parallel, recipe)."""


class Sink(GradSink):
    """One FP32 buffer a parameter. events: gets a line when a gradient is there."""

    def __init__(self, events: list[str] | None = None):
        self.buffers: dict[int, Tensor] = {}
        self.events = [] if events is None else events

    def buffer(self, param: Tensor) -> Tensor:
        return self.buffers.setdefault(id(param), torch.zeros(param.shape))

    def ready(self, param: Tensor) -> None:
        self.events.append("gradient of the " + ("weight" if param.dim() == 2 else "bias"))


def data(rows: int, nan: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, dy, weight, bias) of the whole linear, BF16; rows differ by orders of magnitude, some are zero."""
    generator = torch.Generator().manual_seed(rows)
    x, dy, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((rows, K), (rows, N), (N, K), (N,)))
    x *= torch.logspace(-3, 3, rows)[:, None]
    dy *= torch.logspace(2, -4, rows)[:, None]
    x[rows // 3] = 0
    if nan:
        x[rows - 1, 5] = math.nan
    return tuple(t.bfloat16() for t in (x, dy, weight * 0.1, bias))


def built(
    plan: CommPlan, recipe: str, weight: Tensor, bias: Tensor | None, *, requantize_input: bool = False
) -> Linear:
    """A linear of these values."""
    linear = Linear(
        weight.shape[1],
        weight.shape[0],
        bias is not None,
        recipe=RECIPES[recipe],
        weight_spec=ParamSpec("linear.weight", tuple(weight.shape), Init("zeros"), True),
        bias_spec=None if bias is None else ParamSpec("linear.bias", tuple(bias.shape), Init("zeros"), False),
        params_dtype=torch.bfloat16,
        comm=plan,
        requantize_input=requantize_input,
    )
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


def run(
    plan: CommPlan,
    recipe: str,
    parts: tuple[Tensor, ...],
    operands: dict | None = None,
    events: list[str] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, dx, main_grad of the weight, of the bias); `operands` collects what the three GEMMs were given, `events` the
    gradients' deliveries."""
    x, dy, weight, bias = parts
    linear = built(plan, recipe, weight, bias)
    sink, x = Sink(events), x.clone().requires_grad_()
    with ExitStack() as stack:
        for name in ("fprop", "dgrad", "wgrad") if operands is not None else ():
            stack.enter_context(mock.patch.object(gemm, name, keeping(name, operands, sink.events)))
        y = linear(x, StepContext(grads=sink))
        y.backward(dy)
    return y.detach(), x.grad, sink.buffer(linear.weight), sink.buffer(linear.bias)


def keeping(name: str, operands: dict, events: list[str]):
    original = getattr(gemm, name)

    def call(a, b, *args, **options):
        operands.setdefault(name, (a, b))
        events.append(name)
        return original(a, b, *args, **options)

    return call


def raw(x: Tensor) -> Tensor:
    """FP8 and E8M0 as bytes, which can be compared."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def bits(operands: dict) -> dict[str, list[Tensor]]:
    """Of each GEMM: data and scales of A, data and scales of B."""
    return {
        name: [raw(t).clone() for side in pair for t in (side.data, side.scale_inv)] for name, pair in operands.items()
    }


def parts_of(kind: str, tp: Axis, sp: bool, whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """This rank's x, dy, weight and bias."""
    x, dy, weight, bias = whole
    rows, (a, b) = slice(*tp.split(len(x))) if sp else slice(None), tp.split(N if kind == "column" else K)
    if kind == "column":
        return x[rows], dy[:, a:b], weight[a:b], bias[a:b]
    return x[:, a:b], dy[rows], weight[:, a:b], bias


def parallel_linear(kind: str, sp: bool, recipe: str, rows: int, chunks: int = 1, fp8: bool = True, nan: bool = False):
    """(results, GEMM operands, messages of forward and backward) of this rank."""
    size = torch.distributed.get_world_size()
    config = Config().replace(world_size=size, tensor_model_parallel_size=size)
    tp = build_parallel(config, "cpu").tp
    plan = CommPlan(tp, kind, sp, chunks, fp8)
    operands: dict = {}
    with record() as log:
        results = run(plan, recipe, parts_of(kind, tp, sp, data(rows, nan)), operands, log.events)
    return results, bits(operands), log


def joined(kind: str, sp: bool, ranks: list[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """The whole linear's results from the ranks'; replicas must agree bitwise. What the ranks lack it lacks."""
    cut = {"column": {"y": 1, "dw": 0, "db": 0}, "row": {"dx": 1, "dw": 1}}[kind]
    rows = {"y": 0, "dx": 0} if sp else {}
    found = []
    for name, parts in zip(RESULTS, zip(*ranks, strict=True), strict=True):
        dim = cut.get(name, rows.get(name))
        if parts[0] is None:
            found.append(None)
        elif dim is not None:
            found.append(torch.cat(parts, dim))
        else:
            found.append(sum(parts) if name == "db" and sp else alike(parts))
    return tuple(found)


def alike(parts: tuple[Tensor, ...]) -> Tensor:
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]
