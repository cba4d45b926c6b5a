"""Stateless dropout: rate, scale, gradient mask, independence of places."""

import pytest
import torch

from megafp8.core.tensor_parallel.random import dropout, seeded
from megafp8.step import Phase, StepContext


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rate_scale_and_gradient(dtype):
    x = torch.ones(200, 500, dtype=dtype, requires_grad=True)
    y = dropout(x, 0.2, StepContext(seed=4), "layers.0.mlp")
    kept = y != 0
    assert kept.float().mean().item() == pytest.approx(0.8, abs=0.005)
    assert (y[kept] == torch.tensor(1.25, dtype=dtype)).all()
    grad = torch.randn(200, 500).to(dtype)
    y.backward(grad)
    assert torch.equal(x.grad, torch.where(kept, grad * 1.25, 0))


def test_places_and_steps_differ_and_repeat():
    x = torch.ones(64, 64)
    masks = [
        dropout(x, 0.5, StepContext(**fields), place)
        for place in ("layers.0.mlp", "layers.1.mlp")
        for fields in ({}, {"seed": 1}, {"iteration": 1}, {"microbatch": 1}, {"sample_group": 1})
    ]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert 0.4 < (a == b).float().mean() < 0.6
    assert torch.equal(masks[0], dropout(x, 0.5, StepContext().recompute(), "layers.0.mlp"))


def test_off():
    x = torch.randn(5)
    assert dropout(x, 0.0, StepContext(), "a") is x
    assert dropout(x, 0.5, StepContext(phase=Phase.EVAL), "a") is x
    assert (dropout(x, 1.0, StepContext(), "a") == 0).all()


def test_seeded_restores_the_generator():
    state = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with seeded(7, torch.device("cpu")):
            draws.append(torch.rand(3))
    assert torch.equal(*draws)
    assert torch.equal(torch.get_rng_state(), state)
