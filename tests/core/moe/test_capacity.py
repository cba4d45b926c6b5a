"""Which choices an expert's capacity drops: against Megatron-LM's function and by counting."""

import pytest
import torch

from megafp8.config.model import ModelConfig
from megafp8.core.moe.capacity import Capacity, drop
from megafp8.core.moe.routing import RoutingRule, choose, count_tokens
from tests.core.moe.test_routing import EXPERTS, TOKENS, logits, megatron

TOPK = 4


def routed(seed: int = 0):
    return choose(logits(seed) + torch.linspace(0, 2, EXPERTS), RoutingRule(TOPK, pre_softmax=True))


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.4, 1.0, 1.3, 9.0])
def test_what_is_kept_is_megatrons(policy, factor):
    experts, weights = routed()
    capacity = Capacity(factor, by_position=policy == "position").rows(TOKENS, TOPK, EXPERTS)
    kept = drop(experts, weights, EXPERTS, capacity, by_position=policy == "position")
    probabilities = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights)
    chosen = probabilities > 0
    _, expected = megatron().apply_router_token_dropping(probabilities, chosen, TOPK, factor, policy)
    ours = torch.zeros(TOKENS, EXPERTS + 1).scatter(1, kept, 1.0)[:, :-1].bool()
    counts = ours.sum(0)
    assert torch.equal(counts, chosen.sum(0).clamp(max=capacity))
    if policy == "probs":
        assert torch.equal(ours, expected)
    else:  # their top-k of ones leaves open which of them: ours are the first
        assert torch.equal(expected.sum(0), counts)
        assert torch.equal(ours, chosen & (chosen.cumsum(0) <= capacity))
    assert ((kept == experts) | (kept == EXPERTS)).all()


def test_equal_weights_keep_the_first_tokens():
    experts = torch.zeros(5, 1, dtype=torch.int64)
    assert drop(experts, torch.ones(5, 1), 2, 3, by_position=False).flatten().tolist() == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("capacity", [0, 1, TOKENS])
def test_edges(by_position, capacity):
    experts, weights = routed(1)
    kept = drop(experts, weights, EXPERTS, capacity, by_position=by_position)
    assert count_tokens(kept, EXPERTS).tolist() == count_tokens(experts, EXPERTS).clamp(max=capacity).tolist()
    none = drop(experts[:0], weights[:0], EXPERTS, capacity, by_position=by_position)
    assert none.shape == (0, TOPK)


def test_rows():
    """ceil(T k / E x factor), as Megatron-LM's get_capacity, and no more than there are tokens."""
    for factor in (0.01, 0.5, 1.0, 1.25):
        expected = megatron().get_capacity(61 * TOPK, EXPERTS, factor)
        assert Capacity(factor).rows(61, TOPK, EXPERTS) == expected
    assert Capacity(100.0).rows(61, TOPK, EXPERTS) == 61
    assert Capacity.of(ModelConfig()) is None
