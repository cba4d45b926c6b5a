"""The MLP's activations against FP64, values within one BF16 ulp, gradients, and what they keep."""

import math
from dataclasses import replace

import pytest
import torch

from megafp8.core.transformer import activation
from megafp8.core.transformer.activation import Activation, activation_of, gelu, gelu_tanh, squared_relu, swiglu
from megafp8.fp8 import get_recipe
from megafp8.fp8.producer import Want
from tests.core.helpers import GPT2, LLAMA
from tests.core.transformer.test_norm import ulp


def naive_swiglu(x):
    gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return gate / (1 + torch.exp(-gate)) * up


NAIVE = {
    "swiglu": (Activation(swiglu, gated=True), naive_swiglu),
    "gelu": (Activation(gelu), lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    "gelu_tanh": (
        Activation(gelu_tanh),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "squared_relu": (Activation(squared_relu), lambda x: x.clamp(min=0) ** 2),
}


@pytest.mark.parametrize("name", NAIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_gradients_and_saved_tensors(dtype, name):
    activation, naive = NAIVE[name]
    x = (torch.randn(7, 96, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    x[0, :3] = torch.tensor([0.0, 60.0, -60.0])
    x.requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = naive(exact)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = activation(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]  # nothing but fc1's output
    assert y.dtype == dtype
    assert y.shape == (7, 48 if activation.gated else 96)
    if dtype == torch.bfloat16:
        slack = 1e-6 if "gelu" in name else 0.0  # FP32's 1 + erf(x) cancels in the negative tail
        assert ((y.double() - expected).abs() <= ulp(expected) + slack).all()
    else:
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(activation.compute(x), y)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(
        x.grad.double(), exact.grad, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5, check_dtype=False
    )


@pytest.mark.parametrize("name", NAIVE)
def test_non_finite_values_pass_through(name):
    """A NaN must reach the loss, where the guard sees it."""
    activation, _ = NAIVE[name]
    x = torch.randn(2, 8).bfloat16()
    x[0, 1] = torch.nan
    y = activation(x)
    assert y[0, 1].isnan()
    assert y[1].isfinite().all()


@pytest.mark.parametrize("name", NAIVE)
def test_weighted_rows(name):
    """Each row times its weight, rounded once; the weight's gradient too; fc1's output and the weights are kept."""
    activation, naive = NAIVE[name]
    x, weights = torch.randn(7, 96).bfloat16().requires_grad_(), torch.randn(7).requires_grad_()
    exact, exact_weights = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = activation(x, weights)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), weights.data_ptr()}
    assert torch.equal(y, activation.compute(x, weights))
    expected = naive(exact) * exact_weights[:, None]
    assert ((y.double() - expected).abs() <= ulp(expected.bfloat16()) + 1e-6).all()
    grad = torch.randn(y.shape).bfloat16()
    y.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(weights.grad.double(), exact_weights.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "formula"),
    [
        ({}, gelu_tanh),
        ({"bias_gelu_fusion": False}, gelu),
        ({"add_bias_linear": False}, gelu),
        ({"squared_relu": True}, squared_relu),
        ({"swiglu": True, "bias_gelu_fusion": False}, swiglu),
    ],
)
def test_choice(changes, formula):
    """Megatron-LM's: the fused GELU of a biased linear is the tanh form, all others are exact."""
    assert activation_of(replace(GPT2, **changes)).formula is formula
    assert activation_of(replace(GPT2, **changes)).gated == (formula is swiglu)
    assert activation_of(LLAMA).formula is swiglu


def test_gradient_from_bytes_under_tiles_that_no_kernel_makes(monkeypatch):
    """Where kernels read what was kept in FP8, but know no 128 x 128 tiles of a gradient."""
    kept_in_fp8 = Activation(swiglu, gated=True, store_fp8=True)
    x, grad = torch.randn(16, 512).bfloat16(), torch.randn(16, 256).bfloat16()
    quantizer = get_recipe("blockwise", grad_tile="2d", weight_tile="1d").quantizer("grad_output")
    kept, want = kept_in_fp8.keep(x), Want(quantizer)
    right = kept_in_fp8.gradient(grad, kept, (), want, False).x
    monkeypatch.setattr(activation, "fuses", lambda x, dtype, *wants: want not in wants)
    got = kept_in_fp8.gradient(grad, kept, (), want, False).x
    assert torch.equal(got.rowwise.data.view(torch.uint8), right.rowwise.data.view(torch.uint8))
