"""pretrain_gpt.py in pipelines and with context parallelism: the same run as on one process, evaluations, logs, saves
that any layout loads, mistakes told before anything starts; CASES 23 (auxiliary losses in the log)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megafp8.training.run_log import read_metrics
from tests.distributed.test_training import lines, near, start
from tests.training.runs import RECIPES, tensors, write_corpus

PP = ("--pipeline-model-parallel-size", "2")
DEEP = ("--num-layers", "4", "--untie-embeddings-and-output-weights")
LAYOUTS = {
    "interleaved": (2, (*PP, "--num-layers-per-virtual-pipeline-stage", "1")),
    "zero-bubble": (4, ("--pipeline-model-parallel-size", "4", "--pipeline-schedule", "zero-bubble")),
    "one": (1, ()),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def shown(log_dir: Path) -> tuple[list, list]:
    """What doesn't depend on the clock."""
    training, validation = read_metrics(log_dir)
    keys = ("iteration", "lm_loss", "grad_norm", "num_zeros", "params_norm", "learning_rate", "skipped")
    return [{k: line.get(k) for k in keys} for line in training], validation


@pytest.mark.parametrize("recipe", ["fp32", pytest.param("delayed", marks=pytest.mark.slow)])
def test_run_and_resumes_have_the_bits_of_one_process(pool, corpus, tmp_path, recipe):
    """Two stages train and save; other layouts go on: lines, evaluations and saved tensors are one process's."""
    common = (*DEEP, *RECIPES[recipe], "--log-num-zeros-in-grad", "--log-params-norm")
    one, saved = tmp_path / "alone", tmp_path / "saved"
    assert start(pool, 1, corpus, one, *common, "--save", str(tmp_path / "whole")) == [0]
    half = ("--exit-interval", "3", "--save", str(saved))
    assert start(pool, 2, corpus, tmp_path / "half", *common, *PP, *half) == [0, 0]
    assert shown(tmp_path / "half")[0] == shown(one)[0][:3]
    expected = {k: v for k, v in tensors(tmp_path / "whole" / "iter_0000006").items() if not k.startswith("rng/")}
    for name, (world, layout) in LAYOUTS.items():
        log_dir, again = tmp_path / name, tmp_path / f"{name}-saved"
        codes = start(pool, world, corpus, log_dir, *common, *layout, "--load", str(saved), "--save", str(again))
        assert codes == [0] * world
        assert shown(log_dir)[0] == shown(one)[0][3:], name
        assert shown(log_dir)[1] == shown(one)[1][1:], name
        actual = tensors(again / "iter_0000006")
        different = [k for k in expected if not torch.equal(actual[k], expected[k])]
        assert not different, (name, different)


def test_all_axes_but_data_equal_one_process(pool, corpus, tmp_path):
    """PP2 x CP2, tied, with documents that don't see each other."""
    documents = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
    short = ("--train-iters", "3", "--lr-warmup-iters", "1")
    assert start(pool, 1, corpus, tmp_path / "one", *documents, *short) == [0]
    for name, ring in (("gather", ()), ("ring", ("--cp-comm-type", "p2p"))):
        layout = (*PP, "--context-parallel-size", "2", *ring)
        assert start(pool, 4, corpus, tmp_path / name, *documents, *layout, *short) == [0] * 4
        for key in ("lm_loss", "grad_norm", "valid_loss"):
            assert near(lines(tmp_path / name, key), lines(tmp_path / "one", key)), (name, key)


SHORT = ("--train-iters", "3", "--lr-warmup-iters", "1", "--eval-interval", "9")
MOE = ("--num-experts", "4", "--moe-ffn-hidden-size", "24", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "1e-2")


def test_auxiliary_losses_in_the_log(pool, corpus, tmp_path):
    """CASES 23: with recomputation or not, in one process or two stages: the same number, the mean over all layers."""
    common = (*DEEP, *MOE, "--recompute-granularity")
    runs = {
        "one": (1, DEEP + MOE),
        "full": (1, (*common, "full")),
        "stages": (2, (*PP, *common, "full")),
    }
    for name, (world, extra) in runs.items():
        codes = start(pool, world, corpus, tmp_path / name, *extra, *SHORT)
        assert codes == [0] * world
    aux = {name: lines(tmp_path / name, "aux_loss") for name in runs}
    assert all(value > 0.5 for value in aux["one"])
    assert near(aux["full"], aux["one"])
    assert near(aux["stages"], aux["one"])


@pytest.mark.parametrize("text", ["--num-layers 3", "--num-virtual-stages-per-pipeline-rank 2"])
def test_stages_that_do_not_work_out_are_told_on_every_rank(pool, corpus, tmp_path, text):
    """CASES 80: the same error on all ranks, before any collective."""
    assert start(pool, 2, corpus, tmp_path / "x", *PP, *text.split()) == [2, 2]
    assert not (tmp_path / "x").exists()
