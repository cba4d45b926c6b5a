"""The model under the FP8 recipes: coverage, recomputation, and what forward keeps for backward."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from megafp8.core.build import RecomputePlan
from megafp8.core.tensor_parallel.linear import ColumnParallelLinear
from megafp8.core.transformer.activation import Activation
from megafp8.core.transformer.norm import Norm
from megafp8.fp8 import DelayedScaling, get_recipe
from megafp8.fp8.policy import Policy
from megafp8.step import Phase, StepContext
from tests.core.helpers import LLAMA, Sink, batch, make_model, relative_error

RECIPES = ["tensorwise", "blockwise", "mxfp8", "delayed"]
PLANS = {
    "uniform": RecomputePlan(unit=2),
    "block": RecomputePlan(unit=1, layers=1),
    "core_attn": RecomputePlan(frozenset({"core_attn"})),
    "mlp": RecomputePlan(frozenset({"mlp"})),
    "layernorm": RecomputePlan(frozenset({"layernorm"})),
    "all parts": RecomputePlan(frozenset({"core_attn", "mlp", "layernorm"})),
}
SMALL = replace(LLAMA, hidden_size=64, kv_channels=16, ffn_hidden_size=96)
DROPOUT = replace(SMALL, num_layers=3, hidden_dropout=0.1, attention_dropout=0.1, add_bias_linear=True)


def fp8_model(recipe, m=SMALL, **build):
    return make_model(m, dtype=torch.bfloat16, recipe_of=Policy(get_recipe(recipe)), **build)


def train(model, steps=2, microbatches=2):
    """Losses, the main gradients of each step, and the delayed scales, over a few steps with fixed weights."""
    scaling = DelayedScaling.of(model)
    results = []
    for iteration in range(steps):
        sink = Sink(model)
        for microbatch in range(microbatches):
            tokens, labels, mask = batch(seed=10 * iteration + microbatch)
            step = StepContext(iteration=iteration, microbatch=microbatch, grads=sink, scaling=scaling)
            loss = model(tokens, step=step, labels=labels, loss_mask=mask)
            loss.backward()
            results.append(loss.detach())
        results += sink.buffers.values()
        results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if scaling is not None:
            results.append(scaling.pending().clone())
            scaling.advance()
            results += [scaling.scale(name).clone() for name in scaling.names()]
    return results


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("plan", PLANS)
def test_recomputation_changes_no_bit(plan, recipe):
    """CASES 22: losses, main gradients, amaxes and next scales over three steps, dropout on."""
    kept, again = (train(fp8_model(recipe, DROPOUT, recompute=p), steps=3) for p in (RecomputePlan(), PLANS[plan]))
    assert len(kept) == len(again)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_between_steps_changes_no_bit(recipe):
    def run(evaluate):
        model = fp8_model(recipe)
        scaling = DelayedScaling.of(model)
        for _ in range(2):
            tokens, labels, _ = batch()
            if evaluate:
                with torch.no_grad():
                    step = StepContext(phase=Phase.EVAL, scaling=scaling)
                    model(*batch(seed=5)[:1], step=step)
            loss = model(tokens, step=StepContext(scaling=scaling), labels=labels)
            loss.backward()
            if scaling is not None:
                scaling.advance()
        return [loss, *(p.grad for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_remaking_the_input_of_fc2_changes_no_bit(recipe):
    """An FP8 copy kept from forward and one made anew in backward are the same bytes."""
    remaking, keeping = fp8_model(recipe), fp8_model(recipe)
    for layer in keeping.layers:
        layer.mlp.fc2.requantize_input = False
        layer.attention.proj.requantize_input = False
    assert all(torch.equal(a, b) for a, b in zip(train(remaking), train(keeping), strict=True))


def test_only_the_four_linears_are_fp8():
    """Embedding, LM head, norms and attention stay in high precision."""
    model = fp8_model("blockwise")
    fp8 = {name for name, module in model.named_modules() if getattr(module, "recipe", None) is not None}
    linears = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
    assert fp8 == {f"layers.{i}.{name}" for i in range(2) for name in linears}
    assert model.lm_head.recipe is None


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_fp8_gradients_are_near_bf16(recipe):
    """Not only the loss, which is near log V whatever the bug: each weight's gradient points the same way."""
    tokens, labels, mask = batch(4, 32)
    models = {name: make_model(SMALL, dtype=torch.bfloat16) for name in ("bf16",)} | {"fp8": fp8_model(recipe)}
    sinks = {}
    for name, model in models.items():
        sinks[name] = Sink(model)
        model(tokens, step=StepContext(grads=sinks[name]), labels=labels, loss_mask=mask).backward()
    for name, exact in sinks["bf16"].buffers.items():
        if (exact != Sink.OFFSET).any():
            error = relative_error(sinks["fp8"].buffers[name] - Sink.OFFSET, exact - Sink.OFFSET)
            assert error < 0.2, (name, error)


def live_outputs(model, module_type, step, keep=lambda module: True):
    """How many outputs of modules of a type there were, and are alive after a forward that keeps its graph."""
    refs = []
    method = "produce" if module_type is Activation else "forward"
    original = getattr(module_type, method)

    def spy(self, *args, **options):
        y = original(self, *args, **options)
        if keep(self):
            refs.append(weakref.ref(y[0] if isinstance(y, tuple) else y))
        return y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_type, method, spy)
        tokens, labels, _ = batch()
        loss = model(tokens, step=step, labels=labels)
    gc.collect()
    alive = sum(ref() is not None for ref in refs)
    assert loss.requires_grad
    return len(refs), alive


@pytest.mark.parametrize("recipe", [None, "blockwise"])
@pytest.mark.parametrize("plan", ["uniform", "mlp", "all parts"])
def test_recomputed_parts_keep_nothing_inside(plan, recipe):
    """Neither the activations nor fc1's outputs, also where norms are remade around them."""
    recipe_of = Policy(get_recipe(recipe) if recipe else None)
    model = make_model(SMALL, dtype=torch.bfloat16, recompute=PLANS[plan], recipe_of=recipe_of)
    assert live_outputs(model, Activation, StepContext()) == (2, 0)
    assert live_outputs(model, ColumnParallelLinear, StepContext(), keep=lambda m: m.name.endswith("fc1")) == (2, 0)


def test_forward_does_not_keep_the_input_of_fc2():
    assert live_outputs(fp8_model("blockwise"), Activation, StepContext()) == (2, 0)
    assert live_outputs(make_model(SMALL, dtype=torch.bfloat16), Activation, StepContext()) == (2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layernorm_recomputation_keeps_no_norm_output(dtype):
    plan = RecomputePlan(frozenset({"layernorm"}))
    keeping = make_model(SMALL, dtype=dtype)
    assert live_outputs(keeping, Norm, StepContext()) == (5, 5)
    assert live_outputs(make_model(SMALL, dtype=dtype, recompute=plan), Norm, StepContext()) == (5, 1)  # final_norm
