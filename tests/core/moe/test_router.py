"""The router in its layer: capacity, forced balance, several losses at once, the global loss, what is logged."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.build import BuildContext
from megafp8.core.moe.balancing import balance_loss, balance_scores, global_balance_loss
from megafp8.core.moe.layer import MoELayer
from megafp8.core.moe.logits import three_parts
from megafp8.core.moe.routing import RoutingRule, choose
from megafp8.core.moe.shares import LastShares
from megafp8.core.transformer.core_attention import Sequences
from megafp8.fp8 import get_recipe
from megafp8.fp8.policy import Policy
from megafp8.step import Phase, Statistics, StepContext
from tests.core.families import MOE
from tests.core.helpers import Sink, randomize, relative_error

SHAPE = (2, 16)
TOKENS = SHAPE[0] * SHAPE[1]


def layer(dtype=torch.float32, recipe=None, **fields) -> MoELayer:
    build = {"recipe_of": Policy(get_recipe(recipe))} if recipe else {}
    made = MoELayer("layers.0.mlp", BuildContext(replace(MOE, **fields), dtype=dtype, **build))
    randomize(made, 3)
    return made


def inputs(dtype=torch.float32, tokens=TOKENS):
    x = torch.randn(tokens, MOE.hidden_size, generator=torch.Generator().manual_seed(0))
    return x.to(dtype).requires_grad_()


def swiglu(x, fc1, fc2):
    gate, up = (x @ fc1.T).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ fc2.T


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_dropped_tokens_against_a_loop_in_float64(policy, fill):
    """Values and all gradients; a token all of whose choices are dropped gets nothing."""
    capacity = 5  # ceil(32 * 2 / 8 * 0.6)
    made = layer(moe_expert_capacity_factor=0.6, moe_token_drop_policy=policy, moe_pad_expert_input_to_capacity=fill)
    x = inputs()
    statistics, grad = Statistics(), torch.randn(TOKENS, MOE.hidden_size)
    out = made(x, Sequences(*SHAPE), StepContext(statistics=statistics))
    out.backward(grad)

    exact = {name: p.detach().double().requires_grad_() for name, p in made.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    experts, weights = choose(x64 @ exact["router.weight"].T, RoutingRule(2))
    expected, dropped = torch.zeros(TOKENS, MOE.hidden_size, dtype=torch.float64), 0
    for e in range(MOE.num_experts):
        rows = [(weights[t, j].item(), t, j) for t in range(TOKENS) for j in range(2) if experts[t, j] == e]
        rows = sorted(rows, key=lambda row: -row[0]) if policy == "probs" else rows
        dropped += max(0, len(rows) - capacity)
        for _, t, j in rows[:capacity]:
            mlp = swiglu(x64[t], exact[f"experts.{e}.fc1.weight"], exact[f"experts.{e}.fc2.weight"])
            expected = expected.index_add(0, torch.tensor([t]), (weights[t, j] * mlp)[None])
    expected.backward(grad.double())
    assert dropped > 5
    assert statistics.means["dropped_share"].tolist() == [dropped, TOKENS * 2]
    assert relative_error(out, expected) < 1e-6
    assert relative_error(x.grad, x64.grad) < 1e-5
    for name, p in made.named_parameters():
        assert relative_error(p.grad, exact[name].grad) < 1e-5, name


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_filling_up_changes_no_bit(recipe):
    """CASES 13: rows of zeros change no scale, no output and no weight gradient."""
    results = []
    for fill in (False, True):
        made = layer(
            torch.bfloat16,
            recipe,
            moe_expert_capacity_factor=0.8,
            moe_pad_expert_input_to_capacity=fill,
        )
        x, sink, statistics = inputs(torch.bfloat16), Sink(made), Statistics()
        out = made(x, Sequences(*SHAPE), StepContext(grads=sink, statistics=statistics))
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype))
        load = statistics.sums[made.router.load_name]
        results.append([out, x.grad, *sink.buffers.values(), load])
        assert load.sum() == TOKENS * 2, "router statistics know of no rows that fill up"
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_enough_capacity_drops_nothing():
    x = inputs()
    expected = layer()(x, Sequences(*SHAPE), StepContext())
    assert torch.equal(layer(moe_expert_capacity_factor=8.0)(x, Sequences(*SHAPE), StepContext()), expected)


def test_forced_balance():
    made, statistics = layer(moe_router_force_load_balancing=True), Statistics()
    out = made(inputs(), Sequences(*SHAPE), StepContext(statistics=statistics))
    assert statistics.sums[made.router.load_name].tolist() == [TOKENS * 2 / 8] * 8
    out.sum().backward()
    assert made.router.weight.grad.abs().sum() > 0


def test_sinkhorn_balances_in_training_alone():
    made = layer(moe_router_load_balancing_type=("sinkhorn",))
    with torch.no_grad():
        made.router.weight[0] += made.router.weight.abs().mean() * 3 * torch.sign(inputs()[0])
    loads = {}
    for phase in (Phase.TRAIN, Phase.EVAL, Phase.RECOMPUTE):
        loads[phase] = made.router(inputs(), Sequences(*SHAPE), StepContext(phase=phase)).experts
    assert torch.equal(loads[Phase.TRAIN], loads[Phase.RECOMPUTE])
    assert not torch.equal(loads[Phase.TRAIN], loads[Phase.EVAL])


def gradient(made, x=None, step=None):
    x = inputs() if x is None else x
    made(x, Sequences(*SHAPE), step or StepContext()).sum().backward()
    return made.router.weight.grad


def test_several_losses_at_once():
    """Gradients add up, each under its own name in the log, and by layer where that is asked for."""
    kinds = {"aux_loss": 0.1, "seq_aux_loss": 0.2, "global_aux_loss": 0.3}
    plain = layer()
    made = layer(
        moe_router_load_balancing_type=tuple(kinds),
        moe_aux_loss_coeff=tuple(kinds.values()),
        moe_per_layer_logging=True,
    )
    made.router.shares.copy_(shares := torch.tensor([0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]))
    statistics = Statistics()
    added = gradient(made, step=StepContext(statistics=statistics)) - gradient(plain)

    weight = plain.router.weight.detach().double().requires_grad_()
    scores, chosen = balance_scores(inputs().detach().double() @ weight.T, RoutingRule(2))
    losses = {
        "aux_loss": balance_loss(scores, chosen),
        "seq_aux_loss": balance_loss(scores, chosen, SHAPE[0]),
        "global_aux_loss": global_balance_loss(scores, shares.double()),
    }
    sum(kinds[kind] * loss * TOKENS for kind, loss in losses.items()).backward()
    assert relative_error(added, weight.grad) < 1e-4
    for kind, loss in losses.items():
        for name in (kind, f"{kind}/layers.0.mlp"):
            total, count = statistics.means[name].tolist()
            assert total / count == pytest.approx(loss.item(), rel=1e-5)
    assert torch.equal(statistics.sums[made.router.balance_name].long(), torch.bincount(chosen.flatten(), minlength=8))


def test_global_loss_follows_the_last_steps_counts():
    """The first step has none to follow; then the shares of all microbatches, saved and restored."""
    made = layer(moe_router_load_balancing_type=("global_aux_loss",), moe_aux_loss_coeff=(1.0,))
    assert made.router.shares.dtype == torch.float32
    torch.testing.assert_close(gradient(made), gradient(layer()))
    statistics = Statistics()
    for seed in range(2):
        x = inputs() + seed
        made(x, Sequences(*SHAPE), StepContext(statistics=statistics, microbatch=seed))
    made(inputs() - 5, Sequences(*SHAPE), StepContext(phase=Phase.EVAL, statistics=statistics))
    counts = statistics.sums[made.router.balance_name]
    assert counts.sum() == 2 * TOKENS * 2
    made.router.end_step(statistics)
    torch.testing.assert_close(made.router.shares, (counts / counts.sum()).float())

    fresh = layer(moe_router_load_balancing_type=("global_aux_loss",), moe_aux_loss_coeff=(1.0,))
    saved = {name: item.tensor.clone() for name, item in LastShares([made.router]).state().items()}
    LastShares([fresh.router]).load_state({})
    assert fresh.router.shares.tolist() == [1 / 8] * 8
    LastShares([fresh.router]).load_state(saved)
    assert torch.equal(fresh.router.shares, made.router.shares)
    made.router.weight.grad = None
    assert torch.equal(gradient(made), gradient(fresh))


def test_three_bf16_numbers_are_one_of_fp32():
    """So the gradient of the logits multiplies BF16 weights exactly on BF16 tensor cores."""
    x = torch.randn(64, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 64)[:, None]
    x[0] = 0
    parts = three_parts(x)
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().view(64, 3, 24).sum(1), x.double())
    assert not torch.equal(parts.double().view(64, 3, 24)[:, :2].sum(1), x.double())
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert relative_error(parts.double() @ weight.repeat(3, 1).double(), x.double() @ weight.double()) < 1e-15
