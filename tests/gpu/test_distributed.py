"""Two GPUs over NCCL against one: pretrain_gpt.py under torchrun (needs a machine with two GPUs)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafp8.training.run_log import read_metrics
from tests.training.runs import RECIPES, write_corpus

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
ROOT = Path(__file__).resolve().parents[2]
TP_SP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=40, length=2000)


def train(corpus: Path, log_dir: Path, processes: int, *extra: str) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of ten steps."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *("pretrain_gpt.py", "--num-layers", "4", "--hidden-size", "1024", "--ffn-hidden-size", "2048"),
        *("--num-attention-heads", "16", "--group-query-attention", "--num-query-groups", "8"),
        *("--seq-length", "512", "--max-position-embeddings", "512", "--position-embedding-type", "rope"),
        *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
        *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "10", "--lr", "1e-4"),
        *("--hidden-dropout", "0", "--attention-dropout", "0", "--eval-iters", "0", "--deterministic-mode"),
        *("--data-path", str(corpus), "--split", "100,0,0", "--tokenizer-type", "ByteTokenizer"),
        *("--device", "cuda", "--log-interval", "1", "--log-dir", str(log_dir), *extra),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=280)
    training, _ = read_metrics(log_dir)
    return [line["lm_loss"] for line in training], [line["grad_norm"] for line in training]


@pytest.mark.parametrize("layout", [TP_SP, TP_SP[:2], ()], ids=["TP2+SP", "TP2", "DP2"])
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "blockwise"])
def test_two_gpus_train_as_one(corpus, tmp_path, recipe, layout):
    one, two = (train(corpus, tmp_path / str(n), n, *RECIPES[recipe], *(layout if n == 2 else ())) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=2e-2)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_overlap_changes_no_number(corpus, tmp_path, recipe):
    plain = train(corpus, tmp_path / "plain", 2, *RECIPES[recipe], *TP_SP)
    assert train(corpus, tmp_path / "overlap", 2, *RECIPES[recipe], *TP_SP, "--tp-comm-overlap") == plain
