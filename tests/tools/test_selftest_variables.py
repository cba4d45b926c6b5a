"""tools/selftest_variables.py and selftest_nccl.sh: what is typed becomes flags, or a line and exit code 2."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import selftest_variables

ROOT = Path(__file__).resolve().parents[2]


def test_variables_are_flags():
    env = {"DEVICE": "cpu", "GPUS": "2", "PARTS": "speed layouts", "CASES": "DP", "RECIPES": "", "SECONDS_AT_MOST": "9"}
    assert " ".join(selftest_variables.flags(env | {"CHECK_SECONDS": "120"})) == (
        "--parts speed layouts --cases DP --gpus 2 --seconds 9.0 --check-seconds 120.0 --device cpu"
    )
    one = {"DEVICE": "cpu", "GPUS": "1", "PARTS": "collectives"}
    assert selftest_variables.flags(one) == ["--parts", "collectives", "--gpus", "1", "--device", "cpu"]


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ("PARTS=layout", "PARTS=layout: no 'layout' there; give some of switches graphs layouts"),
        ("RECIPES=fp8", "RECIPES=fp8: no 'fp8' there; give some of fp32"),
        ("CASES=DP,TP", "CASES=DP,TP: no 'DP,TP' there; give some of DP EP TP GRAPHS WHOLE"),
        ("GPUS=all", "GPUS=all: give a number, 1 or more"),
        ("CHECK_SECONDS=0", "CHECK_SECONDS=0: give a number, 1 or more"),
        ("DEVICE=gpu", "DEVICE=gpu: give cuda or cpu"),
        ("GPUS=1;PARTS=graphs layouts", "GPUS=1: graphs, layouts need 2 or more"),
        ("PARTS=layouts;CASES=DP TP", 'CASES="DP TP": of the part speed; add it to PARTS'),
        ("GPUS=999;DEVICE=cuda", "GPUS=999: torch sees"),
    ],
)
def test_wrong_variables_are_told_as_they_were_typed(variables, line):
    env = {"DEVICE": "cpu", "GPUS": "2"} | dict(word.split("=") for word in variables.split(";"))
    with pytest.raises(ValueError, match="^" + re.escape(line)):
        selftest_variables.flags(env)


@pytest.mark.parametrize(
    ("variables", "words", "line"),
    [
        ({"PARTS": "layout"}, (), "selftest_nccl: error: PARTS=layout: no 'layout' there"),
        ({}, ("speed",), "selftest_nccl: unexpected argument 'speed' after "),
    ],
)
def test_the_script_refuses_before_it_makes_data(variables, words, line, tmp_path):
    env = os.environ | {"DEVICE": "cpu", "GPUS": "2", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = ["bash", "tools/selftest_nccl.sh", str(tmp_path / "new"), *words]
    done = subprocess.run(script, cwd=ROOT, env=env | variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(line)
    assert not (tmp_path / "new").exists()
