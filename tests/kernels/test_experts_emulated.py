"""A mixture of experts with one scale each through the kernels that GPUs take, run by the PTX emulator: the wiring
between permutation, linears, SwiGLU and kernels, forward and backward."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from megafp8.kernels import quantize_experts, swiglu_quantize

from megafp8.core.transformer import activation
from megafp8.core.transformer.core_attention import Sequences
from megafp8.fp8 import DelayedScaling, backend, get_recipe
from megafp8.fp8.policy import Policy
from megafp8.step import StepContext
from tests.cases import quick
from tests.core.families import DEEPSEEK
from tests.core.helpers import Sink, relative_error
from tests.core.moe.test_layer import layer
from tests.kernels import testing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the GPU that is here")

TOKENS, HIDDEN, FFN = 24, 256, 128
SIZES = {"hidden_size": HIDDEN, "moe_ffn_hidden_size": FFN, "moe_shared_expert_intermediate_size": None}


class Called:
    """A module of kernels that counts calls of its functions."""

    def __init__(self, module):
        self.module, self.names = module, []

    def __getattr__(self, name):
        self.names.append(name)
        return getattr(self.module, name)


@contextmanager
def through_kernels(monkeypatch, rows: bool, swiglu: bool):
    """Inside, layers on the CPU take a GPU's kernels: those of rows, and those of SwiGLU."""
    of_rows, of_swiglu = Called(quantize_experts), Called(swiglu_quantize)
    with monkeypatch.context() as patch, testing.emulated_launches():
        if rows:
            patch.setattr(backend, "expert_kernels", lambda x, block: of_rows if block == 128 else None)
        if swiglu:
            patch.setattr(activation, "fuses", lambda x, dtype, *wants: dtype == torch.bfloat16)
            patch.setattr(activation, "fused_kernels", lambda: (None, of_swiglu, None))
        yield of_rows.names, of_swiglu.names


def results(recipe: str | Policy) -> list[torch.Tensor]:
    """Outputs, gradients and amaxes of a mixture; with a history over two steps, the second with its scales."""
    policy = recipe if isinstance(recipe, Policy) else Policy(get_recipe(recipe))
    made = layer(replace(DEEPSEEK, **SIZES), dtype=torch.bfloat16, recipe_of=policy)
    scaling, found, generator = DelayedScaling.of(made), [], torch.Generator().manual_seed(0)
    for _ in range(1 if scaling is None else 2):
        sink = Sink(made)
        x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().requires_grad_()
        grad = torch.randn(TOKENS, HIDDEN, generator=generator) * torch.logspace(-4, 2, TOKENS)[:, None]
        y = made(x, Sequences(1, TOKENS), StepContext(grads=sink, scaling=scaling))
        y.backward(grad.bfloat16())
        found += [y.detach(), x.grad, *sink.buffers.values()]
        if scaling is not None:
            found.append(scaling.pending().clone())
            scaling.advance()
    return found


@pytest.mark.parametrize("recipe", quick(["tensorwise", "delayed"], {"tensorwise"}))
def test_rows_through_kernels_are_the_same_bits(recipe, monkeypatch):
    """Of whole layers: outputs, all gradients, and the history's amaxes."""
    want = results(recipe)
    with through_kernels(monkeypatch, rows=True, swiglu=False) as (names, _):
        got = results(recipe)
    assert {"row_amaxes", "expert_amaxes", "quantize_experts"} <= set(names)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", quick(["tensorwise", "delayed", "blockwise"], {"tensorwise"}))
def test_swiglu_through_kernels_is_near(recipe, monkeypatch):
    """Its values are within an ulp; a scale that moves with one moves every rounding."""
    want = results(recipe)
    with through_kernels(monkeypatch, rows=recipe != "blockwise", swiglu=True) as (_, names):
        got = results(recipe)
    assert {"swiglu_quantize", "swiglu_grad_quantize"} <= set(names)
    for one, other in zip(got, want, strict=True):
        assert torch.isfinite(one).all()
        assert relative_error(one.float(), other.float()) < 0.1


@pytest.mark.parametrize(("first", "second"), quick(
    [(None, "tensorwise"), ("blockwise", "tensorwise"), ("tensorwise", "blockwise"), ("tensorwise", None)],
    {(None, "tensorwise"), ("tensorwise", "blockwise")},
))  # fmt: skip
def test_linears_of_different_recipes(first, second, monkeypatch):
    """Where one of an expert's linears has a scale for all its rows, and the other has tiles or fell back."""
    policy = Policy(None, others=[(f"*.{part}", name and get_recipe(name))
                                  for part, name in (("fc1", first), ("fc2", second))])  # fmt: skip
    want = results(policy)
    with through_kernels(monkeypatch, rows=True, swiglu=True) as (_, names):
        got = results(policy)
    assert "swiglu_grad_quantize" in names
    for one, other in zip(got, want, strict=True):
        assert torch.isfinite(one).all()
        assert relative_error(one.float(), other.float()) < 0.1
