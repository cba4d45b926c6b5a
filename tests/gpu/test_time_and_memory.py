"""Timers, traces and the page of a run out of memory, on a GPU: events, kernels, the allocator's numbers, snapshots."""

import gzip
import json
import os
import signal
from collections import Counter
from threading import get_ident

import pytest
import torch

from megafp8.config import parse_args, with_vocab_size
from megafp8.plan.memory import plan_memory
from megafp8.training import profiling, trainer
from megafp8.training.run_log import read_metrics
from tests.training.runs import RECIPES, flags, run, write_corpus

SHORT = ("--device", "cuda", "--train-iters", "6", "--eval-iters", "0", "--log-interval", "2")
LARGE = (
    *("--num-layers", "4", "--hidden-size", "1024", "--ffn-hidden-size", "4096", "--num-attention-heads", "16"),
    *("--seq-length", "2048", "--max-position-embeddings", "2048", "--micro-batch-size", "8"),
    *("--global-batch-size", "16", "--fp8-small-linears", "fp8"),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=400)


def nests(spans: list[tuple[float, float, str]]) -> bool:
    """Whether none of a thread's spans (begin, end, name) ends within another one that began before it."""
    open_until: list[tuple[float, str]] = []
    for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1][0] <= begin:
            open_until.pop()
        if open_until and end > open_until[-1][0] + 1e-3:  # microseconds
            print(f"{name} ends after {open_until[-1][1]}, which it began in")
            return False
        open_until.append((end, name))
    return True


def test_the_trace_has_kernels_and_spans_that_nest_on_each_thread(corpus, tmp_path, monkeypatch):
    """Autograd runs backward on a thread of its own: its spans begin and end there."""
    opened, pops, begun_on = Counter(), Counter(), []
    push, pop, begin = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop, profiling.Marks.begin_backward

    def ends_there(self, name):
        begun_on.append(get_ident())
        begin(self, name)

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (opened.update([get_ident()]), push(name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: (pops.update([get_ident()]), pop()))
    monkeypatch.setattr(profiling.Marks, "begin_backward", ends_there)
    more = ("--profile", "--profile-step-start", "2", "--profile-step-end", "3", "--micro-batch-size", "2")
    argv = flags(corpus, *SHORT, *LARGE, *RECIPES["blockwise"], *more)
    assert run(*argv, "--log-dir", str(tmp_path)) == 0
    assert opened == pops, "each thread's NVTX ranges are closed on that thread"
    assert begun_on
    assert get_ident() not in begun_on, "autograd's thread is another one"
    (file,) = (tmp_path / "profile").iterdir()
    events = [e for e in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"] if e["ph"] == "X"]
    assert sum(event["cat"] == "kernel" for event in events) > 100
    names, threads = {event["name"] for event in events}, {}
    for layer in range(4):
        assert {f"layers.{layer}.mlp.fc1", f"backward layers.{layer}.mlp.fc1"} <= names
    for event in events:
        if event["cat"] == "user_annotation":
            threads.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert len(threads) > 1
    assert all(nests(spans) for spans in threads.values())
    (whole,) = (event for event in events if event["name"] == "iteration 3" and event["cat"] == "user_annotation")
    last = max(event["ts"] + event["dur"] for event in events if event["name"].startswith("backward "))
    assert last <= whole["ts"] + whole["dur"]


def test_times_are_between_events_and_add_up_to_the_step(corpus, tmp_path):
    argv = flags(corpus, *SHORT, *LARGE, "--micro-batch-size", "2", *RECIPES["blockwise"], "--timing-log-level", "2")
    assert run(*argv, "--train-iters", "16", "--log-interval", "8", "--log-dir", str(tmp_path)) == 0
    line = read_metrics(tmp_path)[0][-1]
    timers = {name: phase["max_ms"] for name, phase in line["timers"].items()}
    print(line["elapsed_ms"], timers)
    inner = timers["forward-compute"] + timers["backward-compute"]
    assert 0 < inner <= timers["forward-backward"] * 1.01
    assert timers["forward-backward"] + timers["optimizer"] == pytest.approx(line["elapsed_ms"], rel=0.2)


def test_out_of_memory_ends_with_a_page_and_a_snapshot(corpus, tmp_path, capsys):
    """The process may have what stays through a step and a little more: the first forward doesn't fit."""
    argv = flags(corpus, *SHORT, *LARGE, *RECIPES["blockwise"], "--log-dir", str(tmp_path), "--record-memory-history")
    plan = plan_memory(with_vocab_size(parse_args(argv), 257), "cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
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
    print(err)
    assert "rank 0 of 1 ran out of memory in iteration 1: CUDA out of memory." in err
    assert "PyTorch has allocated" in err
    assert "not known" not in err
    for owner in ("weights", "main gradients (fp32)", "master weights", "Adam moments"):
        (line,) = (line for line in err.splitlines() if line.startswith(f"  {owner} "))
        planned, now = (float(word.replace(",", "")) for word in line.removeprefix(f"  {owner}").split()[::2])
        assert now == pytest.approx(planned, rel=0.02), line
    assert "layers.*.attention.qkv" in err, "what its backward would have read"
    assert err.count("saves") == 3
    snapshot = tmp_path / "snapshot_rank0_oom.pickle"
    assert snapshot.stat().st_size > 10_000
    assert f"snapshot: {snapshot}" in err
    assert (tmp_path / "out_of_memory_rank0.txt").is_file()


def test_the_last_rank_writes_a_snapshot_with_each_line_and_on_demand(corpus, tmp_path, monkeypatch, capsys):
    original = trainer.Trainer._iteration

    def asks(self, batches):
        if self.progress.iteration == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
        return original(self, batches)

    monkeypatch.setattr(trainer.Trainer, "_iteration", asks)
    argv = flags(corpus, *SHORT, *RECIPES["bf16"], "--log-dir", str(tmp_path), "--record-memory-history")
    try:
        assert run(*argv) == 0
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert (tmp_path / "snapshot_rank0.pickle").stat().st_size > 10_000
    assert (tmp_path / "snapshot_rank0_iter4.pickle").stat().st_size > 10_000
    page, out = (tmp_path / "memory_rank0_iter4.txt").read_text(), capsys.readouterr().out
    print(out)
    assert page in out
    assert "PyTorch has allocated" in page
    assert "not known" not in page
