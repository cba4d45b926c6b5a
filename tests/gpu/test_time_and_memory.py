"""Timers, traces and the page of a run out of memory, on a GPU: events, kernels, the allocator's numbers, snapshots."""

import gzip
import json

import pytest
import torch

from megafp8.config import parse_args, with_vocab_size
from megafp8.plan.memory import plan_memory
from megafp8.training.run_log import read_metrics
from tests.training.runs import RECIPES, flags, run, write_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SHORT = ("--device", "cuda", "--train-iters", "6", "--eval-iters", "0", "--log-interval", "2")
LARGE = (
    *("--num-layers", "4", "--hidden-size", "1024", "--ffn-hidden-size", "4096", "--num-attention-heads", "16"),
    *("--seq-length", "2048", "--max-position-embeddings", "2048", "--micro-batch-size", "8"),
    *("--global-batch-size", "16"),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=400)


def test_times_are_between_events_and_the_trace_has_kernels(corpus, tmp_path):
    more = ("--timing-log-level", "2", "--profile", "--profile-step-start", "2", "--profile-step-end", "3")
    argv = flags(corpus, *SHORT, *LARGE, "--micro-batch-size", "2", *RECIPES["blockwise"], *more)
    assert run(*argv, "--log-dir", str(tmp_path)) == 0
    line = read_metrics(tmp_path)[0][-1]
    timers = line["timers"]
    inner = timers["forward-compute"]["max_ms"] + timers["backward-compute"]["max_ms"]
    assert 0 < inner <= timers["forward-backward"]["max_ms"] * 1.01
    assert timers["forward-backward"]["max_ms"] + timers["optimizer"]["max_ms"] <= line["elapsed_ms"] * 1.05
    (file,) = (tmp_path / "profile").iterdir()
    events = [e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if e["ph"] == "X"]
    assert sum(event["cat"] == "kernel" for event in events) > 100
    names = {event["name"] for event in events}
    for layer in range(4):
        assert {f"layers.{layer}.mlp.fc1", f"backward layers.{layer}.mlp.fc1"} <= names


def test_out_of_memory_ends_with_a_page_and_a_snapshot(corpus, tmp_path, capsys):
    """The process may have what stays through a step and a little more: the first forward doesn't fit."""
    argv = flags(corpus, *SHORT, *LARGE, *RECIPES["blockwise"], "--log-dir", str(tmp_path), "--record-memory-history")
    plan = plan_memory(with_vocab_size(parse_args(argv), 257), "cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((before + 1.1 * plan.static + (256 << 20)) / total)
    try:
        with pytest.raises(SystemExit) as end:
            run(*argv)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.memory._record_memory_history(enabled=None)
    assert end.value.code == 19
    err = capsys.readouterr().err
    assert "rank 0 of 1 ran out of memory in iteration 1: CUDA out of memory." in err
    assert "PyTorch has allocated" in err
    assert err.count("saves") == 3
    snapshot = tmp_path / "snapshot_rank0_oom.pickle"
    assert snapshot.stat().st_size > 10_000
    assert f"snapshot: {snapshot}" in err
    assert (tmp_path / "out_of_memory_rank0.txt").is_file()


def test_the_last_rank_writes_a_snapshot_with_each_line(corpus, tmp_path):
    argv = flags(corpus, *SHORT, *RECIPES["bf16"], "--log-dir", str(tmp_path), "--record-memory-history")
    try:
        assert run(*argv) == 0
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert (tmp_path / "snapshot_rank0.pickle").is_file()
