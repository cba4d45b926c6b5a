"""On the GPU looking changes no bit of a run either, and fallbacks give runs with FP8 primary weights the same bits."""

import json

import pytest
import torch

from tests.training.runs import RECIPES, flags, metrics, run, tensors, write_corpus
from tests.training.test_guard import PRIMARY, events, infinite_output, plant, skipped

FP8 = [name for name in RECIPES if name not in ("fp32", "bf16")]
SIZE = ("--hidden-size", "256", "--ffn-hidden-size", "384", "--num-attention-heads", "4", "--seq-length", "128",
        "--max-position-embeddings", "128")  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=200)


def command(corpus, directory, recipe, *extra):
    saving = ("--log-dir", str(directory), "--save", str(directory / "c"))
    short = ("--train-iters", "6", "--eval-iters", "0", "--log-interval", "1", "--device", "cuda")
    return flags(corpus, *SIZE, *RECIPES[recipe], "--deterministic-mode", *short, *saving, *extra)


def assert_same(one, other, name="iter_0000006"):
    drop = ("compute_ms_max", "compute_ms_median")
    lines = [[{k: v for k, v in line.items() if k not in drop} for line in metrics(d)[0]] for d in (one, other)]
    assert lines[0] == lines[1]
    mine, theirs = tensors(one / "c" / name), tensors(other / "c" / name)
    assert [k for k in mine if not torch.equal(mine[k], theirs[k])] == []


@pytest.mark.parametrize("recipe", FP8)
def test_on_or_off_changes_no_bit(corpus, tmp_path, recipe):
    for name, extra in (("on", ("--fp8-monitor-interval", "2")), ("off", ())):
        assert run(*command(corpus, tmp_path / name, recipe, *extra)) == 0
    assert_same(tmp_path / "on", tmp_path / "off")
    lines = [json.loads(line) for line in (tmp_path / "on" / "fp8_monitor.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 24
    noise = [line["sqnr_db"] for line in lines if line["sqnr_db"] is not None]
    assert len(noise) >= 2 * len(lines) // 3
    assert recipe == "delayed" or all(20 < value < 45 for value in noise)  # scales of the past may not fit


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_fp8_primary_weights_fall_back_to_the_same_bits(corpus, tmp_path, recipe):
    for name, extra in (("plain", ()), ("primary", PRIMARY)):
        argv = command(corpus, tmp_path / name, recipe, "--fp8-fallback-after", "1", *extra)
        with plant(infinite_output, iterations=range(3, 99)):
            assert run(*argv) == 0
        assert skipped(tmp_path / name) == [3]
        assert [event["event"] for event in events(tmp_path / name)] == ["nonfinite", "fp8-fallback"]
    assert_same(tmp_path / "plain", tmp_path / "primary")
