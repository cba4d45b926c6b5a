"""Runs of a small DeepSeek-like model: latent attention, experts with bias and losses, multi-token prediction."""

import pytest
import torch

from tests.cases import quick
from tests.training.runs import RECIPES, flags, metrics, run, run_in_new_process, tensors, write_corpus

DEEPSEEK = (
    *("--multi-latent-attention", "--qk-layernorm", "--q-lora-rank", "16", "--kv-lora-rank", "8"),
    *("--qk-head-dim", "8", "--qk-pos-emb-head-dim", "4", "--v-head-dim", "8", "--rotary-scaling-factor", "2"),
    *("--num-experts", "8", "--moe-layer-freq", "[0,1]", "--moe-ffn-hidden-size", "24", "--moe-router-topk", "2"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    *("--moe-router-num-groups", "4", "--moe-router-group-topk", "2", "--moe-shared-expert-intermediate-size", "24"),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "global_aux_loss", "--moe-aux-loss-coeff", "1e-2", "3e-2"),
    *("--moe-z-loss-coeff", "1e-3", "--moe-per-layer-logging"),
    *("--mtp-num-layers", "1", "--train-iters", "4", "--eval-interval", "3"),
)
BIAS = "model/layers.1.mlp.router.expert_bias"
LAST = "iter_0000004"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def command(corpus, directory, recipe, *extra):
    saving = ("--log-dir", str(directory), "--save", str(directory / "c"), "--load", str(directory / "c"))
    return flags(corpus, *DEEPSEEK, *RECIPES[recipe], *saving, *extra)


def assert_equal_runs(one, other):
    assert metrics(one) == metrics(other)
    state, state_2 = tensors(one / "c" / LAST), tensors(other / "c" / LAST)
    assert state.keys() == state_2.keys()
    assert [name for name in state if not torch.equal(state[name], state_2[name])] == []


@pytest.mark.parametrize("recipe", quick(["fp32", "blockwise", "delayed"], {"delayed"}))
def test_stop_and_resume(corpus, tmp_path, recipe):
    """CASES 15, 54: bit for bit, the experts' biases included."""
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*command(corpus, whole, recipe, *dropout)) == 0
    assert run(*command(corpus, parts, recipe, *dropout, "--exit-interval", "2")) == 0
    assert run_in_new_process(*command(corpus, parts, recipe, *dropout)) == 0
    assert_equal_runs(whole, parts)
    assert tensors(whole / "c" / LAST)[BIAS].dtype == torch.float32


@pytest.mark.parametrize("recipe", quick(["bf16", "blockwise", "delayed"], {"blockwise"}))
def test_recompute_changes_nothing(corpus, tmp_path, recipe):
    """CASES 22, 23, 54: losses in the log, biases and all weights are those without recomputation."""
    selective = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "layernorm", "mlp", "moe")
    for name, extra in {"kept": (), "full": ("--recompute-granularity", "full"), "parts": selective}.items():
        assert run(*command(corpus, tmp_path / name, recipe, *extra)) == 0
    for name in ("full", "parts"):
        assert_equal_runs(tmp_path / "kept", tmp_path / name)


def test_log_and_biases(corpus, tmp_path):
    """CASES 54: biases move once a step by the rate, whatever the microbatches, evaluations and recomputation."""
    again = ("--recompute-granularity", "full", "--eval-interval", "1", "--moe-router-bias-update-rate", "0.125")
    assert run(*command(corpus, tmp_path, "fp32", *again, "--exit-interval", "1")) == 0
    first = tensors(tmp_path / "c" / "iter_0000001")[BIAS]
    assert set(first.abs().tolist()) <= {0.0, 0.125}
    assert first.abs().sum() > 0
    assert run(*command(corpus, tmp_path, "fp32", *again)) == 0
    steps = tensors(tmp_path / "c" / LAST)[BIAS] / 0.125
    assert torch.equal(steps, steps.round())
    assert steps.abs().max() <= 4
    for line in metrics(tmp_path)[0]:
        assert 0.5 < line["seq_aux_loss"] < 4  # 1 when the load is even
        assert 0.5 < line["global_aux_loss"] < 4
        assert line["expert_load"].keys() == {"layers.1.mlp", "mtp.0.layer.mlp"}
        for load in line["expert_load"].values():
            assert sum(load) == 2 * line["global_batch_size"] * 32  # tokens of a sequence, two choices each
            assert line["expert_load_max"] >= 1 >= line["expert_load_min"]
        assert line["z_loss"] > 0
        assert 4 < line["mtp_1_loss"] < 7  # log 257 = 5.5
    assert metrics(tmp_path)[0][0]["global_aux_loss"] == pytest.approx(1), "the first step has no counts to follow"
    assert all("seq_aux_loss" not in line for line in metrics(tmp_path)[1])
    shares = tensors(tmp_path / "c" / LAST)["balance/layers.1.mlp.router.shares"]
    assert shares.dtype == torch.float32
    assert shares.sum().item() == pytest.approx(1)
    assert shares.std() > 0
