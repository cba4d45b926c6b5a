"""W&B gets TensorBoard's numbers, a resumed run goes on under its id, and what W&B lacks is told in one line.

The stand-in below records what the real package would be sent. With the package, the last test runs it offline.
"""

import importlib.util
import io
import json
import sys
import types

import pytest

from megafp8.training.run_log import RunLog
from megafp8.training.wandb_board import RUN_ID_FILE, WandbBoard
from tests.training.runs import RECIPES, flags, run, write_corpus

NAMED = ("--wandb-project", "p", "--wandb-exp-name", "e")


class StandIn(types.ModuleType):
    """As much of the package as is used; `runs` are (what init was given, rows logged)."""

    class Error(Exception):
        pass

    class Histogram:
        def __init__(self, np_histogram):
            self.counts, self.edges = np_histogram

    def __init__(self):
        super().__init__("wandb")
        self.runs, self.refusal, self.finished = [], None, 0

    def init(self, **options):
        if self.refusal:
            raise self.Error(self.refusal)
        rows = []
        self.runs.append((options, rows))

        def finish():
            self.finished += 1

        return types.SimpleNamespace(define_metric=lambda *a, **k: None, log=rows.append, finish=finish)


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", StandIn())
    return sys.modules["wandb"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def command(corpus, directory, *extra):
    places = ("--log-dir", str(directory), "--save", str(directory / "c"), "--load", str(directory / "c"))
    short = ("--train-iters", "4", "--log-interval", "2", "--eval-interval", "1", "--eval-iters", "1")
    return flags(corpus, *RECIPES["blockwise"], *short, *places, "--fp8-monitor-interval", "2", *NAMED, *extra)


def test_a_run_and_its_continuation(corpus, tmp_path, wandb):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run(*command(corpus, tmp_path, "--exit-interval", "2")) == 0
    assert run(*command(corpus, tmp_path)) == 0
    told = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert told == ["start", "save", "end"] * 2
    (first, rows), (second, later) = wandb.runs
    assert wandb.finished == 2
    assert (first["project"], first["name"], first["dir"]) == ("p", "e", str(tmp_path))
    assert first["config"]["model"]["num_layers"] == 2
    assert first["id"] == second["id"] == (tmp_path / RUN_ID_FILE).read_text().strip()
    assert second["resume"] == "allow"
    assert [row["iteration"] for row in rows + later if "lm loss" in row] == [1, 2, 3, 4]
    board = accumulator.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    sent = {(tag, row["iteration"]): value for row in rows + later for tag, value in row.items()}
    for tag in board.Tags()["scalars"]:
        for point in board.Scalars(tag):
            assert sent[tag, point.step] == pytest.approx(point.value, rel=1e-6, nan_ok=True), tag
    histogram = sent["fp8/log2_scale_inv/layers.0.mlp.fc1/weight", 2]
    assert len(histogram.edges) == len(histogram.counts) + 1
    assert run(*command(corpus, tmp_path / "new", "--exit-interval", "1")) == 0
    assert wandb.runs[2][0]["id"] != first["id"]


def test_what_is_wrong_is_told_in_one_line(corpus, tmp_path, wandb, capsys, monkeypatch):
    wandb.refusal = "no API key\nconfigured"
    assert run(*command(corpus, tmp_path)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("pretrain_gpt.py: error: --wandb-project p: W&B refuses (no API key configured); log in")
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr("megafp8.config.validate.files.find_spec", lambda name: None)
    assert run(*command(corpus, tmp_path)) == 2
    assert "--wandb-project p: the package wandb is not installed; pip install" in capsys.readouterr().err
    assert run(*command(corpus, tmp_path, "--dry-run")) == 0
    assert run(*command(corpus, tmp_path, "--wandb-project", "")) == 0


def test_a_fault_of_wandb_ends_no_run(caplog):
    def log(row):
        raise RuntimeError("the service is gone")

    board = WandbBoard(types.SimpleNamespace(define_metric=lambda *a, **k: None, log=log, finish=log))
    run_log = RunLog(None, tensorboard_dir=None, writes=True, total_iterations=3, out=io.StringIO(), wandb=board)
    for iteration in (1, 2, 3):
        run_log.scalars(iteration, {"a": 1.0})
    run_log.close()
    assert caplog.text.count("W&B takes no more numbers: the service is gone") == 1

    def finish():
        raise OSError("the disk is full")

    WandbBoard(types.SimpleNamespace(define_metric=lambda *a, **k: None, log=print, finish=finish)).close()
    assert caplog.text.count("W&B takes no more numbers: the disk is full") == 1


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="the package wandb is not installed")
def test_the_real_package_offline(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run(*command(corpus, tmp_path, "--exit-interval", "2")) == 0
    assert run(*command(corpus, tmp_path)) == 0
    name = (tmp_path / RUN_ID_FILE).read_text().strip()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{name}"))) == 2
