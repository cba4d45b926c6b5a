"""Parallel linears however they are used: frozen, without a sink, deferred, recomputed. What they send, all ranks send
alike and wait for, and results are those of one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafp8.config import Config
from megafp8.fp8 import CommPlan
from megafp8.fp8.comm import ALONE
from megafp8.parallel import build_parallel
from megafp8.step import StepContext
from tests.cases import quick
from tests.distributed.layouts import distance
from tests.distributed.linears import RECIPES, RESULTS, Sink, built, data, joined, parts_of
from tests.distributed.recorder import record


@dataclass(frozen=True)
class Use:
    """bias: there is one. weight, bias_grad, x: they need a gradient. requantize: the linear keeps its input in high
    precision. sink: gradients go there, else to `.grad`. deferred: weight gradients wait. trains: with autograd.
    recomputed: by `torch.utils.checkpoint`."""

    bias: bool = True
    weight: bool = True
    bias_grad: bool = True
    x: bool = True
    requantize: bool = False
    sink: bool = True
    deferred: bool = False
    trains: bool = True
    recomputed: bool = False


USES = {
    "all": Use(),
    "frozen weight": Use(weight=False),
    "frozen bias": Use(bias_grad=False),
    "only the bias": Use(weight=False, x=False),
    "first layer": Use(x=False),
    "only dX": Use(bias=False, weight=False),
    "requantized": Use(requantize=True),
    "requantized first layer": Use(requantize=True, x=False),
    "no sink": Use(sink=False),
    "no sink, frozen weight": Use(sink=False, weight=False),
    "deferred": Use(deferred=True),
    "deferred, requantized": Use(deferred=True, requantize=True),
    "no gradients": Use(trains=False),
    "recomputed": Use(recomputed=True),
    "recomputed, requantized": Use(recomputed=True, requantize=True),
}


class Queue:
    """Weight gradients that wait for their turn."""

    def __init__(self) -> None:
        self.tasks: list = []

    def submit(self, run, held_bytes: int) -> None:
        self.tasks.append(run)


def use(plan: CommPlan, recipe: str, parts: tuple[Tensor, ...], how: Use) -> tuple[Tensor | None, ...]:
    """(y, dx, gradient of the weight, of the bias); None where there is none."""
    x, dy, weight, bias = parts
    linear = built(plan, recipe, weight, bias if how.bias else None, requantize_input=how.requantize)
    linear.weight.requires_grad_(how.weight)
    if how.bias:
        linear.bias.requires_grad_(how.bias_grad)
    sink, queue, x = Sink(), Queue(), x.clone().requires_grad_(how.x)
    step = StepContext(grads=sink, wgrads=queue if how.deferred else None) if how.sink else None
    if not how.trains:
        with torch.no_grad():
            return linear(x, step), None, None, None
    y = checkpoint(lambda x: linear(x, step), x, use_reentrant=False) if how.recomputed else linear(x, step)
    y.backward(dy)
    with torch.no_grad():
        for task in queue.tasks:
            task()

    def gradient(param: Tensor | None) -> Tensor | None:
        if param is None or not param.requires_grad:
            return None
        return sink.buffer(param) if how.sink else param.grad

    return y.detach(), x.grad, gradient(linear.weight), gradient(linear.bias)


def uses_of_a_rank(kind: str, sp: bool, recipe: str, chunks: int, rows: int, fp8: bool) -> list[tuple[Any, ...]]:
    """For each use: results, messages, and those that nobody waited for."""
    size = torch.distributed.get_world_size()
    tp = build_parallel(Config().replace(world_size=size, tensor_model_parallel_size=size), "cpu").tp
    found = []
    for how in USES.values():
        with record() as log:
            results = use(CommPlan(tp, kind, sp, chunks, fp8), recipe, parts_of(kind, tp, sp, data(rows)), how)
        asynchronous = [event for event in log.events if "max" not in event]
        left = {e[5:] for e in asynchronous if e.startswith("post ")} - {
            e[5:] for e in asynchronous if e.startswith("wait ")
        }
        found.append((results, [(m.kind, m.shape, m.dtype) for m in log.messages], left))
    return found


CASES = [
    (world, kind, sp, recipe, chunks, rows, fp8)
    for world, sizes in ((2, (200, 6, 256)), (4, (84, 4)))
    for kind in ("column", "row")
    for sp in (False, True)
    for recipe in RECIPES
    for chunks in (1, 3)
    for rows in sizes
    for fp8 in ((True, False) if sp and rows == sizes[0] else (True,))
]


def is_quick(case: tuple) -> bool:
    world, kind, sp, recipe, chunks, rows, fp8 = case
    shown = recipe in ("blockwise", "tensorwise") and (chunks == 1) == (recipe == "blockwise")
    return world == 2 and rows == 200 and fp8 and shown and (sp or kind == "column")


@pytest.mark.parametrize(("world", "kind", "sp", "recipe", "chunks", "rows", "fp8"), quick(CASES, is_quick))
def test_uses_are_those_of_one_process(pool, world, kind, sp, recipe, chunks, rows, fp8):
    ranks = pool.run_on(world, uses_of_a_rank, kind, sp, recipe, chunks, rows, fp8)
    for number, (title, how) in enumerate(USES.items()):
        results, messages, left = zip(*(rank[number] for rank in ranks), strict=True)
        assert all(sent == messages[0] for sent in messages), title
        assert not any(left), (title, left)
        expected = use(ALONE, recipe, data(rows), how)
        for name, whole, one in zip(RESULTS, joined(kind, sp, list(results)), expected, strict=True):
            assert (whole is None) == (one is None), (title, name)
            if whole is not None:  # what is summed over ranks is rounded to BF16 before
                assert distance(whole, one) <= (5e-3 if whole.dtype == torch.bfloat16 else 1e-6), (title, name)
