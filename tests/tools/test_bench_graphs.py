"""tools/bench_graphs.py: runs, and compares losses."""

import json

import bench_graphs

TINY = ["--preset", "tiny", "--device", "cpu", "--seq-length", "32", "--microbatches", "2", "--rounds", "1"]


def test_both_kinds_are_timed_and_their_losses_compared(tmp_path, capsys):
    file = tmp_path / "graphs.json"
    argv = [*TINY, "--steps", "1", "--recipes", "blockwise", "--flags", "--num-workers 0", "--output", str(file)]
    assert bench_graphs.main(argv) == 0
    rows = json.loads(file.read_text())
    assert [row["layers"] for row in rows] == ["calls", "graphs"]
    assert "blockwise: losses the same" in capsys.readouterr().out


def test_what_graphs_cannot_have_is_one_line(capsys):
    assert bench_graphs.main([*TINY, "--flags", "--hidden-dropout 0.1"]) == 2
    assert "--hidden-dropout 0.1 with --cuda-graph-impl local" in capsys.readouterr().err
