"""Choice and weights of experts against transformers' routers and Megatron-LM's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megafp8.core.moe.routing import RoutingRule, choose, choose_sinkhorn, count_tokens, dealt_out, sinkhorn

EXPERTS, TOKENS = 16, 64


def logits(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)) * 2


def their_router(kind: str, **options):
    """A router of transformers whose logits are its input."""
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

    kinds = {"mixtral": MixtralTopKRouter, "qwen": Qwen2MoeTopKRouter, "deepseek": DeepseekV3TopkRouter}
    config = SimpleNamespace(
        num_experts_per_tok=4, num_local_experts=EXPERTS, num_experts=EXPERTS, hidden_size=EXPERTS, **options
    )
    router = kinds[kind](config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))
    return router


DEEPSEEK = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
SIGMOID = RoutingRule(4, sigmoid=True, scaling=2.5, groups=4, group_topk=2, group_scores=2)
CASES = {
    "mixtral": ("mixtral", {}, RoutingRule(4)),
    "qwen, normalized": ("qwen", {"norm_topk_prob": True}, RoutingRule(4)),
    "qwen, not normalized": ("qwen", {"norm_topk_prob": False}, RoutingRule(4, pre_softmax=True)),
    "deepseek": ("deepseek", DEEPSEEK, SIGMOID),
    "deepseek, three groups": ("deepseek", DEEPSEEK | {"topk_group": 3}, replace(SIGMOID, group_topk=3)),
    "deepseek, not normalized": ("deepseek", DEEPSEEK | {"norm_topk_prob": False}, replace(SIGMOID, normalize=False)),
    "deepseek, one group": (
        "deepseek",
        DEEPSEEK | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        RoutingRule(4, sigmoid=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_transformers(name):
    """CASES 50."""
    kind, options, rule = CASES[name]
    router, bias = their_router(kind, **options), None
    if kind == "deepseek":
        bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1)) * 0.3
        router.e_score_correction_bias.copy_(bias)
    _, expected, where = router(logits())
    experts, weights = choose(logits(), rule, bias)
    spread = torch.zeros(TOKENS, EXPERTS).scatter(1, where, expected.detach())
    torch.testing.assert_close(torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights), spread)
    assert not torch.equal(spread, torch.zeros(TOKENS, EXPERTS).scatter(1, choose(logits(5), rule)[0], 1.0))


@pytest.mark.parametrize("rule", [RoutingRule(2), RoutingRule(3, sigmoid=True), RoutingRule(2, pre_softmax=True)])
def test_ties_go_to_the_lowest_number(rule):
    experts, _ = choose(torch.zeros(5, EXPERTS), rule)
    assert torch.equal(experts, torch.arange(rule.topk).expand(5, -1))
    tied = torch.zeros(1, EXPERTS)
    tied[0, [3, 7, 11, 12]] = 1.0
    assert choose(tied, rule)[0][0].tolist() == [3, 7, 11][: rule.topk]


def test_ties_between_groups_go_to_the_lowest():
    experts, _ = choose(torch.zeros(1, EXPERTS), SIGMOID)
    assert experts[0].tolist() == [0, 1, 2, 3]


def test_bias_selects_and_does_not_weigh():
    bias = torch.zeros(EXPERTS)
    bias[9] = 10.0
    rule = RoutingRule(2, sigmoid=True, normalize=False)
    experts, weights = choose(logits(), rule, bias)
    assert (experts[:, 0] == 9).all()
    torch.testing.assert_close(weights[:, 0], logits()[:, 9].sigmoid())


def test_groups_by_brute_force():
    scores = logits().sigmoid()
    experts, _ = choose(logits(), SIGMOID)
    for row, chosen in zip(scores, experts, strict=True):
        groups = row.view(4, 4)
        worth = groups.topk(2).values.sum(1)
        best = worth.topk(2).indices.tolist()
        allowed = [e for e in range(EXPERTS) if e // 4 in best]
        expected = sorted(allowed, key=lambda e: -row[e].item())[:4]
        assert chosen.tolist() == expected


def test_gradients_reach_the_chosen_only():
    x = logits().requires_grad_()
    experts, weights = choose(x, RoutingRule(2, pre_softmax=False))
    weights[:, 0].sum().backward()
    assert ((x.grad != 0).sum(1) <= 2).all()
    assert (x.grad.gather(1, experts) != 0).all()


def megatron():
    """Megatron-LM's own functions."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.moe import moe_utils

    return moe_utils


MEGATRON = {
    "softmax after": RoutingRule(4),
    "softmax before": RoutingRule(4, pre_softmax=True, scaling=2.5),
    "softmax before, one": RoutingRule(1, pre_softmax=True),
    "softmax, groups": RoutingRule(4, pre_softmax=True, groups=4, group_topk=2, group_scores=2),
    "sigmoid": RoutingRule(4, sigmoid=True, scaling=2.5),
    "sigmoid, groups of one score": RoutingRule(4, sigmoid=True, groups=8, group_topk=4, group_scores=1),
    "sigmoid, one": RoutingRule(1, sigmoid=True),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", MEGATRON)
def test_choice_weights_and_gradients_are_megatrons(name, biased):
    rule = MEGATRON[name]
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(3)) * 0.3 if biased and rule.sigmoid else None
    ours, theirs = logits(2).requires_grad_(), logits(2).requires_grad_()
    experts, weights = choose(ours, rule, bias)
    expected, chosen = megatron().topk_routing_with_score_function(
        theirs,
        rule.topk,
        use_pre_softmax=rule.pre_softmax,
        num_groups=rule.groups or None,
        group_topk=rule.group_topk or None,
        scaling_factor=rule.scaling,
        score_function="sigmoid" if rule.sigmoid else "softmax",
        expert_bias=bias,
    )
    spread = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights)
    assert torch.equal(torch.zeros(TOKENS, EXPERTS).scatter(1, experts, 1.0).bool(), chosen)
    torch.testing.assert_close(spread, expected)
    grad = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(4))
    (spread * grad).sum().backward(), (expected * grad).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("topk", [1, 3])
def test_sinkhorn_is_megatrons_and_even(topk):
    x = logits(7) + torch.linspace(0, 3, EXPERTS)
    ours, theirs = sinkhorn(x), megatron().sinkhorn(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(ours.sum(0), torch.full((EXPERTS,), 1 / EXPERTS), rtol=1e-3, atol=0)
    experts, weights = choose_sinkhorn(x, topk, training=True)
    assert torch.equal(experts.sort(1).values, theirs.topk(topk, 1).indices.sort(1).values)
    scores = x.sigmoid() if topk == 1 else x.softmax(1)
    assert torch.equal(weights, scores.gather(1, experts))
    outside, _ = choose_sinkhorn(x, topk, training=False)
    assert torch.equal(outside, scores.topk(topk, 1).indices)
    uneven, even = count_tokens(outside, EXPERTS), count_tokens(experts, EXPERTS)
    assert even.max() < uneven.max()


def test_sinkhorn_of_large_logits_is_finite():
    assert torch.isfinite(sinkhorn(logits() * 1e3)).all()


def test_dealt_out_is_even():
    """Token by token other experts, all as often; the weights are still the router's."""
    experts = dealt_out(TOKENS, 3, EXPERTS, torch.device("cpu"))
    assert all(len(set(row)) == 3 for row in experts.tolist())
    assert count_tokens(experts, EXPERTS).tolist() == [TOKENS * 3 // EXPERTS] * EXPERTS
    kept, weights = choose(logits(), RoutingRule(3, pre_softmax=True), experts=experts)
    assert kept is experts
    assert torch.equal(weights, logits().softmax(1).gather(1, experts))


def test_counts():
    experts = torch.tensor([[0, 3], [3, 1], [3, 0]])
    assert count_tokens(experts, 5).tolist() == [2, 1, 0, 3, 0]
    assert count_tokens(experts, 3).tolist() == [2, 1, 0], "expert 3 of 3 is none"
