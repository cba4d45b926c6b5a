"""examples/smoke_16_ranks.sh: TP2 x PP2 x CP2 x DP2 on the CPU equals one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_sixteen_ranks(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "examples/smoke_16_ranks.sh", str(tmp_path)]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=800
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "largest relative difference" in result.stdout
