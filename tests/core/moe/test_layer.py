"""The mixture of experts: against a naive one in FP64, without tokens, with auxiliary losses, in FP8, recomputed."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.build import BuildContext, RecomputePlan
from megafp8.core.moe.balancing import balance_loss, balance_scores, z_loss
from megafp8.core.moe.layer import MoELayer
from megafp8.core.moe.routing import RoutingRule, choose
from megafp8.core.transformer.core_attention import Sequences
from megafp8.fp8 import DelayedScaling, get_recipe
from megafp8.fp8.policy import Policy
from megafp8.step import Phase, Statistics, StepContext
from tests.cases import quick
from tests.core.families import DEEPSEEK, MOE, QWEN2_MOE
from tests.core.helpers import Sink, batch, make_model, randomize, relative_error

SHAPE = (2, 16)
KINDS = {"softmax": MOE, "gated shared expert": QWEN2_MOE, "sigmoid": DEEPSEEK}
RECIPES = ["tensorwise", "blockwise", "mxfp8", "delayed"]


def layer(model=MOE, **build) -> MoELayer:
    made = MoELayer("layers.0.mlp", BuildContext(model, **build))
    randomize(made, 3)
    return made


def inputs(model=MOE, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = SHAPE[0] * SHAPE[1]
    return (torch.randn(tokens, model.hidden_size, generator=generator)).to(dtype).requires_grad_()


def naive(made: MoELayer, x, weights):
    """The same in FP64, expert by expert and token by token; `weights`: the layer's parameters in FP64."""

    def mlp(name, x):
        gate, up = (x @ weights[f"{name}.fc1.weight"].T).chunk(2, -1)
        return (gate * gate.sigmoid() * up) @ weights[f"{name}.fc2.weight"].T

    bias = made.router.expert_bias
    logits = x @ weights["router.weight"].T
    experts, scales = choose(logits, made.router.rule, None if bias is None else bias.double())
    rows = []
    for token, chosen, scale in zip(x, experts, scales, strict=True):
        rows.append(sum(s * mlp(f"experts.{e}", token) for e, s in zip(chosen.tolist(), scale, strict=True)))
    out = torch.stack(rows)
    if made.shared_experts is not None:
        shared = mlp("shared_experts", x)
        gate = weights.get("shared_experts.gate.weight")
        out = out + (shared if gate is None else shared * (x @ gate.T).sigmoid())
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_against_float64(kind):
    model = KINDS[kind]
    made, x = layer(model), inputs(model)
    if made.router.expert_bias is not None:
        made.router.expert_bias += torch.randn(model.num_experts) * 0.2
    grad = torch.randn_like(x)
    out = made(x, Sequences(*SHAPE), StepContext())
    out.backward(grad)
    exact = {name: p.detach().double().requires_grad_() for name, p in made.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    expected = naive(made, x64, exact)
    expected.backward(grad.double())
    assert relative_error(out, expected) < 1e-6
    assert relative_error(x.grad, x64.grad) < 1e-6
    for name, p in made.named_parameters():
        assert relative_error(p.grad, exact[name].grad) < 1e-5, name


def only_expert_0(made: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """Inputs that all go to experts 0 and 1."""
    with torch.no_grad():
        made.router.weight.zero_()
        made.router.weight[0, 0] = made.router.weight[1, 0] = 50.0
        x[:, 0] = 1.0
    return x


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_experts_without_tokens_have_zero_gradients_that_are_ready(recipe):
    """CASES 11: main gradients of earlier microbatches stay, every parameter becomes ready once."""
    model = replace(MOE, hidden_size=64, moe_ffn_hidden_size=48)
    build = {"dtype": torch.bfloat16, "recipe_of": Policy(get_recipe(recipe))} if recipe else {}
    made = layer(model, **build)
    x = only_expert_0(made, inputs(model, torch.bfloat16 if recipe else torch.float32))
    sink, scaling = Sink(made), DelayedScaling.of(made)
    step = StepContext(grads=sink, scaling=scaling)
    out = made(x, Sequences(*SHAPE), step)
    assert torch.isfinite(out).all()
    out.backward(torch.randn_like(out))
    assert torch.isfinite(x.grad).all()
    assert sorted(sink.calls) == sorted(sink.buffers), "each ready, once"
    for name, buffer in sink.buffers.items():
        used = "experts" not in name or "experts.0." in name or "experts.1." in name
        assert (buffer != Sink.OFFSET).any() == used, name
    if scaling is not None:
        scaling.advance()
        assert all(torch.isfinite(scaling.scale(n)).all() for n in scaling.names() if scaling.scale(n) is not None)


def test_without_a_sink_idle_experts_have_zero_grads():
    made = layer()
    x = only_expert_0(made, inputs())
    made(x, Sequences(*SHAPE), StepContext()).sum().backward()
    idle = made.experts[5].fc1.weight
    assert torch.equal(idle.grad, torch.zeros_like(idle))


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    made = layer()
    x = torch.randn(tokens, MOE.hidden_size, requires_grad=True)
    out = made(x, Sequences(1, tokens), StepContext())
    out.sum().backward()
    assert out.shape == x.grad.shape == (tokens, MOE.hidden_size)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "z_loss"])
def test_auxiliary_losses_reach_the_router_and_the_input(kind):
    """CASES 23, 52: gradients as if coefficient x tokens x loss were added; the output doesn't change."""
    coefficient = 0.1
    field = {"moe_z_loss_coeff": coefficient} if kind == "z_loss" else {"moe_aux_loss_coeff": (coefficient,)}
    field |= {} if kind == "z_loss" else {"moe_router_load_balancing_type": (kind,)}
    plain, balanced = layer(), layer(replace(MOE, **field))
    x, y = inputs(), inputs()
    statistics = Statistics()
    step = StepContext(statistics=statistics)
    out, same = plain(x, Sequences(*SHAPE), step), balanced(y, Sequences(*SHAPE), step)
    assert torch.equal(out, same)
    out.sum().backward(), same.sum().backward()

    weight, z = plain.router.weight.detach().double().requires_grad_(), x.detach().double().requires_grad_()
    logits = z @ weight.T
    batch_size = SHAPE[0] if kind == "seq_aux_loss" else 1
    loss = z_loss(logits) if kind == "z_loss" else balance_loss(*balance_scores(logits, RoutingRule(2)), batch_size)
    (coefficient * len(x) * loss).backward()
    assert relative_error(balanced.router.weight.grad - plain.router.weight.grad, weight.grad) < 1e-4
    assert relative_error(y.grad - x.grad, z.grad) < 1e-4
    total, count = statistics.means["z_loss" if kind == "z_loss" else "aux_loss"].tolist()
    assert total / count == pytest.approx(loss.item(), rel=1e-5)
    assert count == len(x)


def test_evaluation_and_recomputation_report_nothing():
    """CASES 23, 54."""
    model = replace(DEEPSEEK, moe_aux_loss_coeff=(0.1,))
    made, x = layer(model), inputs(model)
    for phase in (Phase.EVAL, Phase.RECOMPUTE, Phase.TRAIN):
        statistics = Statistics()
        made(x, Sequences(*SHAPE), StepContext(phase=phase, statistics=statistics))
        assert bool(statistics.sums) == bool(statistics.means) == (phase is Phase.TRAIN)
    load = statistics.sums["layers.0.mlp.router/load"]
    assert load.sum() == len(x) * model.moe_router_topk


def test_bias_moves_towards_even_load():
    """CASES 54: by the rate, up where the load is below the mean, down above, not at all at the mean."""
    made = layer(replace(DEEPSEEK, moe_router_bias_update_rate=0.25))
    load = torch.tensor([3.0, 5, 4, 4, 0, 8, 4, 4])
    statistics = Statistics()
    statistics.add(made.router.load_name, load)
    made.router.end_step(statistics)
    assert made.router.expert_bias.tolist() == [0.25, -0.25, 0, 0, 0.25, -0.25, 0, 0]
    assert made.router.expert_bias.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_computes_in_fp32(dtype):
    """Logits of a BF16 model are FP32 products: a BF16 product would tie experts that differ."""
    made, x = layer(dtype=dtype), inputs(dtype=dtype)
    captured = made.router(x, Sequences(*SHAPE), StepContext())
    logits = x.detach().double() @ made.router.weight.detach().double().T
    experts, weights = choose(logits, made.router.rule)
    assert torch.equal(captured.experts, experts)
    assert captured.weights.dtype == torch.float32
    assert relative_error(captured.weights, weights) < 1e-5


def test_specs_of_experts():
    made = layer(DEEPSEEK)
    experts = {p.spec.name for p in made.parameters() if p.spec.expert}
    assert experts == {f"layers.0.mlp.experts.{e}.{fc}.weight" for e in range(8) for fc in ("fc1", "fc2")}
    assert made.experts[3].fc1.weight.spec.shape == (2, 24, 32)


# Whole models


def train(model, steps):
    """Losses, main gradients and delayed scales of a few steps of two microbatches, with fixed weights."""
    scaling, results = DelayedScaling.of(model), []
    for iteration in range(steps):
        sink = Sink(model)
        for microbatch in range(2):
            tokens, labels, mask = batch(seed=10 * iteration + microbatch)
            step = StepContext(iteration=iteration, microbatch=microbatch, grads=sink, scaling=scaling)
            loss = model(tokens, step=step, labels=labels, loss_mask=mask)
            loss.backward()
            results.append(loss.detach())
        results += sink.buffers.values()
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if scaling is not None:
            scaling.advance()
            results += [scaling.scale(name).clone() for name in scaling.names()]
    return results


WIDE = replace(
    DEEPSEEK,
    hidden_size=64,
    moe_ffn_hidden_size=48,
    mtp_num_layers=1,
    moe_aux_loss_coeff=(0.1,),
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
PLANS = {
    "none": RecomputePlan(),
    "uniform": RecomputePlan(unit=2),
    "block": RecomputePlan(unit=1, layers=2),
    "parts": RecomputePlan(frozenset({"core_attn", "layernorm"})),
    "experts": RecomputePlan(frozenset({"moe", "mlp"})),
    "parts of experts": RecomputePlan(frozenset({"moe_act", "shared_experts"})),
    "up-projections": RecomputePlan(frozenset({"mla_up_proj"})),
    "up-projections and core": RecomputePlan(frozenset({"mla_up_proj", "core_attn"})),
}


@pytest.mark.parametrize("recipe", quick([None, *RECIPES], {None, "blockwise", "delayed"}))
def test_recomputation_changes_no_bit(recipe):
    """CASES 22: a DeepSeek-like model, dropout on; and the same twice gives the same bits."""
    build = {"recipe_of": Policy(get_recipe(recipe))} if recipe else {}
    steps = 2 if recipe == "delayed" else 1
    runs = {
        name: train(make_model(WIDE, dtype=torch.bfloat16, recompute=plan, **build), steps)
        for name, plan in (PLANS | {"twice": RecomputePlan()}).items()
    }
    for name, results in runs.items():
        assert len(results) == len(runs["none"])
        assert all(torch.equal(a, b) for a, b in zip(results, runs["none"], strict=True)), name


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_fp8_covers_experts_and_latents_and_stays_near_bf16(recipe):
    model = replace(WIDE, hidden_dropout=0.0, attention_dropout=0.0, moe_aux_loss_coeff=(0.0,))
    exact = make_model(model, dtype=torch.bfloat16)
    quantized = make_model(model, dtype=torch.bfloat16, recipe_of=Policy(get_recipe(recipe)))
    fp8 = {name for name, module in quantized.named_modules() if getattr(module, "recipe", None) is not None}
    for name in ("attention.q_down", "attention.kv_up", "mlp.experts.7.fc2", "mlp.shared_experts.fc1"):
        assert f"layers.2.{name}" in fp8
        assert f"mtp.0.layer.{name}" in fp8
    assert not any(name.endswith(("router", "eh_proj", "lm_head", "norm")) for name in fp8)
    tokens, labels, mask = batch(4, 32)
    sinks = {}
    for made in (exact, quantized):
        sink = sinks[made] = Sink(made)
        made(tokens, step=StepContext(grads=sink), labels=labels, loss_mask=mask).backward()
    for name in ("embedding.word_embeddings.weight", "layers.0.attention.proj.weight", "layers.0.mlp.fc1.weight"):
        a, b = (sinks[made].buffers[name] - Sink.OFFSET for made in (quantized, exact))
        assert relative_error(a, b) < 0.35, name
