"""Reductions during backward and gathers during forward: the same bits as without, and really overlapped."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megafp8.fp8 import Linear, get_recipe
from megafp8.optimizer import AdamWOptions, Optimizer, Sharding
from megafp8.params import Init, ParamSpec, initial_value, specs_in_order
from megafp8.step import StepContext
from tests.cases import quick
from tests.distributed.layouts import GPT2, LLAMA, Layout, compare, distance, run_layout
from tests.distributed.recorder import record
from tests.distributed.test_zero import context

ZERO = {"use_distributed_optimizer": True}
OVERLAP = ZERO | {"overlap_grad_reduce": True}
GATHER = OVERLAP | {"overlap_param_gather": True}
BLOCKWISE = {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise"}


def same(a, b) -> None:
    assert (a.losses, a.norms) == (b.losses, b.norms)
    for ours, theirs in ((a.grads, b.grads), (a.weights, b.weights)):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def use_small_buckets(stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(Sharding.__init__, "__defaults__", (*[False] * 5, 3000)))


SMALL_BUCKETS = {"fault": use_small_buckets}


MODELS = {"untied": LLAMA, "tied": GPT2}
DP, MIXED = Layout(dp=2), Layout(tp=2, sp=True, dp=2)


@pytest.mark.parametrize(
    ("name", "layout"),
    quick(
        [(name, layout) for name in MODELS for layout in (DP, MIXED)],
        {("untied", DP), ("tied", MIXED)},
        id=lambda case: f"{case[0]}-{case[1]}",
    ),
)
def test_sharded_and_overlapped_runs_have_the_bits_of_the_plain_one(pool, layout, name):
    plain = run_layout(pool, MODELS[name], layout)
    for values in (ZERO, OVERLAP, GATHER, {"overlap_grad_reduce": True}):
        same(run_layout(pool, MODELS[name] | values, layout, **SMALL_BUCKETS), plain)


def test_sharded_fp8_run_has_the_bits_of_the_plain_one(pool):
    values = LLAMA | BLOCKWISE
    same(run_layout(pool, values | GATHER, Layout(dp=2), 3, **SMALL_BUCKETS), run_layout(pool, values, Layout(dp=2), 3))


def test_three_ranks_add_in_other_orders(pool):
    """Which order a sum is taken in depends on the bucket: near, as between any layouts."""
    values = LLAMA | {"micro_batch_size": 1, "global_batch_size": 6}
    plain = run_layout(pool, values, Layout(), 3)
    compare(run_layout(pool, values | GATHER, Layout(dp=3), 3, **SMALL_BUCKETS), plain)


def test_several_stages_share_nothing_but_their_own_buckets(pool):
    """CASES 20: a tied embedding is held in shards at other offsets on the first and the last stage."""
    layout = Layout(pp=2, dp=2)
    same(run_layout(pool, GPT2 | GATHER, layout, 3, **SMALL_BUCKETS), run_layout(pool, GPT2, layout, 3))


def test_reduction_in_bf16_is_near(pool):
    plain = run_layout(pool, LLAMA, Layout(dp=2), 2)
    half = run_layout(pool, LLAMA | ZERO | {"grad_reduce_in_bf16": True}, Layout(dp=2), 2)
    assert all(distance(half.grads[name], grad) <= 5e-3 for name, grad in plain.grads.items())
    assert all(
        abs(a - b) <= 2e-3 * b for a, b in zip(half.losses + half.norms, plain.losses + plain.norms, strict=True)
    )
    assert any(not torch.equal(half.grads[name], grad) for name, grad in plain.grads.items())


class OutOfOrder(nn.Module):
    """Three layers made as a, b, c and called as a, c, b; one bucket each."""

    def __init__(self, recipe) -> None:
        super().__init__()
        for name in "abc":
            spec = ParamSpec(f"{name}.weight", (64, 64), Init("normal", 0.1), True)
            bias = ParamSpec(f"{name}.bias", (64,), Init("zeros"), False)
            options = {"weight_spec": spec, "bias_spec": bias, "params_dtype": torch.bfloat16}
            setattr(self, name, Linear(64, 64, recipe=recipe, **options))
        with torch.no_grad():
            for spec, param in specs_in_order(self):
                param.copy_(initial_value(spec, 1))

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        return self.b(self.c(self.a(x, step).relu(), step).relu(), step)


def out_of_order(recipe: str | None, overlap: bool) -> tuple[list[float], list[str]]:
    """Losses of some steps, and what the last one sent and waited for."""
    parallel = context(2)
    model = OutOfOrder(get_recipe(recipe) if recipe else None)
    sharding = Sharding(distributed=True, overlap_reduce=overlap, overlap_gather=overlap, bucket_elements=64)
    optimizer = Optimizer(specs_in_order(model), AdamWOptions(), seed=1, parallel=parallel, sharding=sharding)
    if overlap:
        optimizer.wait_before_use(model)
    losses, events = [], []
    for iteration in range(6):
        optimizer.zero_grad(2)
        with record() as log:
            for micro in range(2):
                generator = torch.Generator().manual_seed(100 * iteration + 10 * micro + parallel.rank)
                x = torch.randn(32, 64, generator=generator).bfloat16()
                loss = (model(x, StepContext(grads=optimizer.grads)).float() - x.float()).square().sum()
                log.events.append(f"backward {micro}")
                loss.backward()
                losses.append(loss.item())
            log.events.append("finish")
            optimizer.reduce_gradients()
            optimizer.step(lr=1e-2, weight_decay=0.1, valid_tokens=64)
        events = log.events
    return losses, events


@pytest.mark.parametrize("recipe", [None, "blockwise", "tensorwise"])
def test_weights_are_awaited_by_use(pool, recipe):
    """CASES 48."""
    on, off = (pool.run_on(2, out_of_order, recipe, overlap)[0][0] for overlap in (True, False))
    assert on == off
    assert on[-1] < on[0]


def test_buckets_leave_during_the_last_backward_and_arrive_during_forward(pool):
    for _, events in pool.run_on(2, out_of_order, None, True):
        last = events.index("backward 1")
        during = events[last : events.index("finish")]
        assert sum(e.startswith("post scatter_sum") for e in during) >= 3
        assert not any(e.startswith("post scatter_sum") for e in events[:last])
        assert [e for e in events if e.startswith("post scatter_sum")] == sorted(
            e for e in events if e.startswith("post scatter_sum")
        )
        posts = [i for i, e in enumerate(events) if e.startswith("post gather")]
        assert not any(e.startswith("wait gather") for e in events[posts[0] :])  # left for the next forward


def unequal(overlap: bool = True) -> list[float]:
    """One rank doesn't use `c`: what it has sent must still meet what the other sends. Buffers hold an old step."""
    parallel = context(2)
    model = OutOfOrder(None)
    sharding = Sharding(distributed=True, overlap_reduce=overlap, bucket_elements=64)
    optimizer = Optimizer(specs_in_order(model), AdamWOptions(), seed=1, parallel=parallel, sharding=sharding)
    for view in optimizer.grads.state.views.values():
        view.fill_(torch.nan)
    optimizer.zero_grad(1)
    x = torch.ones(4, 64, dtype=torch.bfloat16)
    step = StepContext(grads=optimizer.grads)
    y = model.b(model.a(x, step), step) if parallel.rank else model(x, step)
    y.float().sum().backward()
    optimizer.reduce_gradients()
    stats = optimizer.step(lr=1e-2, weight_decay=0.0, valid_tokens=4)
    return [stats.grad_norm.item(), *(p.float().sum().item() for p in model.parameters())]


def test_buckets_leave_in_one_order_whatever_gets_ready_first(pool):
    first, second = pool.run_on(2, unequal)
    assert first == second
    assert all(value == value for value in first)
    assert pool.run_on(2, unequal, False) == [first, first]
