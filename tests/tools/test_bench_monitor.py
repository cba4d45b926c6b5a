"""tools/bench_monitor.py: which stretches it compares, and that it runs."""

import json
from pathlib import Path

import bench_monitor
import pytest


def lines(look_ms=0.0, edge_ms=0.0, iterations=200):
    """Metrics of a run: an iteration takes 10 ms, a look in the middle of a stretch `look_ms` more; at its edge other
    times, which must not count."""
    found = []
    for iteration in range(1, iterations + 1):
        end = -(-iteration // 10) * 10
        inside = any(i % 25 == 0 for i in range(end - 9, end))
        edge = end % 25 == 0 or (end - 10) % 25 == 0
        slow = 1000.0 if end <= 50 else 0.0
        found.append({"iteration": iteration, "elapsed_ms": 10 + slow + look_ms / 10 * inside + edge_ms * edge})
    return found


def test_a_look_is_what_it_adds_to_a_stretch():
    of = bench_monitor.cost(lines(look_ms=8.0, edge_ms=3.0), 50)
    assert of["iteration_ms"] == 10
    assert of["look_ms"] == pytest.approx(8)
    assert of["share"] == pytest.approx(0.008)


def test_it_runs_and_gives_a_verdict(tmp_path, capsys, monkeypatch):
    measured, share = bench_monitor.cost, 0.0125

    def cost(*args):
        assert measured(*args)["iteration_ms"] > 0
        return {"iteration_ms": 20.0, "look_ms": 16.0, "share": share}

    monkeypatch.setattr(bench_monitor, "cost", cost)
    monkeypatch.setattr(bench_monitor, "RECIPES", {"tensorwise": bench_monitor.RECIPES["tensorwise"]})
    argv = ["--output", str(tmp_path), "--size", "tiny", "--device", "cpu", "--json", str(tmp_path / "cost.json")]
    assert bench_monitor.main(argv) == 0
    assert len((tmp_path / "tensorwise" / "fp8_monitor.jsonl").read_text().splitlines()) == 12
    assert json.loads((tmp_path / "cost.json").read_text())["tensorwise"]["share"] == share
    said = "tensorwise: 20.0 ms an iteration, a look adds 16.0 ms: every 100th costs 1.25% of the time, NOT below 1%"
    out = capsys.readouterr().out
    assert said in out
    assert out.endswith("on the CPU no figure counts: it works, which is all that was asked\n")


@pytest.mark.parametrize(("share", "code"), [(0.0125, 1), (0.005, 0)])
def test_on_a_gpu_the_verdict_is_the_exit_code(share, code, tmp_path, monkeypatch):
    def train(words):
        directory = Path(words[words.index("--log-dir") + 1])
        directory.mkdir()
        (directory / "metrics.jsonl").touch()
        return 0

    monkeypatch.setattr("pretrain_gpt.main", train)
    found = {"iteration_ms": 20.0, "look_ms": 16.0, "share": share}
    monkeypatch.setattr(bench_monitor, "cost", lambda *args: found)
    assert bench_monitor.main(["--output", str(tmp_path)]) == code
