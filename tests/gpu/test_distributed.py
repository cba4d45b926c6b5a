"""Two GPUs over NCCL against one: the self-test of a machine, with two recipes, and what it found (needs two GPUs).

All recipes, checkpoints and speed: bash tools/selftest_nccl.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
ROOT = Path(__file__).resolve().parents[2]
PARTS = ("layouts", "switches")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    """All rows, whatever the exit code."""
    folder = tmp_path_factory.mktemp("selftest")
    env = os.environ | {
        "GPUS": "2",
        "SECONDS_AT_MOST": "270",
        "PARTS": " ".join(PARTS),
        "RECIPES": "fp32 blockwise",
        "JOBS": "2",
    }
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(["bash", "tools/selftest_nccl.sh", str(folder)], cwd=ROOT, env=env, timeout=290)
    assert done.returncode in (0, 1)
    return json.loads((folder / "selftest.json").read_text())["rows"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", PARTS)
def test_two_gpus_are_as_one(rows, part):
    own = [row for row in rows if row["part"] == part]
    assert own, "nothing has run"
    assert not [row for row in own if not row["passed"]]
