"""Monitor, guard and log on several ranks: the statistics of one process, votes of all ranks, and who is slow."""

from __future__ import annotations

import json
import math
import os
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

import pretrain_gpt
from megafp8.fp8 import Linear
from megafp8.training.run_log import read_metrics
from megafp8.training.timers import Timers
from tests.training.runs import RECIPES, flags, write_corpus
from tests.training.test_guard import LAYER, PRIMARY, events, infinite_output, plant, skipped
from tests.training.test_guard_experts import MOE, OF_ALL, spoilt

TP_DP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
SHORT = ("--train-iters", "4", "--eval-iters", "0", "--log-interval", "1", "--global-batch-size", "8")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(argv: list[str]) -> int:
    return pretrain_gpt.main(argv)


def command(corpus: Path, log_dir: Path, *extra: str, recipe: str = "blockwise") -> list[str]:
    return flags(corpus, *RECIPES[recipe], *SHORT, "--log-dir", str(log_dir), *extra)


STAGES = ("--pipeline-model-parallel-size", "2")


@pytest.mark.parametrize("layout", [TP_DP, pytest.param(STAGES, marks=pytest.mark.slow)], ids=["tp-dp", "pp-dp"])
def test_statistics_are_those_of_one_process(pool, corpus, tmp_path, layout):
    """In the first step, when the weights are the same; what several ranks hold alike counts several times for all."""
    found = {}
    for name, world, extra in (("one", 1, ()), ("four", 4, layout)):
        argv = command(corpus, tmp_path / name, "--fp8-monitor-interval", "1", "--exit-interval", "1", *extra)
        assert pool.run_on(world, run, argv) == [0] * world
        lines = [json.loads(line) for line in (tmp_path / name / "fp8_monitor.jsonl").read_text().splitlines()]
        found[name] = {(line["linear"], line["role"]): line for line in lines if line["iteration"] == 1}
    assert found["one"].keys() == found["four"].keys()
    assert len(found["one"]) == 24
    for key, line in found["one"].items():
        other = found["four"][key]
        exact = key[1] == "weight"
        tolerance = 0 if exact else 0.05
        assert other["amax"] == pytest.approx(line["amax"], rel=tolerance), key
        for number in ("scale_inv_min", "scale_inv_median", "scale_inv_max"):  # powers of two
            assert abs(math.log2(other[number] / line[number])) <= (0 if exact else 1), key
        assert other["sqnr_db"] == pytest.approx(line["sqnr_db"], abs=1e-6 if exact else 0.3), key


def run_with_fault(argv: list[str]) -> int:
    """The linear's output is infinite from the third step on, on the second data-parallel rank alone."""

    def spoil(linear, x, call):
        return infinite_output(linear, x, call) if x_is_of_rank_1() else call(x)

    def x_is_of_rank_1() -> bool:
        import torch.distributed as dist

        return dist.get_rank() // 2 == 1

    with plant(spoil, iterations=range(3, 99)):
        return pretrain_gpt.main(argv)


def run_with_bad_columns(argv: list[str]) -> int:
    """The second tensor-parallel rank's columns of a linear are infinite, in the third step."""
    with plant(infinite_output) if os.environ["RANK"] == "1" else nullcontext():
        return pretrain_gpt.main(argv)


def test_the_rank_that_made_it_is_named_and_not_who_got_it(pool, corpus, tmp_path):
    """Rank 0 meets it one layer later, in the sum of both ranks' rows."""
    argv = command(corpus, tmp_path, *TP_DP)
    assert pool.run_on(2, run_with_bad_columns, argv) == [0] * 2
    (event,) = events(tmp_path)
    assert (event["iteration"], event["first"], event["role"]) == (3, LAYER, "output")
    assert "on rank 1" in event["message"]


def run_with_bad_experts(argv: list[str]) -> int:
    """An expert of the second rank gives infinite rows from the third step on."""
    with spoilt(range(3, 99), number=1) if os.environ["RANK"] == "1" else nullcontext():
        return pretrain_gpt.main(argv)


@pytest.mark.parametrize("dispatch", [(), ("--moe-fp8-dispatch",)], ids=["bf16", "fp8"])
def test_one_ranks_expert_makes_those_of_all_ranks_fall_back(pool, corpus, tmp_path, dispatch):
    """EP 2: else one rank would send rows in another format than the other one takes."""
    argv = command(corpus, tmp_path, "--fp8-fallback-after", "1", *MOE, *dispatch)
    assert pool.run_on(2, run_with_bad_experts, [*argv, "--expert-model-parallel-size", "2"]) == [0] * 2
    nonfinite, fallback = events(tmp_path)
    assert nonfinite["first"] == "layers.1.mlp.experts"
    assert fallback["linears"] == OF_ALL
    assert skipped(tmp_path) == [3]


def test_one_ranks_fault_makes_all_ranks_fall_back(pool, corpus, tmp_path):
    """TP 2 x DP 2, FP8 primary weights and BF16 ones: the same run, bit for bit, with the same fallback."""
    for name, extra in (("plain", ()), ("primary", PRIMARY)):
        argv = command(corpus, tmp_path / name, "--fp8-fallback-after", "1", *TP_DP, *extra, recipe="tensorwise")
        assert pool.run_on(4, run_with_fault, argv) == [0] * 4
        assert skipped(tmp_path / name) == [3]
        nonfinite, fallback = events(tmp_path / name)
        assert (nonfinite["first"], nonfinite["role"]) == (LAYER, "output")
        assert "on rank 2" in nonfinite["message"], "the first rank of those that met it"
        assert nonfinite["samples"] == [18, 19], "its own: 16 were consumed, ranks 0 and 1 had the first two"
        assert fallback["linears"] == [LAYER]
    lines = [[line["lm_loss"] for line in read_metrics(tmp_path / name)[0]] for name in ("plain", "primary")]
    assert lines[0] == lines[1]


def run_with_straggler(argv: list[str]) -> int:
    """By a clock that only linears move on: rank 1's take ten times as long."""
    original, seconds = Linear.forward, [0.0]

    def forward(self, x, step=None, **rest):
        seconds[0] += 100.0 if os.environ["RANK"] == "1" else 10.0
        return original(self, x, step, **rest)

    def now(self):
        return seconds[0]

    with mock.patch.object(Linear, "forward", forward), mock.patch.object(Timers, "now", now):
        return pretrain_gpt.main(argv)


def test_a_slow_rank_is_in_the_log(pool, corpus, tmp_path):
    assert pool.run_on(2, run_with_straggler, command(corpus, tmp_path, recipe="fp32")) == [0] * 2
    lines = read_metrics(tmp_path)[0]
    assert [line["slowest_rank"] for line in lines[1:]] == [1] * (len(lines) - 1)
    assert all(line["compute_ms_max"] > 5 * line["compute_ms_median"] > 0 for line in lines[1:])


EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "24", "--moe-aux-loss-coeff", "0.1"),
    *("--moe-router-load-balancing-type", "aux_loss", "--global-batch-size", "12", "--micro-batch-size", "2"),
)


def aux_losses(pool, corpus: Path, log_dir: Path, world: int, *extra: str) -> list[float]:
    argv = command(corpus, log_dir, *EXPERTS, "--exit-interval", "3", *extra, recipe="fp32")
    assert pool.run_on(world, run, argv) == [0] * world
    return [line["aux_loss"] for line in read_metrics(log_dir)[0]]


def test_auxiliary_loss_in_the_log_counts_each_forward_once(pool, corpus, tmp_path):
    """CASES 23: the mean over 6 microbatches of one process, or 3 on each of two ranks, whatever is recomputed."""
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    plain = aux_losses(pool, corpus, tmp_path / "one", 1)
    assert all(loss > 0 for loss in plain)
    assert len(plain) == 3
    layouts = {"dp": (2, ()), "recompute": (2, full), "pp": (2, ("--pipeline-model-parallel-size", "2"))}
    for name, (world, extra) in layouts.items():
        assert aux_losses(pool, corpus, tmp_path / name, world, *extra) == pytest.approx(plain, rel=1e-5), name
