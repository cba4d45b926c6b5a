"""Bad input gets one clear line and exit code 2 before training starts (issue's list, CASES 72, 74)."""

import numpy as np
import pytest

from megafp8.data import IndexedDatasetBuilder
from tests.training.runs import EOD, RECIPES, TEXT, flags, metrics, run, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def error_of(capsys, *argv) -> str:
    """The one line on stderr of a command that must exit with 2 before an iteration was run."""
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert "iteration" not in captured.out
    lines = [line for line in captured.err.splitlines() if line.startswith("pretrain_gpt.py: error: ")]
    assert len(lines) == 1, captured.err
    return lines[0]


FLAG_MISTAKES = {
    "unknown recipe": (("--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blokwise"), ("blokwise", "blockwise")),
    "mxfp8 hybrid": (("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "mxfp8"), ("mxfp8", "hybrid", "e4m3")),
    "fp8 flag without format": (("--bf16", "--fp8-recipe", "blockwise"), ("--fp8-recipe", "--fp8-format")),
    "fp8 without bf16": (("--fp8-format", "e4m3"), ("--fp8-format", "--bf16")),
    "pattern without a match": (
        ("--bf16", "--fp8-format", "e4m3", "--keep-modules-in-bf16", "layers.*.mlp.fc9"),
        ("layers.*.mlp.fc9",),
    ),
    "sequence longer than positions": (("--seq-length", "64"), ("--seq-length", "--max-position-embeddings")),
    "batch": (("--global-batch-size", "5"), ("--global-batch-size", "--micro-batch-size")),
    "heads": (("--num-attention-heads", "5"), ("--num-attention-heads", "--hidden-size")),
    "misspelt flag": (("--hiden-size", "32"), ("--hiden-size", "--hidden-size")),
    "fp16": (("--fp16",), ("--fp16", "--bf16")),
    "no documents": (("--split", "0,100,0"), ("train", "--split")),
    "no such checkpoint": (("--load", "nowhere", "--ckpt-step", "5"), ("--ckpt-step",)),
}


@pytest.mark.parametrize("case", FLAG_MISTAKES)
def test_flags(corpus, capsys, case):
    extra, words = FLAG_MISTAKES[case]
    line = error_of(capsys, *flags(corpus, *extra))
    for word in words:
        assert word in line


def test_missing_and_truncated_data(corpus, tmp_path, capsys):
    assert "nowhere" in error_of(capsys, *flags(tmp_path / "nowhere"))
    prefix = write_corpus(tmp_path, documents=10)
    data = prefix.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-100])
    assert "corpus.bin" in error_of(capsys, *flags(prefix))
    prefix = write_corpus(tmp_path, documents=10)
    index = prefix.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-10])
    assert "corpus.idx" in error_of(capsys, *flags(prefix))


def test_token_beyond_the_vocabulary(tmp_path, capsys):
    with IndexedDatasetBuilder(tmp_path / "big", np.uint16) as builder:
        for _ in range(20):
            builder.add_document(np.array([1, 2, 300] * 40 + [EOD]))
    line = error_of(capsys, *flags(tmp_path / "big"))
    assert "300" in line
    assert "257" in line


def test_tokenizer_that_is_not_the_checkpoints(corpus, tmp_path, capsys):
    saving = ("--save", str(tmp_path / "c"), "--load", str(tmp_path / "c"))
    assert run(*flags(corpus, *saving, "--train-iters", "2", "--lr-warmup-iters", "0")) == 0
    capsys.readouterr()
    other = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "300", "--train-iters", "4")
    line = error_of(capsys, *flags(corpus, *saving, *other))
    assert "tokenizer" in line
    assert "ByteTokenizer" in line


def test_empty_validation_split_is_only_noted(corpus, tmp_path, capsys):
    assert run(*flags(corpus, "--split", "100,0,0", "--train-iters", "2", "--lr-warmup-iters", "0")) == 0
    assert "validation split has no documents" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES)
def test_dry_run_of_every_recipe(corpus, capsys, recipe):
    assert run(*flags(corpus, *RECIPES[recipe], "--dry-run")) == 0
    modules = capsys.readouterr().out.partition("== modules")[2].partition("== parameters")[0]
    precision = {line.split()[0]: line for line in modules.splitlines() if line[:1].isalpha()}
    expected = f"fp8 {recipe}" if "--fp8-format" in RECIPES[recipe] else recipe
    assert expected in precision["layers.0-1.mlp.fc2"]
    assert ("fp32" if recipe == "fp32" else "bf16") in precision["lm_head"]


def test_text_is_there():
    assert TEXT.stat().st_size > 1_000_000


@pytest.mark.parametrize("flag", ["--save", "--log-dir", "--tensorboard-dir", "--load"])
def test_places_that_are_none(corpus, tmp_path, capsys, flag):
    """Before training, not after days of it."""
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / ("x" * 300)):
        assert flag in error_of(capsys, *flags(corpus, flag, str(place)))


def test_model_beyond_memory(corpus, capsys):
    assert "--dry-run" in error_of(capsys, *flags(corpus, "--hidden-size", "4000000"))


def test_lost_last_save_is_no_success(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megafp8.training.trainer.RunState.save", lambda *_: False)
    short = ("--train-iters", "1", "--eval-iters", "0", "--lr-warmup-iters", "0")
    assert run(*flags(corpus, "--save", str(tmp_path / "c"), *short)) == 1
    assert "could not save iteration 1" in capsys.readouterr().out


def test_batches_without_a_token_that_counts(tmp_path, capsys):
    """A loss of 0, no NaN: nothing is wrong, and no weight moves."""
    with IndexedDatasetBuilder(tmp_path / "eods", np.uint16) as builder:
        for _ in range(30):
            builder.add_document(np.array([EOD] * 60))
    short = ("--train-iters", "2", "--lr-warmup-iters", "0", "--log-interval", "1")
    assert run(*flags(tmp_path / "eods", *short, "--eod-mask-loss", "--log-dir", str(tmp_path / "log"))) == 0
    training, _ = metrics(tmp_path / "log")
    assert [(line["lm_loss"], line["grad_norm"], line["nan"]) for line in training] == [(0.0, 0.0, 0)] * 2
