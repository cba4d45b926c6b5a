"""The self-test of a machine's GPUs, here on gloo: it must pass on a sound machine and see a wrong number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import selftest_checks  # noqa: E402
import selftest_nccl  # noqa: E402
import selftest_runs  # noqa: E402
from selftest_trace import after_marker, busy_of, communication_of, length, union  # noqa: E402


def kernel(name: str, begin: float, end: float) -> dict:
    return {"name": name, "ts": begin, "dur": end - begin}


def test_exposed_communication_is_what_no_other_kernel_covers():
    kernels = [
        kernel("ncclDevKernel_AllGather", 1000, 1300),
        kernel("gemm", 1100, 1200),
        kernel("ncclDevKernel_ReduceScatter", 1250, 1400),
        kernel("gemm", 1350, 1500),
    ]
    found = communication_of(kernels)
    assert found["communication_ms"] == pytest.approx(0.4)
    assert found["exposed_ms"] == pytest.approx(0.25)  # 1000-1100 and 1200-1350
    assert communication_of(kernels, 2)["exposed_ms"] == pytest.approx(0.125)
    assert communication_of([]) == {}


def test_busy_time_is_told_by_class():
    kernels = [
        kernel("gemm_kernel", 0, 100),
        kernel("quantize_2d_kernel", 50, 120),
        kernel("bfloat16_copy_kernel_cuda", 120, 130),  # a cast
        kernel("adamw_tiles_kernel", 200, 300),
        kernel("ncclDevKernel_AllGather", 290, 310),
        kernel("Memset (Device)", 400, 410),
    ]
    found = busy_of(kernels)
    busy = {"gemm": 0.1, "attention": 0, "quantize": 0.08, "optimizer": 0.1, "communication": 0.02, "other": 0.01}
    assert found["busy_ms"] == pytest.approx(busy)
    assert found["idle_ms"] == pytest.approx(0.16)  # 130-200 and 310-400
    assert busy_of(kernels, 4)["busy_ms"]["gemm"] == pytest.approx(0.025)
    assert busy_of([]) == {}


def test_what_ran_before_the_marker_is_left_out():
    """That is the barrier at which ranks wait for each other's profiler."""
    events = [
        kernel("gemm", 30, 40) | {"cat": "kernel"},
        kernel("ncclDevKernel_AllReduce", 0, 9) | {"cat": "kernel"},
        kernel("spin_kernel(long)", 10, 11) | {"cat": "kernel"},
        kernel("Memset", 20, 21) | {"cat": "gpu_memset"},
        kernel("cudaLaunchKernel", 22, 23) | {"cat": "cuda_runtime"},
    ]
    assert [event["name"] for event in after_marker(events)] == ["Memset", "gemm"]


def test_union_of_spans():
    assert union([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert length(union([(0, 1), (5, 7), (6, 6.5)])) == 3


def test_gaps_are_the_largest_relative_differences():
    off = selftest_checks.gaps([(2.0, 1.0), (1.5, 1.0), (1.0, 1.1)], [(2.0, 1.25), (1.0, 1.0), (1.0, 1.0)])
    assert off == pytest.approx((0.5, 0.2, 0.1))
    with pytest.raises(AssertionError, match="not whole"):
        selftest_checks.gaps([(1.0, 1.0)], [])


def test_fp32_is_compared_over_five_steps_and_closely():
    expected = [(1.0, 1.0)] * 10
    late, early = expected[:7] + [(1.1, 1.1)] * 3, [(1.0, 1.0 + 2e-6), *expected[1:]]
    assert selftest_checks.verdict(late, expected, "fp32")["passed"]
    assert not selftest_checks.verdict(late, expected, "bf16")["passed"]
    assert not selftest_checks.verdict(early, expected, "fp32")["passed"]
    assert selftest_checks.verdict(early, expected, "bf16")["passed"]


def test_every_axis_is_tried():
    assert set(selftest_checks.layouts(2)) == {"TP2", "TP2+SP", "PP2", "DP2", "CP2", "EP2"}
    assert "TP2xPP2xDP2" in selftest_checks.layouts(8)
    assert {"PP2 interleaved", "PP2 tied", "PP2 zero-bubble", "CP2 ring"} == set(selftest_checks.rare_layouts(2))


WORKER = """
import json, os, sys
from pathlib import Path
rows = Path(sys.argv[1])
begun = [json.loads(line).get("begin") for line in rows.read_text().splitlines()] if rows.exists() else []
def add(row):
    with rows.open("a") as file:
        file.write(json.dumps(row) + "\\n")
for name in ("a", "hangs", "b", "dies", "c"):
    if name not in begun:
        add({"begin": name, "part": "layouts"})
        if name == "hangs":
            add({"name": name, "passed": False, "error": "no end after 1 s"})
        if name in ("hangs", "dies"):
            os._exit(75)
        add({"name": name, "passed": True})
"""


def test_recipes_are_dealt_forth_and_back():
    assert selftest_nccl.deal(["a", "b", "c", "d", "e", "f"], 4) == [["a"], ["b"], ["c", "f"], ["d", "e"]]
    assert selftest_nccl.deal(["a", "b"], 4) == [["a"], ["b"]]
    assert selftest_nccl.deal(["a", "b", "c"], 1) == [["a", "b", "c"]]


def finished(job: selftest_nccl.Job) -> list[dict]:
    job.start()
    rows = []
    while not job.over:
        rows += job.poll()
        time.sleep(0.02)
    return rows


def test_a_check_that_hangs_or_dies_costs_its_own_row(tmp_path):
    command = [sys.executable, "-c", WORKER, str(tmp_path / "rows_0.jsonl")]
    rows = finished(selftest_nccl.Job("0", command, tmp_path, dict(os.environ)))
    assert [(row["name"], row["passed"]) for row in rows] == [
        ("a", True), ("hangs", False), ("b", True), ("dies", False), ("c", True),
    ]  # fmt: skip
    assert rows[1]["error"] == "no end after 1 s"
    assert "log_0.txt" in rows[3]["error"]
    assert "FAIL hangs" in selftest_nccl.line(rows[1])


def test_a_job_that_never_begins_is_not_started_for_ever(tmp_path):
    job = selftest_nccl.Job("0", [sys.executable, "-c", "raise SystemExit(1)"], tmp_path, dict(os.environ))
    assert finished(job) == []


def test_a_check_has_so_long_and_no_longer(tmp_path):
    """In a process of its own, since it ends it."""
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tools")!r})
import selftest_worker
rows = selftest_worker.Rows(Path({str(tmp_path / "rows.jsonl")!r}))
with selftest_worker.limited(30, rows, "quick"):
    pass
with selftest_worker.limited(0.2, rows, "slow"):
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 75
    assert "most recent call first" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [{"name": "slow", "passed": False, "error": "no end after 0.2 s"}]


def test_time_that_is_out_is_told_by_rank_0(tmp_path):
    """Though the other rank's end would look like a fault of the network to it."""
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT / "tools")!r})
import selftest_worker
selftest_worker.GRACE = 1.0
begin, selftest_worker.os._exit = time.monotonic(), lambda code: print(time.monotonic() - begin, flush=True)
with selftest_worker.limited(0.2, selftest_worker.Rows(Path({str(tmp_path / "rows.jsonl")!r})), "slow"):
    time.sleep(1.6)
"""
    seconds = {}
    for rank in "01":
        script = [sys.executable, "-c", code]
        done = subprocess.run(script, cwd=ROOT, env=os.environ | {"RANK": rank}, capture_output=True, text=True)
        seconds[rank] = float(done.stdout)
        assert "most recent call first" in done.stderr
    assert seconds["1"] >= 1.2 > seconds["0"]
    assert (tmp_path / "rows.jsonl").read_text().count("no end after 0.2 s") == 1


def test_a_wrong_number_is_seen(tmp_path, monkeypatch):
    runner = selftest_runs.Runner(tmp_path, "cpu", "0")
    expected = [(5.0 - 0.1 * i, 2.0) for i in range(10)]
    monkeypatch.setattr(runner, "small", lambda *args: [(loss * 1.001, norm) for loss, norm in expected])
    monkeypatch.setattr(runner, "reference", lambda *args: expected)
    name, check = next(selftest_checks.check_layouts(runner, 2, ["fp32"]))
    assert (name, check()["passed"]) == ("PP2 zero-bubble fp32 = one", False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_on_the_cpu(tmp_path):
    env = os.environ | {"DEVICE": "cpu", "GPUS": "2", "RECIPES": "fp32 blockwise", "OMP_NUM_THREADS": "1", "JOBS": "1"}
    env |= {"PARTS": "layouts switches checkpoint collectives speed", "CASES": "DP EP WHOLE", "CHECK_SECONDS": "300"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    script = ["bash", "tools/selftest_nccl.sh", str(tmp_path)]
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "selftest.json").read_text())["rows"]
    assert all(row["passed"] for row in rows)
    assert len(rows) > 30


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("DIR", "--jobs", "0"), "--jobs 0: give 1 or more"),
        (("DIR", "--gpus", "0"), "--gpus 0: give 1 or more"),
        (
            ("DIR", "--gpus", "1", "--parts", "graphs", "collectives"),
            "--gpus 1: graphs need 2 or more, else nothing is compared; give 2, or --parts collectives",
        ),
        (
            ("DIR", "--parts", "layouts", "--cases", "DP"),
            "--cases DP: of the part speed; add it to --parts",
        ),
        (("/dev/null/x",), "/dev/null/x: can't write there; give another directory"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(argv, line, capsys, monkeypatch):
    monkeypatch.setattr(selftest_nccl, "Selftest", lambda args: pytest.fail("it has begun"))
    with pytest.raises(SystemExit, match="2"):
        selftest_nccl.main([*argv])
    assert capsys.readouterr().err.partition("error: ")[2] == line + "\n"


def test_more_processes_than_gpus_are_refused(tmp_path, capsys, monkeypatch):
    """Before any of them starts."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(selftest_nccl, "Selftest", lambda args: pytest.fail("it has begun"))
    with pytest.raises(SystemExit) as leaving:
        selftest_nccl.main([str(tmp_path / "s"), "--gpus", "99"])
    assert leaving.value.code == 2
    assert "--gpus 99: torch sees 2 CUDA GPU(s) here; give no more, or --device cpu" in capsys.readouterr().err
