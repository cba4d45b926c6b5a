"""A model whose sizes, weights and recipes change on the way computes what one does that is made for each.

Linears, kernels and weights keep what follows from all of these, so that nobody works it out anew in each microbatch.
"""

from dataclasses import replace

import pytest
import torch

from megafp8.fp8 import DelayedScaling, Linear, get_recipe
from megafp8.step import Phase, StepContext
from tests.core.helpers import Sink, batch
from tests.core.test_fp8 import SMALL, fp8_model

LAYER = replace(SMALL, num_layers=1)


def linears_of(model):
    return [module for module in model.modules() if getattr(module, "use_recipe", None)]


def run(model, scaling, sequences, length, *, seed=0, phase=Phase.TRAIN):
    """Loss and all gradients of a microbatch, and the amaxes so far."""
    tokens, labels, mask = batch(sequences, length, seed=seed)
    sink = Sink(model)
    for param in model.parameters():
        param.grad = None
    loss = model(tokens, step=StepContext(phase=phase, grads=sink, scaling=scaling), labels=labels, loss_mask=mask)
    if phase is Phase.TRAIN:
        loss.backward()
    others = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *sink.buffers.values(), *others, *([scaling.pending().clone()] if scaling else [])]


def made_for(model, name, scaling):
    """A model of the same weights and recipes that has seen nothing, and the same history."""
    fresh = fp8_model(name, LAYER)
    history = DelayedScaling.of(fresh)
    if history is not None:
        history.load_state({key: item.tensor for key, item in scaling.state().items()})
    fresh.load_state_dict(model.state_dict())
    for old, new in zip(linears_of(model), linears_of(fresh), strict=True):
        new.use_recipe(old.recipe)
    return fresh, history


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "delayed"])
def test_nothing_of_before_is_left(name):
    recipe, model = get_recipe(name), fp8_model(name, LAYER)
    scaling = DelayedScaling.of(model)
    fc1, qkv = model.layers[0].mlp.fc1, model.layers[0].attention.qkv

    def check(*sizes, **options):
        fresh, history = made_for(model, name, scaling)
        expected, found = run(fresh, history, *sizes, **options), run(model, scaling, *sizes, **options)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    check(2, 8)
    if scaling is not None:
        scaling.advance()
        check(2, 8, seed=1)
    check(3, 12)
    check(2, 8)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.75)
    check(2, 8)
    fc1.use_recipe(None)  # as the guard falls back between two steps, and returns
    qkv.use_recipe(None if scaling else get_recipe("mxfp8"))
    check(2, 8)
    check(3, 12, phase=Phase.EVAL)
    for linear in (fc1, qkv):
        linear.use_recipe(recipe)
    check(2, 8)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_a_linear_of_another_dtype(name):
    """`to()` replaces the parameter: its owner and what was quantized for it are new."""
    options = {"bias": False, "recipe": get_recipe(name), "params_dtype": torch.bfloat16}
    linear, x = Linear(64, 32, **options), torch.randn(9, 64)
    weights = {"weight": linear.weight.detach().float()}
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16):
        fresh = Linear(64, 32, **options | {"params_dtype": dtype})
        fresh.load_state_dict(weights)
        results = []
        for one in (linear.to(dtype), fresh):
            one.weight.grad, a = None, x.to(dtype, copy=True).requires_grad_()
            y = one(a)
            y.backward(torch.ones_like(y))
            results.append((y, a.grad, one.weight.grad))
        assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(*results, strict=True))
