"""The self-test of a machine's GPUs, here on gloo: it must pass on a sound machine and see a wrong number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import selftest_nccl  # noqa: E402
from selftest_trace import communication_of, length, union  # noqa: E402


def kernel(name: str, begin: float, end: float) -> dict:
    return {"name": name, "ts": begin, "dur": end - begin}


def test_exposed_communication_is_what_no_other_kernel_covers():
    early = [kernel("gemm", 0, 100)]
    late = [
        kernel("ncclDevKernel_AllGather", 1000, 1300),
        kernel("gemm", 1100, 1200),
        kernel("ncclDevKernel_ReduceScatter", 1250, 1400),
        kernel("gemm", 1350, 1500),
    ]
    found = communication_of(early + late)
    assert found["communication_ms"] == pytest.approx(0.4)
    assert found["exposed_ms"] == pytest.approx(0.25)  # 1000-1100 and 1200-1350


def test_union_of_spans():
    assert union([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert length(union([(0, 1), (5, 7), (6, 6.5)])) == 3


def test_gap_is_the_largest_relative_difference():
    assert selftest_nccl.gap([(2.0, 1.0), (1.0, 1.0)], [(2.0, 1.0), (1.0, 1.5)]) == pytest.approx(0.5)
    with pytest.raises(AssertionError, match="not whole"):
        selftest_nccl.gap([(1.0, 1.0)], [])


def test_every_axis_is_tried():
    assert set(selftest_nccl.layouts(2)) == {"TP2", "TP2+SP", "PP2", "DP2", "CP2", "EP2"}
    assert "TP2xPP2xDP2" in selftest_nccl.layouts(8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_on_the_cpu(tmp_path):
    env = os.environ | {"DEVICE": "cpu", "GPUS": "2", "RECIPES": "fp32 blockwise", "OMP_NUM_THREADS": "1"}
    env |= {"PARTS": "collectives layouts switches checkpoint"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    script = ["bash", "tools/selftest_nccl.sh", str(tmp_path)]
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "selftest.json").read_text())
    assert all(row["passed"] for row in rows)
    assert len(rows) > 20

    reference = json.loads((tmp_path / "reference.json").read_text())
    reference["fp32"][0][0] *= 1.001  # a wrong number is seen
    (tmp_path / "reference.json").write_text(json.dumps(reference))
    flags = ["tools/selftest_nccl.py", str(tmp_path), "--device", "cpu", "--recipes", "fp32", "--parts", "layouts"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *flags]
    assert subprocess.run(torchrun, cwd=ROOT, env=env, capture_output=True).returncode != 0
