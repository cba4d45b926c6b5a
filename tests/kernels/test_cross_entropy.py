"""The kernels of cross entropy: compiled for Hopper, and run by the PTX emulator against PyTorch's in FP64."""

import pytest
import torch
from megafp8.kernels import cross_entropy as kernels
from torch.nn import functional as F

from megafp8.core.tensor_parallel import cross_entropy
from megafp8.core.tensor_parallel.cross_entropy import summed_cross_entropy, vocab_parallel_cross_entropy
from tests.kernels import testing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the GPU that is here")
VOCAB, PADDED, TOKENS = 4099, 4112, 3


@pytest.mark.parametrize(("dtype", "smoothing", "z"), [(torch.float32, 0.1, 0.01), (torch.bfloat16, 0.0, 0.0)])
def test_loss_and_gradient(dtype, smoothing, z, monkeypatch):
    """More than a block of columns, padding that nobody reads, a masked token, and a NaN that stays in its row."""
    monkeypatch.setattr(cross_entropy, "_kernels_for", lambda logits: kernels)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(TOKENS + 1, PADDED, generator=generator)).to(dtype)
    logits[:, VOCAB:] = torch.nan
    logits[TOKENS, 5] = torch.nan
    labels, weights = torch.tensor([0, VOCAB - 1, 4096, 7]), torch.tensor([1.0, 0.5, 0.0, 1.0])
    place = logits.clone().requires_grad_()
    options = {"label_smoothing": smoothing, "z_loss": z}
    with testing.emulated_launches():
        losses = vocab_parallel_cross_entropy(logits, labels, VOCAB, PADDED, **options)
        total = summed_cross_entropy(place, labels, weights, VOCAB, PADDED, **options)
        total.backward()
    x = logits[:TOKENS, :VOCAB].double().requires_grad_()
    expected = F.cross_entropy(x, labels[:TOKENS], reduction="none", label_smoothing=smoothing)
    expected = expected + z * x.logsumexp(1).square()
    expected.backward(weights[:TOKENS].double())
    torch.testing.assert_close(losses[:TOKENS].double(), expected, rtol=1e-6, atol=1e-6)
    assert losses[TOKENS].isnan()
    assert total.isnan()
    error = (place.grad[:TOKENS, :VOCAB].double() - x.grad).norm() / x.grad.norm()
    assert error < (1e-6 if dtype == torch.float32 else 4e-3)
    assert (place.grad[:, VOCAB:] == 0).all()
    assert (place.grad[2] == 0).all()
    assert place.grad[TOKENS, :VOCAB].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_and_among_ranks_the_same_bits(dtype, monkeypatch):
    """One rank's kernel gives what several ranks' operations do; labels of other ranks pick and subtract nothing."""
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.tensor([7, 45, 31, 32])  # of columns 7 to 38
    monkeypatch.setattr(cross_entropy, "_kernels_for", lambda logits: kernels)
    with testing.emulated_launches():
        top, total, picked = kernels.loss_rows(logits, 32, labels - 7)
        alone = kernels.loss_rows(logits, 32)
        grads = [torch.zeros(4, 40) for _ in range(2)]
        rest = (top, total.log(), torch.ones(4), 32)
        options = {"smoothing": 0.0, "vocab_size": 99, "z": 0.0}
        kernels.loss_grad(logits, grads[0], labels, *rest, first=7, **options)
        kernels.loss_grad(logits, grads[1], torch.full((4,), -1), *rest, first=7, **options)
    assert torch.equal(top, alone[0])
    assert torch.equal(total, alone[1])
    here = torch.tensor([True, False, True, True])
    column = (labels - 7).clamp(max=31)
    assert torch.equal(picked, (logits.gather(1, column[:, None])[:, 0].float() - top).masked_fill(~here, 0.0))
    expected = torch.zeros(4, 40)
    expected[here, column[here]] = -1.0
    torch.testing.assert_close(grads[0] - grads[1], expected, rtol=0, atol=1e-6)


def test_a_rank_that_adds_nothing():
    """It has no columns, or nothing but -inf: no NaN reaches the sum over the ranks."""
    with testing.emulated_launches():
        for found in (kernels.loss_rows(torch.empty(2, 16), 0), kernels.loss_rows(torch.full((2, 16), -torch.inf), 9)):
            assert [part.tolist() for part in found[:2]] == [[-torch.inf] * 2, [0, 0]]
    assert cross_entropy._kernels_for(torch.empty(2, 16)) is None  # on a CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.3, -2.0])
def test_scale(dtype, factor):
    """A factor of 1 leaves all alone: the bits of a NaN tell, of which arithmetic gives all the same."""
    x = torch.randn(3, 4099, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = x.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    bits[1, 7] = strange = 0x7F81 if dtype == torch.bfloat16 else 0x7F800001
    rounded = torch.tensor(factor).to(dtype).float()
    expected = (x.float() * rounded).to(dtype)
    with testing.emulated_launches():
        kernels.scale(x, torch.tensor(factor))
    assert torch.equal(x.nan_to_num(), expected.nan_to_num())
    assert (bits[1, 7] == strange) == (factor == 1)


def test_compiled_for_hopper():
    """16 bytes at a time, and nothing spills."""
    logits, numbers = torch.empty(4, 128256, dtype=torch.bfloat16), torch.empty(4)
    with testing.captured_launches() as launches:
        kernels.loss_rows(logits, 128256)
        labels = torch.ones(4, dtype=torch.int64)
        kernels.loss_rows(logits, 128256, labels)
        kernels.loss_grad(logits, logits, labels, *(numbers,) * 3, 128256, first=0, smoothing=0.0, vocab_size=9, z=0.0)
        kernels.scale(logits, numbers[:1])
    names = ["loss_rows_kernel", "loss_rows_kernel", "loss_grad_kernel", "loss_grad_scale_kernel"]
    assert [launch.kernel.__name__ for launch in launches] == names
    for launch in launches:
        used = testing.resources(testing.compile_launch(launch))
        assert used.spills == 0
        assert any(op.startswith("LDG.E.128") for op in used.instructions), launch.kernel.__name__
