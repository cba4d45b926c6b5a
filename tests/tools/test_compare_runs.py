"""tools/compare_runs.py: gaps by hand, missing points, the verdict, and the picture."""

import json
from pathlib import Path

import compare_runs
import numpy as np
import pytest


def write_run(path: Path, losses: dict[int, float], valid: dict[int, float]) -> Path:
    path.mkdir()
    lines = [{"iteration": i, "lm_loss": v} for i, v in losses.items()]
    lines += [{"iteration": i, "valid_loss": v, "valid_ppl": 0.0} for i, v in valid.items()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_gap_is_of_the_last_quarter_of_common_iterations(tmp_path):
    base = write_run(tmp_path / "a", dict.fromkeys(range(1, 9), 4.0), {4: 2.0, 8: 2.0})
    other = write_run(tmp_path / "b", {i: 9.0 if i <= 6 else 4.4 for i in range(1, 13)}, {8: 2.1, 12: 1.0})
    runs = [compare_runs.load_run(p, p.name) for p in (base, other)]
    gap = compare_runs.gap_of(runs[1], runs[0], window=1)
    assert gap.train == pytest.approx(0.1)
    assert gap.valid == pytest.approx(0.05)
    assert gap.largest == pytest.approx(1.25)


def test_smoothing_keeps_means_and_ends():
    values = np.arange(10, dtype=float)
    assert np.array_equal(compare_runs.smooth(values, 1), values)
    smoothed = compare_runs.smooth(values, 3)
    assert np.allclose(smoothed[1:-1], values[1:-1])
    assert smoothed[0] == pytest.approx(0.5)


@pytest.mark.parametrize(("factor", "code"), [(1.005, 0), (1.02, 1), (float("nan"), 1)])
def test_verdict(tmp_path, factor, code, capsys):
    base = write_run(tmp_path / "a", {1: 4.0, 2: 4.0}, {2: 2.0})
    other = write_run(tmp_path / "b", {1: 4.0, 2: 4.0}, {2: 2.0 * factor})
    assert compare_runs.main([str(base), str(other), "--max-gap", "0.01"]) == code


def test_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    base = write_run(tmp_path / "a", {i: 4.0 / i for i in range(1, 9)}, {8: 2.0})
    output = tmp_path / "new" / "plot.png"
    assert compare_runs.main([str(base), str(base), "--labels", "x", "y", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys):
    base = write_run(tmp_path / "a", {1: 4.0}, {})
    for argv in ([str(tmp_path / "none")], [str(base), "--labels", "x", "y"], [str(base), "--window", "0"]):
        assert compare_runs.main(argv) == 2
        assert capsys.readouterr().err.count("\n") == 1
