"""The losses that balance experts: against Megatron-LM's functions and formulas in FP64, gradients too."""

import pytest
import torch

from megafp8.core.moe.balancing import balance_loss, balance_scores, global_balance_loss, z_loss
from megafp8.core.moe.routing import RoutingRule, count_tokens
from tests.core.moe.test_routing import EXPERTS, TOKENS, logits, megatron

RULES = {"softmax": RoutingRule(4), "sigmoid": RoutingRule(4, sigmoid=True, groups=4, group_topk=2, group_scores=2)}


def skewed(seed: int = 0) -> torch.Tensor:
    return (logits(seed) + torch.linspace(0, 3, EXPERTS)).requires_grad_()


def in_float64(part: torch.Tensor, sigmoid: bool, shares: torch.Tensor | None = None) -> torch.Tensor:
    """E sum f P of one part of the tokens; f of its own choices, or `shares`."""
    p = part.sigmoid() / part.sigmoid().sum(1, keepdim=True) if sigmoid else part.softmax(1)
    own = torch.bincount(p.topk(4).indices.flatten(), minlength=EXPERTS) / (4 * len(part))
    return EXPERTS * ((own if shares is None else shares) * p.mean(0)).sum()


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("sequences", [1, 4])
def test_balance_loss_is_the_formula(kind, sequences):
    """CASES 52: skewed logits, in FP64: E sum f P, one softmax only."""
    x, exact = skewed(), skewed().detach().double().requires_grad_()
    expected = torch.stack([in_float64(part, kind == "sigmoid") for part in exact.chunk(sequences)]).mean()
    loss = balance_loss(*balance_scores(x, RULES[kind]), sequences)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert expected > 1.05
    loss.backward(), expected.backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", RULES)
def test_balance_loss_is_megatrons(kind):
    x, y, rule = skewed(), skewed(), RULES[kind]
    chosen, scores = megatron().compute_routing_scores_for_aux_loss(y, rule.topk, kind)
    expected = megatron().switch_load_balancing_loss_func(scores, chosen.sum(0), TOKENS, rule.topk, EXPERTS, 0.5)
    loss = 0.5 * balance_loss(*balance_scores(x, rule))
    torch.testing.assert_close(loss, expected)
    loss.backward(), expected.backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("kind", RULES)
def test_global_loss_takes_the_shares_of_the_step_before(kind):
    """Microbatches of one step add up to the loss of the whole batch, which the losses of a microbatch don't."""
    rule, x = RULES[kind], skewed()
    shares = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(1))
    shares /= shares.sum()
    parts = [global_balance_loss(balance_scores(part, rule)[0], shares) * len(part) for part in x.split([24, 40])]
    exact = skewed().detach().double().requires_grad_()
    expected = in_float64(exact, kind == "sigmoid", shares.double())
    total = torch.stack(parts).sum() / TOKENS
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    total.backward(), expected.backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-8)


def test_global_loss_of_the_same_counts_is_megatrons():
    """A batch whose own counts are the shares: what Megatron-LM's running mean gives when the load stands still."""
    rule, x = RULES["softmax"], skewed()
    scores, chosen = balance_scores(x, rule)
    counts = count_tokens(chosen, EXPERTS)
    expected = megatron().switch_load_balancing_loss_func(scores, counts, TOKENS, rule.topk, EXPERTS, 1.0)
    torch.testing.assert_close(global_balance_loss(scores, counts / counts.sum()), expected)


def test_even_shares_have_no_gradient():
    x = skewed()
    global_balance_loss(balance_scores(x, RULES["softmax"])[0], torch.full((EXPERTS,), 1 / EXPERTS)).backward()
    assert x.grad.abs().max() < 1e-8


def test_balance_loss_is_one_when_even():
    even = torch.eye(EXPERTS).repeat(4, 1) * 3
    loss = balance_loss(*balance_scores(even, RoutingRule(1, pre_softmax=True)))
    assert loss.item() == pytest.approx(1.0, rel=1e-6)


def test_balance_loss_of_a_microbatch_depends_on_how_tokens_are_cut():
    """CASES 52: documented for per-microbatch losses: a mean over parts is not the whole's."""
    x, rule = skewed(), RoutingRule(2)
    whole, *parts = (balance_loss(*balance_scores(part, rule)) for part in (x, *x.split([24, 40])))
    assert torch.stack(parts) @ torch.tensor([24 / 64, 40 / 64]) != whole


def test_z_loss_is_the_formula_and_megatrons():
    x = logits().double()
    assert z_loss(x).item() == pytest.approx((x.exp().sum(1).log() ** 2).mean().item(), rel=1e-12)
    torch.testing.assert_close(z_loss(logits()) * 0.1, megatron().z_loss_func(logits(), 0.1))
