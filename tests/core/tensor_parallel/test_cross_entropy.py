"""Vocabulary-parallel cross entropy against PyTorch's in FP64."""

import pytest
import torch
from torch.nn import functional as F

from megafp8.core.tensor_parallel import cross_entropy
from megafp8.core.tensor_parallel.cross_entropy import summed_cross_entropy, vocab_parallel_cross_entropy

VOCAB, PADDED, TOKENS = 101, 128, 37


def data(scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(TOKENS, PADDED, generator=generator) * scale).to(dtype)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return logits, labels, torch.randn(TOKENS, generator=generator)


def dense(logits, labels, grad_losses, smoothing):
    """FP64 losses and gradients over the logical vocabulary; gradient 0 in the padding."""
    x = logits.double().requires_grad_()
    losses = F.cross_entropy(x[:, :VOCAB], labels, reduction="none", label_smoothing=smoothing)
    losses.backward(grad_losses.double())
    return losses.detach(), x.grad


def check(losses, grad, logits, labels, grad_losses, smoothing, columns=slice(None)):
    expected, expected_grad = dense(logits, labels, grad_losses, smoothing)
    torch.testing.assert_close(losses.detach().double(), expected, rtol=1e-6, atol=1e-6)
    # A gradient is a small difference of FP32 probabilities of logits known to 2^-24 of the largest.
    error = (grad.double() - expected_grad[:, columns]).norm() / expected_grad.norm()
    assert error < (1e-6 if grad.dtype == torch.float32 else 4e-3)
    assert (grad[:, max(0, VOCAB - (columns.start or 0)) :] == 0).all()


@pytest.mark.parametrize("chunk", [1, 5 * PADDED, 1 << 24])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_dense_fp64(dtype, scale, smoothing, chunk, monkeypatch):
    """CASES 61."""
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", chunk)
    logits, labels, grad_losses = data(scale, dtype)
    logits[:, VOCAB:] = torch.tensor([torch.inf, torch.nan, 1e30]).repeat(9).to(dtype)  # padding is never read
    kept = logits.clone()
    x = logits.requires_grad_()
    losses = vocab_parallel_cross_entropy(x, labels, VOCAB, PADDED, label_smoothing=smoothing)
    losses.backward(grad_losses)
    assert losses.dtype == torch.float32
    check(losses, x.grad, kept, labels, grad_losses, smoothing)
    assert torch.equal(logits.detach().view(torch.uint8), kept.view(torch.uint8))


def test_masked_and_empty():
    logits, labels, _ = data()
    x = logits.requires_grad_()
    vocab_parallel_cross_entropy(x, labels, VOCAB, PADDED).backward(torch.zeros(TOKENS))
    assert (x.grad == 0).all()
    empty = torch.empty(0, PADDED, requires_grad=True)
    losses = vocab_parallel_cross_entropy(empty, labels[:0], VOCAB, PADDED)
    losses.sum().backward()
    assert losses.shape == (0,)
    assert empty.grad.shape == (0, PADDED)


def test_nan_logits_stay_visible():
    logits, labels, _ = data()
    logits[3, 5] = torch.nan
    losses = vocab_parallel_cross_entropy(logits, labels, VOCAB, PADDED)
    assert losses[3].isnan()
    assert losses[[0, 1, 2, 4]].isfinite().all()


def test_z_loss_is_the_square_of_the_log_sum():
    logits, labels, grad_losses = data()
    x, y = logits.clone().requires_grad_(), logits.double().requires_grad_()
    losses = vocab_parallel_cross_entropy(x, labels, VOCAB, PADDED, label_smoothing=0.1, z_loss=0.01)
    losses.backward(grad_losses)
    expected = F.cross_entropy(y[:, :VOCAB], labels, reduction="none", label_smoothing=0.1)
    expected = expected + 0.01 * y[:, :VOCAB].logsumexp(1).square()
    expected.backward(grad_losses.double())
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)
    assert (x.grad - y.grad).norm() < 1e-6 * y.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_writes_the_same_gradient_over_the_logits(dtype, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 5 * PADDED)
    logits, labels, weights = data(3.0, dtype)
    weights[7] = 0  # a masked token
    apart, place = logits.clone().requires_grad_(), logits.clone()
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    expected = (vocab_parallel_cross_entropy(apart, labels, VOCAB, PADDED, **options) * weights).sum()
    expected.backward()

    assert torch.equal(summed_cross_entropy(place, labels, weights, VOCAB, PADDED, **options), expected)
    assert torch.equal(place, logits)  # without a gradient nothing is written
    leaf = place.requires_grad_()
    loss = summed_cross_entropy(leaf, labels, weights, VOCAB, PADDED, **options)
    assert torch.equal(place, apart.grad)
    loss.backward(retain_graph=True)
    assert torch.equal(loss, expected)
    assert torch.equal(leaf.grad, apart.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    leaf = logits.clone().requires_grad_()
    (0.3 * summed_cross_entropy(leaf, labels, weights, VOCAB, PADDED, **options)).backward()
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(leaf.grad, (0.3 * apart.grad.double()).to(dtype), rtol=rounding, atol=0)
