"""Steps on several ranks: all skip or none, replicas never drift, one reduction a step, parameters without gradient."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megafp8.optimizer import AdamWOptions, Optimizer
from megafp8.parallel import build_parallel
from megafp8.params import Init, ParamSpec, attach_spec
from megafp8.step import StepContext
from tests.cases import quick
from tests.distributed import layouts
from tests.distributed.layouts import LLAMA, Layout, make_config, run_layout
from tests.distributed.recorder import record

SMALL = LLAMA | {"num_layers": 1}
TP, SP, DP = Layout(tp=2), Layout(tp=2, sp=True), Layout(dp=2)


def break_gradient(stack: ExitStack, *, name: str, value: float) -> None:
    """At step 3, one element of one gradient on rank 1."""
    calls, original = [], Optimizer.reduce_gradients

    def reduce_gradients(self):
        calls.append(1)
        if len(calls) == 3 and self.parallel.rank == 1:
            self.grads.state.views[name].view(-1)[0] = value
        original(self)

    stack.enter_context(mock.patch.object(Optimizer, "reduce_gradients", reduce_gradients))


def break_loss(stack: ExitStack) -> None:
    """At step 3, rank 1's last micro-batch has a weight that is not a number; its gradients are left out."""
    original = layouts.forward_backward

    def forward_backward(model, optimizer, batches, *, iteration, **options):
        output = original(model, optimizer, batches, iteration=iteration, **options)
        if iteration == 3 and optimizer.parallel.rank == 1:
            return type(output)(output.loss * torch.nan, output.valid_tokens)
        return output

    stack.enter_context(mock.patch.object(layouts, "forward_backward", forward_backward))


def counts(model, optimizer: Optimizer, parallel) -> tuple[int, int, Tensor]:
    return optimizer.step_count.item(), optimizer.skipped_count.item(), torch.cat(optimizer.exp_avg_sq.flats)


PART, REPLICA = "layers.0.mlp.fc2.weight", "final_norm.weight"
BREAKS = list(product((TP, SP, DP), (PART, REPLICA), (float("inf"), float("nan"))))
QUICK = {(TP, PART, "inf"), (SP, REPLICA, "nan"), (DP, PART, "nan")}


@pytest.mark.parametrize(
    ("layout", "name", "value"),
    quick(BREAKS, lambda case: (*case[:2], str(case[2])) in QUICK, id=lambda case: "-".join(map(str, case))),
)
def test_all_ranks_skip_a_step_that_one_rank_cannot_make(pool, layout, name, value):
    """CASES 31."""
    fault = partial(break_gradient, name=name, value=value)
    before = run_layout(pool, SMALL, layout, 2, observe=counts)
    after = run_layout(pool, SMALL, layout, 3, fault=fault, observe=counts)
    assert after.skipped == [False, False, True]
    assert all(torch.equal(after.weights[p], before.weights[p]) for p in before.weights)
    for a, b in zip(after.extra, before.extra, strict=True):
        assert a[:2] == (2, 1)
        assert torch.equal(a[2], b[2])
    assert run_layout(pool, SMALL, layout, 5, fault=fault).skipped == [False, False, True, False, False]


def losses_of_ranks(values: dict, layout: Layout, steps: int) -> list[bool]:
    return layouts.train(values, layout, steps, fault=break_loss).skipped


def test_all_ranks_skip_when_one_ranks_loss_is_not_finite(pool):
    for layout in (TP, DP):
        assert pool.run_on(2, losses_of_ranks, SMALL, layout, 4) == [[False, False, True, False]] * 2


@pytest.mark.parametrize(
    ("values", "steps"),
    [({"bf16": True}, 6), *(pytest.param(v, 20, marks=pytest.mark.slow) for v in ({}, {"bf16": True}))],
    ids=["bf16", "fp32-long", "bf16-long"],
)
def test_replicas_are_equal_to_the_last_bit(pool, values, steps):
    """CASES 14: norms (queries' and keys' too) under sequence parallelism; `assemble` compares every copy."""
    run = run_layout(pool, SMALL | values | {"lr": 1e-3, "min_lr": 1e-3}, Layout(tp=2, sp=True, dp=2), steps)
    assert run.losses[-1] < run.losses[0]


def messages(layout: Layout, values: dict) -> list[tuple[str, torch.dtype, int]]:
    """What a step of four micro-batches sends with gradients in it."""
    with record() as log:
        layouts.train(values, layout, 1)
    return [(m.kind, m.dtype, m.size, m.group) for m in log.messages]


def test_one_fp32_reduction_of_gradients_a_step(pool):
    """Four micro-batches: with a buffer for each dtype one all-reduce, and one message for all partial gradients."""
    values = SMALL | {"micro_batch_size": 1}
    (sent, _) = pool.run_on(2, messages, DP, values)
    elements = sum(run.numel() for run in run_layout(pool, values, Layout(), 1).grads.values())
    large = [m for m in sent if m[2] >= 4 * elements]
    assert [(kind, dtype) for kind, dtype, *_ in large] == [("sum", torch.float32)]
    assert len([m for m in sent if m[0] == "sum"]) == 2  # and loss and valid tokens
    per_step = {size: len(pool.run_on(2, messages, SP, values | {"global_batch_size": size})[0]) for size in (1, 2, 3)}
    assert per_step[3] - per_step[2] == per_step[2] - per_step[1]  # nothing but the micro-batches' own messages grows


class Two(nn.Module):
    """A layer that is used and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("used", "idle"):
            spec = ParamSpec(f"{name}.weight", (4, 4), Init("normal", 1.0), True)
            setattr(self, name, attach_spec(nn.Parameter(torch.ones(4, 4)), spec))


def step_with_idle_parameter() -> tuple[list[str], Tensor, Tensor]:
    """Rank 0 uses both parameters, rank 1 only one."""
    parallel = build_parallel(make_config(SMALL, DP), "cpu")
    model = Two()
    pairs = [(param.spec, param) for param in model.parameters()]
    optimizer = Optimizer(pairs, AdamWOptions(), seed=0, parallel=parallel)
    loss = model.used.sum() + (model.idle.sum() if parallel.rank == 0 else 0)
    loss.backward()
    optimizer.reduce_gradients()
    optimizer.step(lr=0.1, weight_decay=0.0, valid_tokens=1)
    views = optimizer.grads.state.views
    return optimizer.grads.unready(), views["used.weight"].clone(), views["idle.weight"].clone()


def test_parameter_without_gradient_hangs_nobody(pool):
    (first, used, idle), (second, *others) = pool.run_on(2, step_with_idle_parameter)
    assert (first, second) == ([], ["idle.weight"])
    assert (used == 2).all()
    assert (idle == 1).all()
    assert torch.equal(torch.stack([used, idle]), torch.stack(others))


def test_dropout_of_whole_hidden_states_is_that_of_one_process(pool):
    """Every tensor-parallel rank drops the same elements, in forward and when it computes a layer again."""
    values = SMALL | {"hidden_dropout": 0.2}
    expected = run_layout(pool, values, Layout(), 3)
    layouts.compare(run_layout(pool, values, TP, 3), expected)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    layouts.compare(run_layout(pool, values | full, TP, 3), expected)
    assert expected.losses != run_layout(pool, SMALL, Layout(), 3).losses


def places(layout: Layout) -> list[str]:
    """Where dropout draws its random numbers on this rank."""
    seen, original = [], StepContext.random_seed
    with mock.patch.object(StepContext, "random_seed", lambda self, place: seen.append(place) or original(self, place)):
        layouts.train(SMALL | {"hidden_dropout": 0.2, "attention_dropout": 0.2}, layout, 1)
    return sorted(set(seen))


def test_ranks_with_other_tokens_or_heads_drop_others(pool):
    for layout, shared in ((TP, 3), (SP, 0)):
        first, second = pool.run_on(2, places, layout)
        assert len(first) == len(second) == 4  # embedding, attention's output, MLP's output, attention weights
        assert len(set(first) & set(second)) == shared
    run = run_layout(pool, SMALL | {"hidden_dropout": 0.2, "attention_dropout": 0.2}, SP, 3)
    assert not any(run.skipped)
