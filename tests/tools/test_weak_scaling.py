"""The weak-scaling study: its layouts, its table, and a small run of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.config import build_config
from tools import weak_scaling

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("layout", weak_scaling.LAYOUTS)
def test_layouts_fit_any_number_of_ranks(layout):
    for ranks in (1, 2, 4, 8, 16):
        flags = weak_scaling.BASE | weak_scaling.LAYOUTS[layout](ranks)
        assert build_config(env={"WORLD_SIZE": str(ranks)}, **flags).parallel.world_size == ranks


def rank(size: int, messages: int, planned: int) -> dict:
    key = "sum", "dp"
    return {"sent": {key: (size, messages)}, "planned": {key: (planned, messages)}, "wire": 5.0, "seconds": 1.0}


def test_rows_are_means_and_tell_of_any_rank_that_differs():
    row = weak_scaling.row_of("data", 2, [rank(1024, 1, 1024), rank(3072, 3, 3072)])
    assert (row["bytes_counted"], row["messages_planned"], row["equal_on_all_ranks"]) == (2048, 2, True)
    assert row["by_kind"] == {"sum over dp": [3072, 3]}
    wrong = weak_scaling.row_of("data", 2, [rank(1024, 1, 1024), rank(3072, 3, 3071)])
    assert weak_scaling.table([row, wrong])[2:] == [
        "| data | 2 | 2.0 | 2.0 | 2.0 | 2.0 | 0.0 | yes |",
        "| data | 2 | 2.0 | 2.0 | 2.0 | 2.0 | 0.0 | NO |",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--ranks", "3"), "--ranks 3: give powers of two"),
        (("--timeout", "0"), "--timeout 0: give seconds above 0"),
        (("--output", "/dev/null/x"), "--output /dev/null/x: can't write there"),
    ],
)
def test_mistakes_are_one_line_before_the_work(capsys, argv, words):
    with pytest.raises(SystemExit) as error:
        weak_scaling.parse_args(argv)
    assert error.value.code == 2
    line = capsys.readouterr().err
    assert words in line
    assert line.count("\n") == 1


def test_one_rank_alone_has_no_picture_and_the_prefix_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(weak_scaling, "run", lambda *_: [rank(0, 0, 0)])
    monkeypatch.setattr(weak_scaling, "machine", dict)
    assert weak_scaling.main(["--ranks", "1", "--layouts", "data", "--output", str(tmp_path / "study.v1")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["study.v1.json"]


@pytest.mark.slow
def test_a_study_of_two_ranks(tmp_path):
    command = [sys.executable, "tools/weak_scaling.py", "--ranks", "1", "2", "--output", str(tmp_path / "study")]
    done = subprocess.run([*command, "--layouts", "data", "pipeline"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "study.json").read_text())
    assert [(row["layout"], row["ranks"]) for row in report["rows"]] == [
        ("data", 1), ("data", 2), ("pipeline", 1), ("pipeline", 2),
    ]  # fmt: skip
    assert all(row["equal_on_all_ranks"] for row in report["rows"])
    assert (tmp_path / "study.png").stat().st_size > 10_000
