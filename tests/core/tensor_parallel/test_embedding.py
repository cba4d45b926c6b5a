"""The look-up's gradient: FP32 sums in a fixed order, into main_grad or .grad."""

import pytest
import torch

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.embedding import VocabParallelEmbedding, lookup
from megafp8.step import StepContext
from tests.core.helpers import LLAMA, VOCAB, Sink


def make(dtype):
    module = VocabParallelEmbedding("embedding.word_embeddings", BuildContext(LLAMA, dtype=dtype))
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_gradients(dtype):
    """Frequent tokens: BF16 sums would stop growing at 256 equal addends."""
    module = make(dtype)
    ids = torch.randint(VOCAB, (3000,), generator=torch.Generator().manual_seed(1))
    ids[:2000] = 5
    grad = torch.rand(3000, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = torch.zeros(128, 32, dtype=torch.float64).index_add_(0, ids, grad.double())

    out = module(ids, None)
    assert torch.equal(out, module.weight[ids])
    out.backward(grad)
    assert module.weight.grad.dtype == dtype
    torch.testing.assert_close(
        module.weight.grad.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=0
    )

    sink = Sink(module)
    module.weight.grad = None
    module(ids, StepContext(grads=sink)).backward(grad)
    assert module.weight.grad is None
    assert sink.calls == ["embedding.word_embeddings.weight"]
    buffer = sink.buffers["embedding.word_embeddings.weight"]
    torch.testing.assert_close(buffer.double() - Sink.OFFSET, expected, rtol=1e-5, atol=1e-5)
    assert (buffer[VOCAB:] == Sink.OFFSET).all()


def test_same_bits_with_several_threads():
    """No floating-point atomics: the CPU's index_put_ would add in any order."""
    weight = torch.zeros(4, 64, requires_grad=True)
    ids = torch.randint(4, (4096,), generator=torch.Generator().manual_seed(1))
    grad = torch.randn(4096, 64, generator=torch.Generator().manual_seed(2))
    grads, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 2, 2):
            torch.set_num_threads(count)
            weight.grad = None
            lookup(weight, ids, None).backward(grad)
            grads.append(weight.grad)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(g, grads[0]) for g in grads)
