"""Slow data and slow ranks are told, quick ones are not."""

import re
import time

import torch

from megafp8.parallel import ParallelContext
from megafp8.training.balance import LocalTimes, balance
from megafp8.training.batches import IterationBatches
from tests.training.runs import flags, metrics, run, write_corpus

CPU = torch.device("cpu")


def test_slow_data_is_told():
    numbers, lines = balance(ParallelContext(), CPU, (2.0, 6.0), iterations=4, seconds=2.0)
    assert numbers == {"data_ms": 500, "compute_ms_max": 1500, "compute_ms_median": 1500, "slowest_rank": 0}
    assert lines == [
        "slow data: rank 0 waited 500 ms an iteration for its batches, 25% of the time; give more --num-workers, or "
        "faster storage"
    ]
    assert balance(ParallelContext(), CPU, (0.2, 6.0), iterations=4, seconds=2.0)[1] == []
    assert balance(ParallelContext(), CPU, (2.0, 6.0), iterations=4, seconds=2.0, starting=True)[1] == []


def test_waiting_for_data_is_no_work(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def slow():
        for i in range(3):
            clock[0] += 0.5
            yield i

    times, batches = LocalTimes(CPU), IterationBatches(1, slow(), 3, first_sample=12, samples=12)
    times.start()
    assert list(batches) == [0, 1, 2]
    clock[0] += 0.25
    times.stop()
    assert list(batches) == [0, 1, 2], "kept for a second run"
    times.waited += batches.waited
    waited, worked = times.take()
    assert (waited, worked) == (1.5, 0.25)
    assert times.take() == (0.0, 0.0)
    assert batches.sample_numbers(1, 0, 2) == range(16, 18)
    assert batches.sample_numbers(1, 1, 2) == range(18, 20)


def test_a_slow_loader_is_in_the_log(tmp_path, monkeypatch, capsys):
    from megafp8.data.loader import Loader

    original = Loader.__next__

    def slow(self):
        time.sleep(0.2)
        return original(self)

    monkeypatch.setattr(Loader, "__next__", slow)
    corpus = write_corpus(tmp_path)
    argv = flags(corpus, "--train-iters", "4", "--eval-iters", "0", "--log-interval", "2", "--log-dir", str(tmp_path))
    assert run(*argv) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"slow data: rank 0 waited \d{3,} ms", out)) == 1, "not of the first iterations"
    assert all(line["data_ms"] > 390 for line in metrics_with_times(tmp_path))


def metrics_with_times(directory):
    from megafp8.training.run_log import read_metrics

    assert "data_ms" not in metrics(directory)[0][0]
    return read_metrics(directory)[0]
