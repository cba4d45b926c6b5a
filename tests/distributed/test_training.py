"""pretrain_gpt.py on several processes: the same run as on one, resumes in other layouts, stops and fails together."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import pretrain_gpt
from megafp8.optimizer import Optimizer
from megafp8.training.run_log import read_metrics
from megafp8.training.trainer import Trainer
from tests.distributed.pool import WorkerError
from tests.training.runs import RECIPES, flags, write_corpus

TP_DP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
ROOT = Path(__file__).resolve().parents[2]
# Adam makes whole steps of gradients that are rounding only; see layouts.py.
SMOOTH = ("--lr", "1e-4", "--min-lr", "1e-4", "--global-batch-size", "8", "--train-iters", "6", "--eval-interval", "3")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(argv: list[str]) -> int:
    return pretrain_gpt.main(argv)


def lines(log_dir: Path, key: str) -> list[float]:
    training, validation = read_metrics(log_dir)
    return [line[key] for line in (validation if key == "valid_loss" else training)]


def start(pool, world: int, corpus: Path, log_dir: Path, *extra: str) -> list[int]:
    argv = [*flags(corpus, *SMOOTH), "--log-dir", str(log_dir), *extra]
    return pool.run_on(world, run, argv)


def near(actual: list[float], expected: list[float]) -> bool:
    return len(actual) == len(expected) > 0 and all(
        abs(a - b) <= 1e-6 * abs(b) for a, b in zip(actual, expected, strict=True)
    )


def test_run_equals_that_of_one_process(pool, corpus, tmp_path):
    """Losses, gradient norms, evaluations; and after a resume in any other layout."""
    one, four = tmp_path / "one", tmp_path / "four"
    assert start(pool, 1, corpus, one) == [0]
    half = ("--cross-entropy-chunks", "3", "--exit-interval", "3", "--save", str(tmp_path / "saved"))
    assert start(pool, 4, corpus, four, *TP_DP, *half) == [0] * 4
    for key in ("lm_loss", "grad_norm", "valid_loss"):
        assert near(lines(four, key), lines(one, key)[: len(lines(four, key))]), key
    for name, world, layout in (("two", 2, ()), ("tp", 2, TP_DP), ("again", 1, ())):
        log_dir = tmp_path / name
        assert start(pool, world, corpus, log_dir, *layout, "--load", str(tmp_path / "saved")) == [0] * world
        assert lines(log_dir, "iteration")[0] == 4
        for key in ("lm_loss", "grad_norm"):
            assert near(lines(log_dir, key), lines(one, key)[3:]), (name, key)
        assert near(lines(log_dir, "valid_loss")[-1:], lines(one, "valid_loss")[-1:])


ZERO = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


def test_sharded_optimizer_saves_and_resumes_at_other_sizes(pool, corpus, tmp_path):
    """Losses, norms and evaluations are one process's; shards of four ranks go on on two and on one."""
    one, four = tmp_path / "one", tmp_path / "four"
    assert start(pool, 1, corpus, one) == [0]
    half = ("--exit-interval", "3", "--save", str(tmp_path / "saved"))
    assert start(pool, 4, corpus, four, *ZERO, *half) == [0] * 4
    for key in ("lm_loss", "grad_norm", "valid_loss"):
        assert near(lines(four, key), lines(one, key)[: len(lines(four, key))]), key
    for name, world, options in (("two", 2, ZERO), ("plain", 2, TP_DP), ("again", 1, ())):
        log_dir = tmp_path / name
        assert start(pool, world, corpus, log_dir, *options, "--load", str(tmp_path / "saved")) == [0] * world
        for key in ("lm_loss", "grad_norm"):
            assert near(lines(log_dir, key), lines(one, key)[3:]), (name, key)


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_fp8_primary_weights_change_no_bit_of_a_run(pool, corpus, tmp_path, recipe):
    """CASES 04, 76: on = off, with evaluations, and stopped, saved and resumed in between."""
    fp8 = (*RECIPES[recipe], *ZERO)
    assert start(pool, 2, corpus, tmp_path / "off", *fp8) == [0, 0]
    on = (*fp8, "--fp8-param-gather", "--save", str(tmp_path / "saved"))
    assert start(pool, 2, corpus, tmp_path / "on", *on, "--exit-interval", "3") == [0, 0]
    assert start(pool, 2, corpus, tmp_path / "on", *on, "--load", str(tmp_path / "saved")) == [0, 0]
    for key in ("lm_loss", "grad_norm", "valid_loss"):
        assert lines(tmp_path / "on", key) == lines(tmp_path / "off", key), key


def run_with_signal(argv: list[str]) -> int:
    """Rank 1 alone gets a SIGTERM during its third iteration."""
    original = Trainer._iteration

    def iteration(self, batches):
        if self.progress.iteration == 2 and self.parts.parallel.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batches)

    with mock.patch.object(Trainer, "_iteration", iteration):
        return pretrain_gpt.main(argv)


def test_signal_to_one_rank_stops_all_with_a_checkpoint(pool, corpus, tmp_path):
    argv = [*flags(corpus, *SMOOTH), "--log-dir", str(tmp_path / "log"), "--save", str(tmp_path / "saved"), *TP_DP]
    assert pool.run_on(4, run_with_signal, argv) == [143] * 4
    (stopped,) = (tmp_path / "saved").glob("iter_*")
    assert lines(tmp_path / "log", "iteration")[-1] == int(stopped.name.removeprefix("iter_")) == 4


def run_with_inf(argv: list[str]) -> int:
    """One element of one gradient on rank 1 is infinite at the third step."""
    original, calls = Optimizer.reduce_gradients, []

    def reduce_gradients(self):
        calls.append(1)
        if len(calls) == 3 and self.parallel.rank == 1:
            self.grads.state.views["layers.0.mlp.fc1.weight"][0, 0] = float("inf")
        original(self)

    with mock.patch.object(Optimizer, "reduce_gradients", reduce_gradients):
        return pretrain_gpt.main(argv)


def test_skipped_step_is_in_the_log(pool, corpus, tmp_path):
    """CASES 31, BF16 at TP 2: only the third line says skipped and nan, and has no finite norm."""
    argv = [*flags(corpus, *SMOOTH, "--bf16"), "--log-dir", str(tmp_path), *TP_DP]
    assert pool.run_on(4, run_with_inf, argv) == [0] * 4
    assert lines(tmp_path, "skipped") == lines(tmp_path, "nan") == [0, 0, 1, 0, 0, 0]
    assert [math.isfinite(norm) for norm in lines(tmp_path, "grad_norm")] == [True, True, False, True, True, True]
    assert all(math.isfinite(loss) for loss in lines(tmp_path, "lm_loss"))


def test_mistakes_are_told_before_any_communication(pool, corpus, tmp_path):
    assert start(pool, 2, corpus, tmp_path, "--tensor-model-parallel-size", "4") == [2, 2]
    uneven = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--seq-length", "31")
    assert start(pool, 2, corpus, tmp_path, *uneven) == [2, 2]
    fp8 = ("--bf16", "--fp8-format", "e4m3", "--fp8-weight-tile", "1d", "--tensor-model-parallel-size", "2")
    assert start(pool, 2, corpus, tmp_path, *fp8) == [2, 2]  # 24 features a rank, tiles of 1 x 128


def run_and_fail(argv: list[str], told: Path) -> int:
    """Rank 1 fails in its third iteration; each tells by which error its process ended."""
    original = Trainer._iteration

    def iteration(self, batches):
        if self.progress.iteration == 2 and self.parts.parallel.rank == 1:
            raise RuntimeError("the third iteration of rank 1 went wrong")
        return original(self, batches)

    with mock.patch.object(Trainer, "_iteration", iteration):
        try:
            return pretrain_gpt.main(argv)
        except RuntimeError as error:
            (told / os.environ["RANK"]).write_text(str(error))
            os._exit(1)


def test_failed_rank_ends_the_others(pool, corpus, tmp_path):
    """By their connections to it, long before any timeout."""
    argv = [*flags(corpus, *SMOOTH), "--log-dir", str(tmp_path / "log"), *TP_DP]
    with pytest.raises(WorkerError):
        pool.run_on(2, run_and_fail, argv, tmp_path)
    assert (tmp_path / "1").read_text() == "the third iteration of rank 1 went wrong"
    assert "by peer" in (tmp_path / "0").read_text()


FAILING = """
import os, signal, sys
import pretrain_gpt
from megafp8.training.trainer import Trainer
original = Trainer._iteration
def iteration(self, batches):
    if self.progress.iteration == 2 and self.parts.parallel.rank == 1:
        if {kill}:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the third iteration of rank 1 went wrong")
    return original(self, batches)
Trainer._iteration = iteration
sys.exit(pretrain_gpt.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kill", [False, True])
def test_failed_rank_ends_the_job(corpus, tmp_path, kill):
    """Under torchrun: with a non-zero code and the rank's own error as the root cause."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(kill=kill))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script)]
    command += [*flags(corpus, *SMOOTH), "--log-dir", str(tmp_path / "log"), *TP_DP]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode not in (0, 2)
    root_cause = done.stderr.split("Root Cause")[1]
    assert "rank      : 1" in root_cause
    assert ("SIGKILL" if kill else "RuntimeError: the third iteration of rank 1 went wrong") in root_cause
