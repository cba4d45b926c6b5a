"""What the second pass is told, and that evaluation has none."""

import torch

from megafp8.config.train import TrainConfig
from megafp8.core.build import RecomputePlan
from megafp8.core.transformer.recompute import recomputed
from megafp8.step import Phase, StepContext


def test_second_pass_is_told():
    """CASES 22, 23: statistics recorded in the second pass would count twice."""
    seen = []

    def part(x, step):
        seen.append((step.phase, step.iteration, step.microbatch))
        return x.sin().cos()

    x = torch.randn(5, requires_grad=True)
    y = recomputed(part, StepContext(iteration=3, microbatch=2), x)
    assert seen == [(Phase.TRAIN, 3, 2)]
    y.sum().backward()
    assert seen == [(Phase.TRAIN, 3, 2), (Phase.RECOMPUTE, 3, 2)]
    expected = torch.autograd.grad(x.sin().cos().sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_only_inputs_are_kept():
    x = torch.randn(1000, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        recomputed(lambda x, step: x.sin().cos().exp(), StepContext(), x)
    assert {t.data_ptr() for t in kept if t.numel()} <= {x.data_ptr()}


def test_evaluation_runs_once():
    calls = []
    with torch.no_grad():
        recomputed(lambda x, step: calls.append(step.phase) or x, StepContext(phase=Phase.EVAL), torch.randn(2))
    assert calls == [Phase.EVAL]


def test_plans():
    assert RecomputePlan.of(TrainConfig()) == RecomputePlan()
    full = TrainConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3)
    assert RecomputePlan.of(full) == RecomputePlan(unit=3)
    block = TrainConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    assert RecomputePlan.of(block) == RecomputePlan(unit=1, layers=3)
    parts = TrainConfig(recompute_granularity="selective", recompute_modules=("mlp", "core_attn"))
    assert RecomputePlan.of(parts).modules == {"mlp", "core_attn"}
