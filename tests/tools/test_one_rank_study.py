"""The study of single ranks of large jobs: what it would run, its table, and what counts as good. It needs a GPU."""

import pytest

from tools import one_rank_study
from tools.one_rank_study import GIB, STUDIES, is_good, table

GOOD = {
    "name": "a stage",
    "peak_planned": 100 * GIB,
    "static_planned": 40 * GIB,
    "peak_measured": 96 * GIB,
    "static_measured": 40 * GIB,
    "seconds_planned": 1.5,
    "seconds_measured": 2.0,
    "finite": True,
    "traffic_as_planned": True,
}


@pytest.mark.parametrize("study", [STUDIES[1], STUDIES[6]], ids=lambda study: study.name)
def test_plans_are_of_one_stage_and_fit_an_h200(study):
    row = one_rank_study.run(study, plan_only=True)
    assert 0 < row["stage"] < 15
    assert 10 * GIB < row["static_planned"] < row["peak_planned"] < 130 * GIB
    assert table([row])[2].startswith(f"| {study.name} | ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--only", "GPT-5"), "no study has such a name"),
        (("--timeout", "-1"), "--timeout -1: give seconds above 0"),
        (("--output", "/"), "--output /: can't write there"),
    ],
)
def test_mistakes_are_one_line_before_the_work(capsys, argv, words):
    with pytest.raises(SystemExit) as error:
        one_rank_study.parse_args(argv)
    assert error.value.code == 2
    line = capsys.readouterr().err
    assert words in line
    assert line.count("\n") == 1


def test_names_are_unlike():
    assert len({study.name for study in STUDIES}) == len(STUDIES)


def test_a_row_says_how_far_the_plan_is_off():
    assert table([GOOD])[2] == "| a stage | 100.0 | 96.0 | +4.2% | 40.0 | 40.0 | +0.0% | 1,500 | 2,000 |"
    assert table([{"name": "b", "error": "Traceback\n  x\nValueError: why\n"}])[2].startswith(
        "| b | failed: ValueError: why |"
    )


@pytest.mark.parametrize(
    "fault", [{"peak_measured": 80 * GIB}, {"finite": False}, {"traffic_as_planned": False}, {"error": "x"}]
)
def test_what_is_wrong_is_told_by_the_exit_code(fault):
    assert is_good(GOOD)
    assert not is_good(GOOD | fault)
