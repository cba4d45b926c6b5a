"""tools/bench_timers.py: code without spans is the same code without spans, and the table is of that."""

import json
from contextlib import contextmanager

import bench_timers
import pytest


@contextmanager
def spans(name):
    print(name)
    yield


def with_a_span(x):
    with spans("here"):
        y = x + 1
    with contextmanager(lambda: iter((None,)))():
        y += 1
    return y


def test_a_function_loses_its_spans_and_nothing_else(capsys):
    assert with_a_span(1) == bench_timers.without_spans(with_a_span)(1) == 3
    assert capsys.readouterr().out == "here\n"
    with pytest.raises(ValueError, match="has no span"):
        bench_timers.without_spans(bench_timers.rows)


def test_the_code_is_as_before_afterwards():
    before = [getattr(owner, name) for owner, name in bench_timers.PLACES]
    with bench_timers.no_spans_in_code():
        within = [getattr(owner, name) for owner, name in bench_timers.PLACES]
    assert not set(before) & set(within)
    assert [getattr(owner, name) for owner, name in bench_timers.PLACES] == before


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--rounds", "0"), "--rounds 0: give 1 or more"),
        (("--output", "/dev/null/x"), "--output /dev/null/x: can't write there; give another file"),
    ],
)
def test_mistakes_are_one_line(argv, line, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_timers.main(["--size", "tiny", "--device", "cpu", *argv])
    assert capsys.readouterr().err.partition("error: ")[2] == line + "\n"


def test_it_runs_in_every_mode(tmp_path, capsys, monkeypatch):
    marked, begin = [], bench_timers.Timers.__call__

    def counted(self, name, detail=""):
        marked.append(self.level)
        return begin(self, name, detail)

    def uncounted(parts):
        before = len(marked)
        result = cost(parts)
        del marked[before:]
        return result

    cost = bench_timers.cost_when_off
    monkeypatch.setattr(bench_timers, "cost_when_off", uncounted)
    monkeypatch.setattr(bench_timers.Timers, "__call__", counted)
    monkeypatch.setattr(bench_timers, "STEPS", {"tiny": 1})
    argv = ["--size", "tiny", "--device", "cpu", "--rounds", "1", "--output", str(tmp_path / "timers.json")]
    assert bench_timers.main(argv) == 0
    found = json.loads((tmp_path / "timers.json").read_text())
    assert list(found) == [*bench_timers.MODES, "spans", "us_when_off"]
    assert found["removed"]["ratio"] == 1
    spans = [marked.count(level) for level in range(3)]
    assert spans[1] == spans[2] > 0
    assert spans[0] == 2 * spans[1], "off and profile, and not removed"
    assert found["spans"] == spans[1] / 2, "of a step; each mode ran two"
    assert 0 < found["us_when_off"] < 1000
    assert "of removed" in capsys.readouterr().out
