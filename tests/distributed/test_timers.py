"""Waits for other ranks are timed where they happen, and told apart from a rank's own work."""

from __future__ import annotations

import pytest

from megafp8.training.run_log import read_metrics
from tests.distributed.test_watching import run_with_straggler
from tests.training.runs import flags, write_corpus

SHORT = ("--train-iters", "4", "--exit-interval", "3", "--eval-iters", "0", "--log-interval", "1")
LAYOUTS = {
    "tensor": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_is_slow_among_ranks_that_wait_for_each_other(pool, tmp_path, layout):
    """Rank 1's linears take 30 ms each: rank 0 waits as long for its messages, and works no longer than it does."""
    argv = flags(write_corpus(tmp_path), *SHORT, "--timing-log-level", "2", "--log-dir", str(tmp_path))
    assert pool.run_on(2, run_with_straggler, [*argv, *LAYOUTS[layout]]) == [0] * 2
    for line in read_metrics(tmp_path)[0][1:]:
        timers = line["timers"]
        assert line["slowest_rank"] == 1
        assert line["compute_ms_max"] - line["compute_ms_median"] > 100
        waits = timers["communication" if layout == "tensor" else "backward-recv"]
        assert waits["slowest_rank"] == 0
        assert waits["max_ms"] - waits["min_ms"] > 100
