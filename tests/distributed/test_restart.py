"""torchrun starts a job again when a rank dies: it goes on from its own checkpoints, as if nothing had been."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafp8.config import Config
from megafp8.training.restart import restarted
from tests.training.runs import flags, metrics, run, tensors, write_corpus

ROOT = Path(__file__).resolve().parents[2]
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""docs/launching.md: else ranks that start again may find the addresses of those that died."""
DYING = """
import os, sys
import pretrain_gpt
from megafp8.training.iteration import IterationRunner

original = IterationRunner.run

def run(self, batches, samples):
    if batches.iteration == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(9)  # as if killed: no clean-up, no word to anybody
    return original(self, batches, samples)

IterationRunner.run = run
sys.exit(pretrain_gpt.main())
"""


def test_only_a_restart_with_a_checkpoint_changes_the_configuration(tmp_path):
    config, name = Config().replace(save=str(tmp_path), load="elsewhere", finetune=True), "iter_0000004"
    assert restarted(config, {}) is config
    assert restarted(config, {"TORCHELASTIC_RESTART_COUNT": "1"}) is config, "nothing was saved yet"
    (tmp_path / name).mkdir()
    (tmp_path / name / "index.json").write_text("{}")
    (tmp_path / name / "run.json").write_text("{}")
    again = restarted(config, {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert (again.checkpoint.load, again.checkpoint.finetune) == (str(tmp_path), False)


@pytest.mark.slow
def test_a_dead_rank_costs_the_steps_since_the_last_checkpoint_and_no_more(tmp_path):
    corpus = write_corpus(tmp_path)
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    argv = flags(corpus, "--train-iters", "7", "--eval-iters", "0", "--log-interval", "1", "--save-interval", "2")
    hit, good = tmp_path / "hit", tmp_path / "good"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", str(script), *argv, "--log-dir", str(hit), "--save", str(hit / "c")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)} | OWN_STORE,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stdout
    assert run(*argv, "--log-dir", str(good), "--save", str(good / "c")) == 0
    for line, other in zip(metrics(hit)[0], metrics(good)[0], strict=True):
        assert line["iteration"] == other["iteration"]
        assert line["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-6)
    mine, theirs = (tensors(d / "c" / "iter_0000007") for d in (hit, good))
    assert all(torch.allclose(mine[k], theirs[k], rtol=1e-4, atol=1e-6) for k in theirs if k.startswith("model/"))


HANGING = """
import os, sys, time
import pretrain_gpt
from megafp8.training.iteration import IterationRunner

original = IterationRunner.run

def run(self, batches, samples):
    if batches.iteration == 3 and os.environ["RANK"] == "1":
        time.sleep(600)  # never comes to its collectives
    return original(self, batches, samples)

IterationRunner.run = run
sys.exit(pretrain_gpt.main())
"""


@pytest.mark.slow
def test_a_hung_collective_ends_with_the_rank_and_its_stack(tmp_path):
    """Under the shortest timeout, a minute."""
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    argv = flags(write_corpus(tmp_path), "--eval-iters", "0", "--distributed-timeout-minutes", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *argv], env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode not in (0, 2)
    told = [line for line in done.stderr.splitlines() if "hung: rank" in line]
    assert len(told) == 2, done.stderr
    assert all("behind: rank 1, at iteration 3 (data)" in line for line in told)
    assert "hanging.py" in done.stderr, "the stack of the rank that sleeps"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_survives_every_fault(tmp_path):
    """The drill of tools/fault_drill.py."""
    import fault_drill

    assert fault_drill.main(["--output", str(tmp_path / "drill")]) == 0
