"""Experts that run as one give the bits of the same experts one by one, in a whole layer and its backward."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.moe import experts, permutation
from megafp8.core.moe.experts import Experts
from megafp8.core.transformer.core_attention import Sequences
from megafp8.fp8 import DelayedScaling, get_recipe
from megafp8.fp8.policy import Policy
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.step import StepContext
from tests.core.families import DEEPSEEK
from tests.core.helpers import Sink
from tests.core.moe.test_layer import SHAPE, inputs, layer


def watch_gradients(monkeypatch) -> list[bool]:
    """Whether the gradients of the experts' outputs reach them in FP8, backward by backward."""
    seen, spread = [], permutation.spread_gradient

    def watched(*args):
        seen.append(isinstance(rows := spread(*args), QuantizedTensor))
        return rows

    monkeypatch.setattr(permutation, "spread_gradient", watched)
    return seen


@pytest.mark.parametrize("store", [True, False], ids=["fc1's output in FP8", "in BF16"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "delayed"])
def test_together_and_one_by_one_are_the_same_bits(recipe, store, monkeypatch):
    """With fc1's output in FP8 backward makes another input of fc2 than forward had, under forward's scale. A history
    gives no scales in the first of two steps."""
    results = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(experts, "can_group", lambda linears: False)
        made = layer(dtype=torch.bfloat16, recipe_of=Policy(get_recipe(recipe)), fp8_input_store=store)
        assert made.experts.groups == together
        asked = watch_gradients(monkeypatch)
        scaling, found = DelayedScaling.of(made), []
        for _ in range(1 if scaling is None else 2):
            x = inputs(dtype=torch.bfloat16)
            y = made(x, Sequences(*SHAPE), StepContext(scaling=scaling))
            # Tokens of unlike size: a copy by column made from the bytes would lose what one from the values has.
            grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
            y.backward((grad * torch.logspace(-4, 2, len(y))[:, None]).bfloat16())
            found += [y, x.grad]
            if scaling is not None:
                found.append(scaling.pending().clone())
                scaling.advance()
        assert asked == [together] * (2 if scaling else 1), "gradients are quantized as they are spread"
        results.append((*found, *(p.grad for p in made.parameters())))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def as_spread_and_after(recipe: str, device: str, tokens: int, width: int = 256) -> list[list[torch.Tensor]]:
    """A layer's gradients where those of the experts' outputs are quantized as they are spread, and where the experts
    quantize them afterwards. Tokens are of unlike size, so that a mistaken row shows."""
    generator, results = torch.Generator().manual_seed(0), []
    x, grad = (torch.randn(tokens, width, generator=generator) for _ in range(2))
    grad = (grad * torch.logspace(-4, 2, tokens)[:, None]).bfloat16().to(device)
    model = replace(DEEPSEEK, hidden_size=width, moe_ffn_hidden_size=128, moe_shared_expert_intermediate_size=128)
    for spec in (Experts.gradient_spec, lambda *_: None):
        made = layer(model, dtype=torch.bfloat16, recipe_of=Policy(get_recipe(recipe))).to(device)
        leaf, sink = x.bfloat16().to(device).requires_grad_(), Sink(made)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Experts, "gradient_spec", spec)
            y = made(leaf, Sequences(1, tokens), StepContext(grads=sink))
        y.backward(grad)
        results.append([y, leaf.grad, *sink.buffers.values()])
    return results


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "tensorwise"])
def test_gradients_quantized_as_they_are_spread(recipe, monkeypatch):
    """The same on a GPU: tests/gpu/test_moe.py."""
    asked = watch_gradients(monkeypatch)
    one, other = as_spread_and_after(recipe, "cpu", 96)
    assert asked == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
