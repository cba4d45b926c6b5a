"""Core attention against dense FP64 softmax, head by head; documents, empty ones too; dropout."""

import math

import pytest
import torch

from megafp8.core.transformer.core_attention import CoreAttention, Sequences
from megafp8.step import Phase, StepContext

STEP = StepContext()


def qkv(tokens, heads, groups, d=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, n, d, generator=generator).to(dtype).requires_grad_() for n in (heads, groups, groups)]


def dense(q, k, v, documents, window=None):
    """documents: [T], equal numbers see each other (causally, in the order of tokens; `window` tokens back)."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    tokens, heads, d = q.shape
    mask = (documents[:, None] == documents[None]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    mask = mask if window is None else mask.triu(-window)
    outs = []
    for h in range(heads):
        g = h // (heads // k.shape[1])
        scores = (q[:, h] @ k[:, g].T / math.sqrt(d)).masked_fill(~mask, -math.inf)
        outs.append(scores.softmax(-1) @ v[:, g])
    return torch.cat(outs, 1), (q, k, v)


@pytest.mark.parametrize("window", [None, 0, 3, 11])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("bounds", [None, [0, 24], [0, 1, 5, 5, 12, 24], [0, 0, 12, 23, 24]])
def test_equals_dense(bounds, heads, groups, window):
    inputs = qkv(24, heads, groups)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    sequences = (
        Sequences(2, 12, cu_seqlens=cu_seqlens) if bounds != [0, 24] else Sequences(1, 24, cu_seqlens=cu_seqlens)
    )
    documents = torch.bucketize(torch.arange(24), torch.tensor(bounds or [0, 12, 24]), right=True)
    out = CoreAttention("layers.0.attention.core", window=window)(*inputs, sequences, STEP)
    expected, exact = dense(*inputs, documents, window)
    assert out.shape == (24, heads * 8)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(24, heads * 8)
    out.backward(grad)
    expected.backward(grad.double())
    for x, reference in zip(inputs, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("documents", [False, True])
def test_dropout(documents):
    """Repeats for the same step, differs for another, is off in evaluation, and keeps the mean."""
    core = CoreAttention("layers.0.attention.core", dropout=0.3)
    inputs = qkv(24, 4, 2)
    sequences = Sequences(2, 12, cu_seqlens=torch.tensor([0, 5, 12, 24], dtype=torch.int32) if documents else None)

    def run(**fields):
        return core(*inputs, sequences, StepContext(**fields)).detach()

    assert torch.equal(run(), run())
    assert torch.equal(run(), run(phase=Phase.RECOMPUTE))
    assert not torch.equal(run(), run(microbatch=1))
    exact = CoreAttention("x")(*inputs, sequences, STEP).detach()
    assert torch.equal(run(phase=Phase.EVAL), exact)
    mean = torch.stack([run(iteration=i) for i in range(2000)]).mean(0)
    torch.testing.assert_close(mean, exact, rtol=0, atol=0.15)


def test_output_is_what_backward_keeps():
    """`proj` can read its input for backward from the tensor that attention keeps anyway: same storage, no copy."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = CoreAttention("x")(*qkv(24, 4, 2, dtype=torch.bfloat16), Sequences(2, 12), STEP)
    assert out.is_contiguous()
    assert out.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in saved}
