"""The launch scripts in examples/ that train mixtures of experts, as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.training.run_log import read_metrics

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *args: str, timeout: float, **env: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | env
    done = subprocess.run(["bash", str(ROOT / "examples" / script), *args], env=env, capture_output=True, text=True,
                          timeout=timeout)  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_train_moe(tmp_path):
    """FP8 within 0.5% of BF16, which the script sees to; every expert is used, and the run learnt."""
    out = run("train_moe.sh", str(tmp_path), timeout=2300)
    assert "FP8 blockwise: within 0.50%" in out
    training, validation = read_metrics(tmp_path / "fp8")
    assert validation[-1]["valid_loss"] < 0.75 * training[0]["lm_loss"]
    loads = training[-1]["expert_load"]
    assert set(loads) == {"layers.1.mlp", "layers.2.mlp"}
    assert all(sum(load) == 8 * 128 * 2 and len(load) == 8 for load in loads.values())
    assert training[-1]["expert_load_max"] < 2
    assert (tmp_path / "loss.png").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("at_once", ["", "1"], ids=["in turn", "at once"])
def test_compare_moe(tmp_path, at_once):
    """The script's way through data, runs and the verdict, on a model that finishes on a CPU."""
    text = (ROOT / "examples" / "data" / "tinyshakespeare.txt").read_text()
    for start in range(0, 200_000, 5_000):
        (tmp_path / "sources").mkdir(exist_ok=True)
        (tmp_path / "sources" / f"{start}.txt").write_text(text[start : start + 5_000])
    tiny = (
        "--num-layers 2 --hidden-size 128 --ffn-hidden-size 128 --moe-ffn-hidden-size 128 --num-experts 4 "
        "--moe-shared-expert-intermediate-size 128 --moe-layer-freq [0,1] --num-attention-heads 2 --seq-length 32 "
        "--max-position-embeddings 32 --micro-batch-size 4 --global-batch-size 4 --train-iters 4 --eval-iters 8 "
        "--log-interval 1"
    )
    environment = {"EXTRA": tiny, "VOCAB": "512", "AT_ONCE": at_once, "FP8_SEEDS": "1 2"}
    out = run("compare_moe.sh", str(tmp_path / "run"), str(tmp_path / "sources"), timeout=850, **environment)
    assert "FP8, seed 1: within 0.25%" in out
    assert "FP8, seed 2: within 0.25%" in out


@pytest.mark.parametrize(
    "script",
    [
        *("examples/quickstart.sh", "examples/precision_tiers.sh", "examples/smoke_16_ranks.sh"),
        *("examples/train_moe.sh", "examples/compare_moe.sh", "tools/selftest_nccl.sh"),
    ],
)
def test_a_flag_is_no_directory(script):
    told = subprocess.run(["bash", ROOT / script, "--help"], capture_output=True, text=True, timeout=60, check=False)
    name = Path(script).stem
    assert told.returncode == 2
    assert told.stdout == ""
    assert told.stderr.startswith(f"{name}: unknown flag --help; give a directory, or nothing: bash {script} [DIR]")
    assert told.stderr.count("\n") == 1
