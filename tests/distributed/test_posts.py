"""What real runs post, under NCCL's rules: every rank the same collectives in the same order, and nothing stands still.

Beside it the runs have the bits of those that post as on gloo. What the rules would see is in
tests/core/pipeline/test_receives.py; here it is planted in a run's own traces.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from megafp8.core.pipeline.p2p import groups_by_direction
from megafp8.core.pipeline.receives import one_ahead
from megafp8.parallel import build_parallel
from megafp8.training.step import PipelinePlan, evaluate
from tests.cases import quick
from tests.core.pipeline.nccl_rules import MismatchError, Post, StuckError, check
from tests.distributed.layouts import GPT2, LLAMA, Layout, Run, make_config, micro_batches, run_layout, train
from tests.distributed.posts import Notes
from tests.distributed.test_experts import EXPERTS
from tests.distributed.test_overlap import use_small_buckets
from tests.distributed.test_pipeline import DEEP, assert_same_bits

OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
FP8 = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}
TIED = GPT2 | {"hidden_size": 32, "num_layers": 4}
CASES = {
    "interleaved": (DEEP | OVERLAP, Layout(pp=2, chunks=2, dp=2)),
    "zero-bubble": (DEEP, Layout(pp=4, schedule="zero-bubble")),
    "interleaved zero-bubble": (DEEP, Layout(pp=2, chunks=2, schedule="zero-bubble")),
    "gpipe": (DEEP, Layout(pp=2, chunks=2, schedule="gpipe", tp=2, sp=True)),
    "tied": (TIED, Layout(pp=2, tp=2, sp=True)),
    "ring": (DEEP, Layout(pp=2, cp=2, ring=True)),
    "experts": (EXPERTS, Layout(pp=2, dp=2, ep=2)),
    "overlaps in FP8": (LLAMA | FP8 | OVERLAP, Layout(tp=2, sp=True, overlap=True, dp=2)),
}
QUICK = {"interleaved", "tied", "experts"}


def noted(values: dict, layout: Layout, plan=None) -> Run:
    """A rank's run of two steps and an evaluation; `extra` is its trace."""
    notes = Notes()

    def begin(stack: ExitStack) -> None:
        notes.on(stack)
        use_small_buckets(stack)
        if plan is not None:
            stack.enter_context(mock.patch("megafp8.training.step.once_sent", plan))

    def finish(model, optimizer, parallel):
        config = make_config(values, layout)
        batches = list(micro_batches(config, parallel, 1))
        pipeline = PipelinePlan.of(config, parallel)
        evaluate(model, iter(batches), count=len(batches), scaling=None, device=batches[0].tokens.device,
                 parallel=parallel, plan=pipeline)  # fmt: skip
        return notes.trace

    return train(values, layout, 2, fault=begin, observe=finish)


def traces(pool, case: str, plan=None) -> list:
    values, layout = CASES[case]
    return [run.extra for run in pool.run_on(layout.world, noted, values, layout, plan)]


@pytest.mark.parametrize("case", quick(list(CASES), QUICK, id=str))
def test_what_runs_post_never_stands_still(pool, case):
    found = traces(pool, case)
    assert all(sum(isinstance(event, Post) for event in trace) > 10 for trace in found)
    check(found, busy=False)
    check(found, busy=True)


def test_a_plan_that_stands_still_and_collectives_that_cross_are_seen(pool):
    found = traces(pool, "tied", one_ahead)
    check(found, busy=False)
    with pytest.raises(StuckError):
        check(found, busy=True)
    collectives = [i for i, event in enumerate(found[0]) if isinstance(event, Post) and event.sides[0].peer is None]
    one, other = next(
        (i, k) for i, k in zip(collectives, collectives[1:], strict=False)
        if found[0][i].comm == found[0][k].comm and found[0][i].sides != found[0][k].sides
    )  # fmt: skip
    found[0][one], found[0][other] = found[0][other], found[0][one]
    with pytest.raises(MismatchError):
        check(found, busy=False)


@pytest.mark.parametrize(
    "case", quick(["interleaved zero-bubble", "zero-bubble", "interleaved"], {"zero-bubble"}, id=str)
)
def test_posted_as_on_nccl_a_run_has_the_same_bits(pool, case):
    values, layout = CASES[case]

    assert_same_bits(run_layout(pool, values, layout, fault=as_on_nccl), run_layout(pool, values, layout))


def groups_made_twice() -> list[tuple]:
    """(name, ranks) of the groups of a pipeline's messages, made, destroyed and made again."""
    config = make_config(DEEP, Layout(pp=2, dp=2, chunks=2))
    axis, found = build_parallel(config, "cpu").pp, []
    for _ in range(2):
        groups = groups_by_direction(axis, 2, timedelta(minutes=1))
        for group in groups.values():
            found.append((group.group_name, dist.get_process_group_ranks(group)))
            dist.destroy_process_group(group)
    return found


def test_groups_made_again_are_others(pool):
    """Of the same name they would meet in the same place, where NCCL's address of the first one still is."""
    ranks = pool.run_on(4, groups_made_twice)
    names = [[name for name, _ in found] for found in ranks]
    assert len(set(names[0])) == 8
    assert (names[0], names[1]) == (names[2], names[3])
    assert not set(names[0]) & set(names[1])
    assert [found[0][1] for found in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def as_on_nccl(stack: ExitStack) -> None:
    Notes().on(stack)
