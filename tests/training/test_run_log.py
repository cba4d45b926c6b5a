"""The run log: one line an iteration, unrounded, appended on resume, and Megatron's console line."""

import io
import json
import logging
import math
import sys

import pytest

from megafp8.training.run_log import EVENTS_FILE, METRICS_FILE, RunLog, console_line, read_metrics


def line(iteration: int, loss: float = 2.0, **extra) -> dict:
    return {
        "iteration": iteration,
        "consumed_samples": 4 * iteration,
        "consumed_tokens": 64 * iteration,
        "lm_loss": loss,
        "learning_rate": 1e-3,
        "grad_norm": 1.5,
        "global_batch_size": 4,
        "elapsed_ms": 10.0,
        "tokens_per_second": 6400.0,
        "tflops_per_gpu": 0.5,
        "skipped": 0,
        "nan": 0,
        "max_memory_gib": 0.1,
    } | extra


def open_log(path, out=None, **options) -> RunLog:
    options = {"tensorboard_dir": None, "writes": True, "total_iterations": 10} | options
    return RunLog(path, out=out or io.StringIO(), **options)


def test_numbers_are_unrounded_and_resume_appends(tmp_path):
    third = 1 / 3
    log = open_log(tmp_path)
    log.training([line(1, third), line(2)])
    log.validation("", {"iteration": 2, "valid_loss": third, "valid_ppl": 1.4})
    log.close()
    log = open_log(tmp_path)  # resumed from iteration 1: iteration 2 is written again
    log.training([line(2, 5.0), line(3)])
    log.close()
    training, validation = read_metrics(tmp_path)
    assert [t["iteration"] for t in training] == [1, 2, 3]
    assert training[0]["lm_loss"] == third
    assert training[1]["lm_loss"] == 5.0
    assert validation[0]["valid_loss"] == third


def test_half_a_last_line_is_ignored_and_a_damaged_one_named(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text(json.dumps(line(1)) + "\n" + json.dumps(line(2))[:20])
    assert len(read_metrics(tmp_path)[0]) == 1
    path.write_text('{"iteration": 1,\n' + json.dumps(line(2)) + "\n")
    with pytest.raises(ValueError, match="line 1 is not JSON of a run's log"):
        read_metrics(tmp_path)
    with pytest.raises(ValueError, match="no metrics.jsonl"):
        read_metrics(tmp_path / "elsewhere")


def strict(text: str):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_every_line_is_json_whatever_the_loss(tmp_path, loss):
    out = io.StringIO()
    log = open_log(tmp_path, out=out, tensorboard_dir=tmp_path)
    log.training([line(1, loss, grad_norm=loss, skipped=1, nan=1), line(2)])
    log.validation("", {"iteration": 2, "valid_loss": loss, "valid_ppl": loss})
    log.close()
    lines = [strict(text) for text in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [entry.get("lm_loss", "none") for entry in lines] == [None, 2.0, "none"]
    assert "number of nan iterations:   1" in out.getvalue()
    training, validation = read_metrics(tmp_path)
    assert math.isnan(training[0]["lm_loss"])
    assert math.isnan(validation[0]["valid_ppl"])
    assert training[1]["lm_loss"] == 2.0


def test_a_resumed_run_mends_the_half_line_of_a_killed_one(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text(json.dumps(line(1)) + "\n" + json.dumps(line(2))[:20])
    (tmp_path / EVENTS_FILE).write_text('{"iteration": 1, "event": "start"}\n{"iterat')
    log = open_log(tmp_path)
    log.training([line(2), line(3)])
    log.event("nonfinite", 2, "skipped")
    log.record("save", 3, "saved")
    log.close()
    assert [entry["iteration"] for entry in read_metrics(tmp_path)[0]] == [1, 2, 3]
    assert all(strict(text) for text in path.read_text().splitlines())
    told = [strict(text) for text in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [(entry["iteration"], entry["event"]) for entry in told] == [(1, "start"), (2, "nonfinite"), (3, "save")]


@pytest.mark.parametrize("text", ["3", "[]", "{}", "\xff"])
def test_lines_that_are_no_log(tmp_path, text):
    (tmp_path / METRICS_FILE).write_text(text + "\n" + json.dumps(line(2)) + "\n", encoding="latin-1")
    with pytest.raises(ValueError, match="line 1 is not JSON of a run's log"):
        read_metrics(tmp_path)


def test_console_line_averages_the_interval_and_counts_skips():
    text = console_line([line(1, 2.0), line(2, float("nan"), skipped=1, nan=1), line(3, 4.0)], 10)
    assert "iteration        3/      10" in text
    assert "lm loss: 3.000000E+00" in text
    assert "number of skipped iterations:   1" in text
    assert "number of nan iterations:   1" in text


def test_a_rank_that_does_not_write_leaves_nothing(tmp_path):
    out = io.StringIO()
    log = open_log(tmp_path / "run", out=out, writes=False)
    log.training([line(1)])
    log.note("hello")
    log.close()
    assert out.getvalue() == ""
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_megatrons_tags(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = open_log(tmp_path, tensorboard_dir=tmp_path / "tb")
    log.training([line(1, 2.5), line(2, 2.25)])
    log.validation("", {"iteration": 2, "valid_loss": 1.5, "valid_ppl": 4.5})
    log.validation("books", {"iteration": 2, "valid_loss": 1.0, "valid_ppl": 2.7})
    log.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [e.value for e in events.Scalars("lm loss")] == [2.5, 2.25]
    assert events.Scalars("lm loss validation")[0].value == 1.5
    assert events.Scalars("books/lm loss validation")[0].value == 1.0


def test_bar_moves_each_iteration_and_lines_stand_above_it(tmp_path, monkeypatch):
    """Also the lines of `logging`, which go to another stream of the same terminal."""
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    log = open_log(None, out=terminal, progress=True)
    log._bar.mininterval = log._bar.miniters = 0
    log.advance(3)
    logging.getLogger("megafp8").warning("look out")
    log.note("a note")
    log.training([line(3)])
    log.close()
    assert "3/10 [" in terminal.getvalue()
    shown = [text.split("\r")[-1] for text in terminal.getvalue().split("\n")]
    assert {"look out", "a note"} <= set(shown)
    assert logging.getLogger().handlers == [handler]
