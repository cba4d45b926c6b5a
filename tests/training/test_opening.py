"""The first lines of a run: what is trained, in which precision, and where; and of a run that is done."""

import pytest
from safetensors.torch import load_file

from megafp8.checkpoint import find_checkpoint
from tests.training.runs import RECIPES, flags, run, write_corpus

SHORT = ("--train-iters", "2", "--lr-warmup-iters", "0", "--eval-iters", "0")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_run_says_what_it_is_and_when_nothing_is_left(corpus, tmp_path, capsys):
    """Started twice: the second time all iterations are done."""
    saving = ("--save", str(tmp_path / "c"), "--load", str(tmp_path / "c"))
    command = flags(corpus, *RECIPES["blockwise"], *saving, *SHORT, "--keep-modules-in-bf16", "layers.1.mlp.fc2")
    assert run(*command) == 0
    text = capsys.readouterr().out
    saved = find_checkpoint(tmp_path / "c", None).directory / "model-00000.safetensors"
    assert f"model: {count_parameters(saved):,} parameters, 2 layers; an iteration is 4 samples of 32 tokens" in text
    assert "7 of 9 linears in FP8, the rest bf16; FP8 GEMMs: plain PyTorch" in text
    assert "fp8 blockwise: input e4m3 1x128" in text
    assert "one process on the CPU" in text
    assert "nothing left" not in text
    assert f"--load {tmp_path / 'c'} holds no checkpoint: a new run starts" in text
    assert run(*command) == 0
    text = capsys.readouterr().out
    assert "all 2 iterations are done: nothing left to train" in text
    assert "a new run starts" not in text


def test_fp8_off_is_said(corpus, capsys):
    assert run(*flags(corpus, *SHORT)) == 0
    assert "precision: fp32; FP8 is off" in capsys.readouterr().out


def test_fp8_that_reaches_no_linear_is_said(corpus, capsys):
    """Two layers, and both ends stay in BF16: the flag was given, so "off" would send people looking for it."""
    assert run(*flags(corpus, *RECIPES["blockwise"], *SHORT, "--first-last-layers-bf16")) == 0
    assert "FP8 is on for no linear (--dry-run says why)" in capsys.readouterr().out


def test_a_checkpoint_one_level_down_is_named(corpus, tmp_path, capsys):
    assert run(*flags(corpus, *SHORT, "--save", str(tmp_path / "ckpt"))) == 0
    capsys.readouterr()
    assert run(*flags(corpus, *SHORT, "--load", str(tmp_path))) == 0
    told = f"--load {tmp_path} holds no checkpoint ({tmp_path / 'ckpt'} does): a new run starts"
    assert told in capsys.readouterr().out


def count_parameters(path) -> int:
    return sum(tensor.numel() for tensor in load_file(path).values())
