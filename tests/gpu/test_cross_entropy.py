"""The kernels of cross entropy on a GPU, against PyTorch's in FP64 and the formulas that the CPU runs."""

import pytest
import torch
from torch.nn import functional as F

from megafp8.core.tensor_parallel import cross_entropy
from megafp8.core.tensor_parallel.cross_entropy import summed_cross_entropy

VOCAB, PADDED, TOKENS = 50257, 50304, 301


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 1e-3)])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_loss_and_gradient(dtype, smoothing, z, scale, monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (torch.randn(TOKENS, PADDED, generator=generator, device="cuda") * scale).to(dtype)
    logits[:, VOCAB:] = torch.nan
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator, device="cuda")
    weights = torch.rand(TOKENS, generator=generator, device="cuda")
    weights[3] = 0
    results = []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(cross_entropy, "_kernels_for", lambda logits: None)
        place = logits.clone().requires_grad_()
        loss = summed_cross_entropy(place, labels, weights, VOCAB, PADDED, label_smoothing=smoothing, z_loss=z)
        loss.backward()
        results.append((loss, place.grad.double()))
    x = logits[:, :VOCAB].double().requires_grad_()
    losses = F.cross_entropy(x, labels, reduction="none", label_smoothing=smoothing) + z * x.logsumexp(1).square()
    expected = (losses * weights).sum()
    expected.backward()
    for loss, grad in results:
        torch.testing.assert_close(loss.double(), expected, rtol=3e-6, atol=0)
        error = (grad[:, :VOCAB] - x.grad).norm() / x.grad.norm()
        assert error < (1e-5 if dtype == torch.float32 else 4e-3)
        assert (grad[:, VOCAB:] == 0).all()
        assert (grad[3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.3, 1 + 2**-12, float("nan"), -2.0])
def test_a_factor_has_the_bits_of_a_multiplication(dtype, factor, monkeypatch):
    logits = torch.randn(TOKENS, PADDED, device="cuda").to(dtype)
    labels, weights = torch.arange(TOKENS, device="cuda"), torch.ones(TOKENS, device="cuda")
    grads = []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(cross_entropy, "_scale", lambda place, factor: place.mul_(factor))
        place = logits.clone().requires_grad_()
        loss = summed_cross_entropy(place, labels, weights, VOCAB, PADDED)
        loss.backward(torch.tensor(factor, device="cuda"))
        grads.append(place.grad.view(torch.int16 if dtype == torch.bfloat16 else torch.int32))
    assert torch.equal(*grads) or factor != factor
    assert torch.equal(*(grad.view(dtype).isnan() for grad in grads))


def test_a_factor_of_1_leaves_the_gradient_alone():
    """The bits of a NaN tell: arithmetic gives all of them the same ones."""
    x, one = torch.full((8192, 4099), 0x7F81, device="cuda", dtype=torch.int16), torch.ones((), device="cuda")
    cross_entropy._scale(x.view(torch.bfloat16), one)
    assert (x == 0x7F81).all()
    cross_entropy._scale(x.view(torch.bfloat16), one + 1)
    assert (x != 0x7F81).all()


def test_the_same_bits_again():
    logits = torch.randn(64, 128256, device="cuda", dtype=torch.bfloat16)
    labels, weights = torch.arange(64, device="cuda"), torch.ones(64, device="cuda")
    runs = []
    for _ in range(2):
        place = logits.clone().requires_grad_()
        loss = summed_cross_entropy(place, labels, weights, 128256, 128256)
        loss.backward()
        runs.append((loss, place.grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
