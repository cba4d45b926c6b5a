"""tools/bench_graphs.py: runs, and compares losses."""

import json

import bench_graphs
import pytest

TINY = ["--preset", "tiny", "--device", "cpu", "--seq-length", "32", "--microbatches", "2", "--rounds", "1"]


def test_both_kinds_are_timed_and_their_losses_compared(tmp_path, capsys):
    file = tmp_path / "graphs.json"
    argv = [*TINY, "--steps", "1", "--recipes", "blockwise", "--flags", "--num-workers 0", "--output", str(file)]
    assert bench_graphs.main(argv) == 0
    rows = json.loads(file.read_text())
    assert [row["layers"] for row in rows] == ["calls", "graphs"]
    told = capsys.readouterr()
    assert "blockwise: losses the same" in told.out
    assert told.err == "blockwise: measuring\n"


@pytest.mark.parametrize(("flags", "code"), [("", 0), ("--deterministic-mode", 1)])
def test_losses_may_differ_unless_the_mode_is_deterministic(flags, code, capsys, monkeypatch):
    numbers = {"ms": 1.0, "tokens_per_second": 1.0, "host_ms": 1.0, "peak_gib": 0.0}
    rows = [numbers | {"recipe": "bf16", "layers": name, "losses": [loss]} for name, loss in (("a", 1.0), ("b", 2.0))]
    monkeypatch.setattr(bench_graphs, "measure", lambda *args: rows)
    assert bench_graphs.main([*TINY, "--recipes", "bf16", f"--flags={flags}"]) == code
    may = "" if code else "as they may with the fastest attention; "
    assert f"bf16: losses differ, {may}--deterministic-mode rules that out: [1.0], " in capsys.readouterr().out


def test_sequences_of_a_tiny_model_are_short():
    assert [bench_graphs.parse(["--preset", name]).seq_length for name in ("tiny", "llama3-8b")] == [32, 2048]


def test_what_graphs_cannot_have_is_one_line(capsys):
    assert bench_graphs.main([*TINY, "--flags", "--hidden-dropout 0.1"]) == 2
    assert "--hidden-dropout 0.1 with --cuda-graph-impl local" in capsys.readouterr().err
