"""The pool itself: results by rank, errors with their rank and traceback, hangs, and a clean pool after each."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import WorkerError, WorkerPool


def sum_of_ranks(offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return os.getpid(), total


def fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the lost key")
    dist.barrier()


def hangs_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def dies_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def environment() -> tuple[str, ...]:
    return tuple(os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "COLOUR"))


def test_results_come_by_rank_from_the_same_processes(pool):
    first = pool.run_on(4, sum_of_ranks, 1)
    second = pool.run_on(2, sum_of_ranks, 10)
    assert [total.item() for _, total in first] == [10.0] * 4
    assert [total.item() for _, total in second] == [21.0] * 2
    assert [pid for pid, _ in second] == [pid for pid, _ in first[:2]]
    assert len({pid for pid, _ in first}) == 4


def test_environment_of_one_job_only(pool):
    assert pool.run_on(2, environment, env={"COLOUR": "red"}) == [("0", "2", "red"), ("1", "2", "red")]
    assert pool.run_on(1, environment) == [("0", "1", "")]


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (fails_on_rank_1, WorkerError, "rank 1: KeyError: 'the lost key'"),
        (hangs_on_rank_1, TimeoutError, r"rank\(s\) \[0, 1\] of 2"),
        (dies_on_rank_1, WorkerError, "rank"),
    ],
)
def test_failed_job_is_told_and_leaves_no_trace(function, error, text):
    pool = WorkerPool(2)
    try:
        start = time.monotonic()
        with pytest.raises(error, match=text):
            pool.run_on(2, function, timeout=4 if function is hangs_on_rank_1 else 60)
        assert time.monotonic() - start < 100  # a quarter of what a job may take
        assert pool.pids == []
        assert [total.item() for _, total in pool.run_on(2, sum_of_ranks, 0)] == [1.0, 1.0]
    finally:
        pool.close()
