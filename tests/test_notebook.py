"""The notebook's code runs as it stands, in this process: no kernel has to start, and it needs matplotlib alone."""

import json
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[1] / "examples" / "quantization.ipynb"
CELLS = json.loads(PATH.read_text(encoding="utf-8"))["cells"]


def test_it_is_stored_without_outputs():
    """Pictures in it would go stale, and make every change unreadable."""
    assert [cell["cell_type"] for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []


def test_every_cell_runs(monkeypatch, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pictures, before = [], dict(plt.rcParams)
    monkeypatch.setattr(plt, "show", lambda: pictures.append(plt.gcf()))
    names = {}
    try:
        for number, cell in enumerate(CELLS):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)  # noqa: S102
        assert len(pictures) == 5
        for picture in pictures:
            picture.canvas.draw()
            assert all(axis.has_data() for axis in picture.axes)
    finally:
        plt.close("all")
        plt.rcParams.update(before)
    tensors, results, sqnr, median = (names[n] for n in ("tensors", "results", "sqnr", "median_sqnr"))
    outlier = tensors["outlier channel"]
    assert sqnr(outlier, results["outlier channel", "tensor, E4M3"]) > 31  # what the text says of both measures
    assert median(outlier, results["outlier channel", "tensor, E4M3"]) < 30
    assert median(outlier, results["outlier channel", "1 x 128"]) > 31
    rows = tensors["tokens of many sizes"]
    assert median(rows, results["tokens of many sizes", "tensor, E5M2"]) > median(
        rows, results["tokens of many sizes", "tensor, E4M3"]
    )
    assert "tensorwise  grad_output  e5m2" in capsys.readouterr().out
    assert np.isfinite(names["errors"]).all()
