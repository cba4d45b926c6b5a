"""Choice and weights of experts against transformers' routers, and the balancing losses against formulas in FP64."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megafp8.core.moe.routing import RoutingRule, balance_loss, choose, count_tokens, z_loss

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
SIGMOID = RoutingRule(4, sigmoid=True, scaling=2.5, groups=4, group_topk=2)
CASES = {
    "mixtral": ("mixtral", {}, RoutingRule(4)),
    "qwen, normalized": ("qwen", {"norm_topk_prob": True}, RoutingRule(4)),
    "qwen, not normalized": ("qwen", {"norm_topk_prob": False}, RoutingRule(4, pre_softmax=True)),
    "deepseek": ("deepseek", DEEPSEEK, SIGMOID),
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


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("sequences", [1, 4])
def test_balance_loss_is_the_formula(sigmoid, sequences):
    """CASES 52: skewed logits, in FP64: E sum f P, one softmax only."""
    x = logits() + torch.linspace(0, 3, EXPERTS)
    rule = RoutingRule(4, sigmoid=sigmoid)
    losses = []
    for part in x.double().chunk(sequences):
        p = part.sigmoid() / part.sigmoid().sum(1, keepdim=True) if sigmoid else part.softmax(1)
        load = torch.bincount(p.topk(4).indices.flatten(), minlength=EXPERTS) / (4 * len(part))
        losses.append(EXPERTS * (load * p.mean(0)).sum())
    expected = torch.stack(losses).mean()
    assert balance_loss(x, rule, sequences).item() == pytest.approx(expected.item(), rel=1e-6)
    assert expected > 1.05


def test_balance_loss_is_one_when_even():
    even = torch.eye(EXPERTS).repeat(4, 1) * 3
    assert balance_loss(even, RoutingRule(1, pre_softmax=True)).item() == pytest.approx(1.0, rel=1e-6)


def test_balance_loss_of_a_microbatch_depends_on_how_tokens_are_cut():
    """CASES 52: documented for per-microbatch losses: a mean over parts is not the whole's."""
    x = logits() + torch.linspace(0, 3, EXPERTS)
    whole, parts = balance_loss(x, RoutingRule(2)), [balance_loss(part, RoutingRule(2)) for part in x.split([24, 40])]
    assert torch.stack(parts) @ torch.tensor([24 / 64, 40 / 64]) != whole


def test_z_loss_is_the_formula():
    x = logits().double()
    assert z_loss(x).item() == pytest.approx((x.exp().sum(1).log() ** 2).mean().item(), rel=1e-12)


def test_counts():
    experts = torch.tensor([[0, 3], [3, 1], [3, 0]])
    assert count_tokens(experts, 5).tolist() == [2, 1, 0, 3, 0]
