"""The loss and its gradients are of all valid tokens of the global batch, however they are cut (CASES 18)."""

import pytest
import torch

from megafp8.config import parse_args
from megafp8.data import Batch
from megafp8.parallel import ParallelContext
from megafp8.training.build import build_parts
from megafp8.training.step import forward_backward
from tests.training.runs import flags, metrics, run, write_corpus

VALID = (3, 32, 1, 0)  # valid tokens of the samples; the last one is fully masked


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def gradients(parts, size):
    """Loss and main_grads of one masked global batch in microbatches of `size`."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (4, 33), generator=generator)
    mask = torch.zeros(4, 32)
    for row, count in enumerate(VALID):
        mask[row, torch.randperm(32, generator=generator)[:count]] = 1.0
    positions = torch.arange(32).expand(4, 32)
    batches = [
        Batch(tokens[i : i + size, :-1], tokens[i : i + size, 1:], mask[i : i + size], positions[i : i + size])
        for i in range(0, 4, size)
    ]
    parts.optimizer.zero_grad()
    output = forward_backward(
        parts.model, parts.optimizer, batches, iteration=1, seed=7, scaling=None, device=torch.device("cpu")
    )
    grads = {name: view.clone() for name, view in parts.optimizer.grads.state.views.items()}
    return output, grads


@pytest.mark.parametrize("size", [1, 2])
def test_microbatch_size_changes_only_rounding_masked_tokens_included(corpus, size):
    parts = build_parts(parse_args(flags(corpus)), ParallelContext(), torch.device("cpu"))
    whole, whole_grads = gradients(parts, 4)
    cut, cut_grads = gradients(parts, size)
    assert whole.valid_tokens == cut.valid_tokens == sum(VALID)
    assert torch.isfinite(whole.loss)
    torch.testing.assert_close(cut.loss, whole.loss, rtol=1e-6, atol=0)
    for name, grad in whole_grads.items():
        assert (cut_grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_mean_of_means_would_be_seen(corpus):
    """The planted fault: averaging microbatch means gives another loss on this batch."""
    parts = build_parts(parse_args(flags(corpus)), ParallelContext(), torch.device("cpu"))
    whole, _ = gradients(parts, 4)
    means = []
    for row in range(3):
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 256, (4, 33), generator=generator)
        mask = torch.zeros(4, 32)
        for i, count in enumerate(VALID):
            mask[i, torch.randperm(32, generator=generator)[:count]] = 1.0
        one = tokens[row : row + 1]
        batch = Batch(one[:, :-1], one[:, 1:], mask[row : row + 1], torch.arange(32)[None])
        parts.optimizer.zero_grad()
        output = forward_backward(
            parts.model, parts.optimizer, [batch], iteration=1, seed=7, scaling=None, device=torch.device("cpu")
        )
        means.append(output.loss)
    assert abs(torch.stack(means).mean() - whole.loss) > 1e-4 * whole.loss


def test_a_run_is_the_same_for_any_microbatch_size(corpus, tmp_path):
    for size in ("1", "4"):
        argv = flags(corpus, "--micro-batch-size", size, "--log-dir", str(tmp_path / size), "--eod-mask-loss")
        assert run(*argv, "--train-iters", "5") == 0
    one, four = metrics(tmp_path / "1")[0], metrics(tmp_path / "4")[0]
    for a, b in zip(one, four, strict=True):
        assert a["lm_loss"] == pytest.approx(b["lm_loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
