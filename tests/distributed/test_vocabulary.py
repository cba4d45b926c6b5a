"""Vocabulary-parallel loss and embedding on 2 and 4 ranks against the dense ones; a vocabulary no size divides."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.config import Config
from megafp8.config.model import ModelConfig
from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.cross_entropy import summed_cross_entropy, vocab_parallel_cross_entropy
from megafp8.core.tensor_parallel.embedding import VocabParallelEmbedding
from megafp8.parallel import ParallelContext, build_parallel
from megafp8.step import StepContext
from tests.distributed.layouts import distance

VOCAB, TOKENS, HIDDEN = 101, 36, 16


def context(sequence_parallel: bool = False) -> ParallelContext:
    size = torch.distributed.get_world_size()
    sizes = {"world_size": size, "tensor_model_parallel_size": size, "sequence_parallel": sequence_parallel}
    return build_parallel(Config().replace(**sizes), "cpu")


def data(padded: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, padded, generator=generator) * scale
    return logits, torch.randint(VOCAB, (TOKENS,), generator=generator), torch.randn(TOKENS, generator=generator)


CASES = list(itertools.product((104, 128, 256), (1.0, 1000.0), (0.0, 0.1), (0.0, 0.01)))


def losses() -> list[tuple[Tensor, Tensor]]:
    """(losses, gradient of this rank's columns) of each case."""
    tp, found = context().tp, []
    for padded, scale, smoothing, z in CASES:
        logits, labels, weights = data(padded, scale)
        logits[:, VOCAB:] = torch.nan  # padding is never read
        part = logits[:, slice(*tp.split(padded))].clone().requires_grad_()
        kept = part.detach().clone()
        loss = vocab_parallel_cross_entropy(part, labels, VOCAB, padded, label_smoothing=smoothing, z_loss=z, tp=tp)
        loss.backward(weights)
        assert torch.equal(part.detach().view(torch.int32), kept.view(torch.int32)), "the logits were changed"
        place = kept.clone().requires_grad_()
        total = summed_cross_entropy(place, labels, weights, VOCAB, padded, label_smoothing=smoothing, z_loss=z, tp=tp)
        total.backward()
        assert torch.equal(total, (loss * weights).sum())
        assert torch.equal(place.grad, part.grad)
        found.append((loss.detach(), part.grad))
        with pytest.raises(ValueError, match=f"each of {tp.size} ranks must pass its part"):
            vocab_parallel_cross_entropy(logits, labels, VOCAB, padded, tp=tp)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_loss_equals_dense_fp64(pool, world):
    """CASES 61, 82: with 256 rows, some ranks hold padding only."""
    ranks = pool.run_on(world, losses)
    for (padded, scale, smoothing, z), *found in zip(CASES, *ranks, strict=True):
        logits, labels, weights = data(padded, scale)
        x = logits.double().requires_grad_()
        expected = F.cross_entropy(x[:, :VOCAB], labels, reduction="none", label_smoothing=smoothing)
        expected = expected + z * x[:, :VOCAB].logsumexp(1).square()
        expected.backward(weights.double())
        for loss, _ in found:
            torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
        grad = torch.cat([part for _, part in found], 1)
        assert distance(grad, x.grad) < 1e-6
        assert (grad[:, VOCAB:] == 0).all()


def nan_on_the_last_rank() -> Tensor:
    tp = context().tp
    logits, labels, _ = data(104, 1.0)
    logits[3, 100] = torch.nan
    part = logits[:, slice(*tp.split(104))].contiguous()
    return vocab_parallel_cross_entropy(part, labels, VOCAB, 104, tp=tp)


def test_nan_logit_of_one_rank_is_seen_by_all(pool):
    for loss in pool.run_on(2, nan_on_the_last_rank):
        assert loss.isnan().nonzero().flatten().tolist() == [3]


MODEL = ModelConfig(hidden_size=HIDDEN, unpadded_vocab_size=VOCAB, padded_vocab_size=128)
IDS = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1))


def table() -> Tensor:
    return torch.randn(128, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()


def embedded(sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    """(this rank's output, gradient of its rows), for a gradient that is 1 for each element of the output."""
    parallel = context(sequence_parallel)
    layer = VocabParallelEmbedding("words", BuildContext(MODEL, dtype=torch.bfloat16, parallel=parallel))
    start, stop = parallel.tp.split(128)
    with torch.no_grad():
        layer.weight.copy_(table()[start:stop])
    out = layer(IDS, StepContext())
    out.sum().backward()
    return out.detach(), layer.weight.grad


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_embedding_equals_dense(pool, world, sequence_parallel):
    outputs, grads = zip(*pool.run_on(world, embedded, sequence_parallel), strict=True)
    if sequence_parallel:
        assert torch.equal(torch.cat(outputs), table()[IDS])
    else:
        assert all(torch.equal(out, table()[IDS]) for out in outputs)
    counts = torch.bincount(IDS, minlength=128)[:, None].expand(128, HIDDEN)
    assert torch.equal(torch.cat(grads), counts.bfloat16())
