"""Phases of an iteration: measured at their level, in the log, in metrics.jsonl and in TensorBoard."""

import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megafp8.parallel import ParallelContext
from megafp8.step import no_spans
from megafp8.training import step
from megafp8.training.run_log import read_metrics
from megafp8.training.timers import DATA, OPEN_SPANS, PHASES, PhaseTime, Timers, over_ranks, table
from tests.training.runs import flags, run, write_corpus

CPU = torch.device("cpu")


def test_phases_above_the_level_are_not_marked():
    assert Timers(CPU).names == ()
    quiet = Timers(CPU, 1)
    assert quiet("forward-compute") is no_spans("")
    with quiet("forward-backward"), quiet("forward-compute"):
        time.sleep(0.02)
    phases, waited = quiet.take()
    assert set(phases) == {"forward-backward", "all-grads-sync", "optimizer"}
    assert phases["forward-backward"] >= 0.02
    assert waited == 0
    assert set(quiet.take()[0].values()) == {0.0}


def test_waits_count_as_no_work_where_the_rank_is_at_work():
    timers = Timers(CPU, 2)
    assert set(timers.names) == set(PHASES)
    with timers("communication"):
        time.sleep(0.02)
    timers.working = True
    with timers("forward-recv"):
        time.sleep(0.01)
    phases, waited = timers.take()
    assert phases["communication"] >= 0.02
    assert 0.01 <= waited < 0.02


def test_spans_that_are_open_on_the_device_are_not_asked_for_again_at_each_new_one():
    class Event:
        asked, done = 0, False

        def query(self):
            Event.asked += 1
            return Event.done

        def synchronize(self):
            Event.done = True

        def elapsed_time(self, end):
            return 1.0

    timers = Timers(torch.device("cuda"), 2)  # touches none
    for _ in range(3 * OPEN_SPANS):
        timers.add("optimizer", Event(), Event())
    assert Event.asked == 3
    assert timers.take()[0]["optimizer"] == pytest.approx(3 * OPEN_SPANS / 1e3)


def test_megatrons_table_and_the_slowest_rank():
    phases = [PhaseTime("optimizer", (1.0, 3.5, 2.0)), PhaseTime("forward-recv", (0.0, 0.0, 0.0))]
    assert phases[0].numbers() == {"min_ms": 1.0, "max_ms": 3.5, "slowest_rank": 1}
    dots = "optimizer " + 38 * "."
    assert table(phases, "minmax") == [
        "(min, max) time across ranks (ms):",
        f"    {dots}: (1.00, 3.50)  slowest: rank 1",
    ]
    assert table(phases, "max")[1] == f"    {dots}: 3.50  slowest: rank 1"
    assert table(phases, "all")[1:3] == ["  optimizer:", "     rank  0: 1.00"]
    assert table(phases[1:], "all") == []
    (alone,) = over_ranks(ParallelContext(), CPU, ("optimizer",), {"optimizer": 0.25})
    assert alone.ranks == (250.0,)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_slow_forward_is_in_log_metrics_and_tensorboard(corpus, tmp_path, monkeypatch, capsys):
    original = step.run_stage

    def slow(*args):
        time.sleep(0.05)
        return original(*args)

    monkeypatch.setattr(step, "run_stage", slow)
    short = ("--train-iters", "4", "--eval-iters", "0", "--log-interval", "2", "--log-dir", str(tmp_path))
    assert run(*flags(corpus, *short, "--timing-log-level", "2", "--log-timers-to-tensorboard")) == 0
    out = capsys.readouterr().out
    assert "(min, max) time across ranks (ms):" in out
    assert f"    forward-compute {32 * '.'}: (" in out
    timers = read_metrics(tmp_path)[0][-1]["timers"]
    assert set(timers) == set(PHASES)
    assert timers["forward-compute"]["min_ms"] >= 100, "two microbatches an iteration"
    assert timers["forward-backward"]["max_ms"] > timers["forward-compute"]["max_ms"]
    assert timers["backward-compute"]["max_ms"] > 0
    assert timers["optimizer"]["max_ms"] > 0
    assert timers[DATA]["max_ms"] == read_metrics(tmp_path)[0][-1]["data_ms"]
    assert timers["communication"]["max_ms"] == 0, "there is one rank"
    board = EventAccumulator(str(tmp_path)).Reload()
    assert board.Scalars("forward-compute-time")[-1].value >= 0.1, "in seconds"


def test_without_the_flag_there_are_none(corpus, tmp_path, capsys):
    short = ("--train-iters", "4", "--exit-interval", "1", "--eval-iters", "0", "--log-dir", str(tmp_path))
    assert run(*flags(corpus, *short, "--log-timers-to-tensorboard")) == 0
    out = capsys.readouterr().out
    assert "across ranks" not in out
    assert "--log-timers-to-tensorboard" in out
    assert "--timing-log-level 0 measures no phases" in out
    assert "timers" not in read_metrics(tmp_path)[0][-1]
