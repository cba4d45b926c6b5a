"""Waits for other ranks are timed where they happen, and told apart from a rank's own work."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest

import pretrain_gpt
from megafp8.fp8 import Linear
from megafp8.training.run_log import read_metrics
from tests.training.runs import flags, write_corpus

SHORT = ("--train-iters", "4", "--exit-interval", "3", "--eval-iters", "0", "--log-interval", "1")
LAYOUTS = {
    "tensor": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
}


def run_with_slow_linears(argv: list[str]) -> int:
    original = Linear.forward

    def forward(self, x, step=None, **rest):
        time.sleep(0.05 * (os.environ["RANK"] == "1"))
        return original(self, x, step, **rest)

    with mock.patch.object(Linear, "forward", forward):
        return pretrain_gpt.main(argv)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_is_slow_among_ranks_that_wait_for_each_other(pool, tmp_path, layout):
    """Rank 1's linears take 50 ms each: rank 0 waits as long for its messages, which is none of its work.

    On a busy machine a rank may be slow without that, but not in all iterations by as much.
    """
    argv = flags(write_corpus(tmp_path), *SHORT, "--timing-log-level", "2", "--log-dir", str(tmp_path))
    assert pool.run_on(2, run_with_slow_linears, [*argv, *LAYOUTS[layout]]) == [0] * 2
    lines = read_metrics(tmp_path)[0]
    assert any(
        line["slowest_rank"] == 1 and line["compute_ms_max"] - line["compute_ms_median"] > 200 for line in lines[1:]
    )
    waits = [line["timers"]["communication" if layout == "tensor" else "backward-recv"] for line in lines[1:]]
    assert any(wait["slowest_rank"] == 0 and wait["max_ms"] - wait["min_ms"] > 200 for wait in waits)
