"""Linears that are slower in FP8 stay in BF16, by a table of measurements; without one, none does."""

import logging

import pytest
import torch

from megafp8.config import parse_args
from megafp8.fp8 import crossover, policy

FLAGS = (
    "--num-layers 2 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 --swiglu --seq-length 64 "
    "--micro-batch-size 2 --train-iters 1 --lr 0 --bf16 --fp8-format e4m3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 99"
)


def in_fp8(*argv):
    found = policy.from_config(parse_args([*FLAGS.split(), *argv], env={}))
    names = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2", "mlp.experts.0.fc1")
    return {name for name in names if found(f"layers.1.{name}") is not None}


ALL = {"attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2", "mlp.experts.0.fc1"}


@pytest.fixture
def measured(monkeypatch):
    """A GPU that was measured: small linears lose, and all at few tokens do."""
    rows = [[128, 1536, 512, 0.8, 1.1], [128, 512, 512, 0.9], [128, 4096, 512, 1.2], [128, 512, 2048, 1.0]]
    rows += [[8, wide, deep, 0.5] for wide, deep in ((1536, 512), (512, 512), (4096, 512), (512, 2048))]
    monkeypatch.setattr(crossover, "table", lambda: {"G": {"blockwise": rows}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "G")
    crossover._say.cache_clear()


def test_without_a_table_nothing_changes(monkeypatch, tmp_path):
    monkeypatch.setattr(crossover, "TABLE", tmp_path / "none.json")
    monkeypatch.setattr(crossover, "table", crossover.table.__wrapped__)  # asked anew
    assert not crossover.table()
    assert in_fp8() == ALL


def test_by_the_nearest_measurement(measured, caplog):
    with caplog.at_level(logging.WARNING):
        assert in_fp8() == ALL - {"attention.qkv", "attention.proj"}
        in_fp8()
    lines = [record.message for record in caplog.records if "stays in BF16" in record.message]
    assert len(lines) == 2  # each once
    assert (
        "attention.qkv stays in BF16: at 128 tokens, 1536 x 512, FP8 (blockwise) has 0.80 of BF16's speed" in lines[0]
    )
    assert in_fp8("--micro-batch-size", "1", "--seq-length", "4") == {"mlp.experts.0.fc1"}


@pytest.mark.parametrize(("tokens", "kept"), [(256, False), (258, True), (64, False), (62, True), (16, False)])
def test_far_from_what_was_measured_nothing_changes(measured, tokens, kept):
    """A toy model is not slow in FP8 because the smallest that was measured is."""
    assert ("attention.qkv" in in_fp8("--micro-batch-size", "1", "--seq-length", str(tokens))) == kept


def test_what_overrides_it(measured):
    assert in_fp8("--fp8-module-recipes", "*.qkv=blockwise") == ALL - {"attention.proj"}
    assert in_fp8("--device", "cpu") == ALL
    assert in_fp8("--fp8-recipe", "mxfp8") == ALL  # not measured
    cut = in_fp8("--keep-modules-in-bf16", "*.fc2")
    assert cut == ALL - {"attention.qkv", "attention.proj", "mlp.fc2"}
