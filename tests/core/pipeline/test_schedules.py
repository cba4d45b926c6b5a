"""Schedules as data: they can run, their order is torch.distributed.pipelining's, and they hold what they should."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.distributed.pipelining import schedules as oracle

from megafp8.config.parallel import SCHEDULES as CONFIGURED
from megafp8.core.pipeline.schedules import (
    SCHEDULES,
    Action,
    Costs,
    Kind,
    Schedule,
    build_schedule,
    forward_only,
    peak_deferred,
    peak_microbatches,
    simulate,
)

SIZES = [
    (ranks, chunks, m)
    for ranks in (1, 2, 3, 4, 8)
    for chunks in (1, 2, 3)
    for m in (1, 2, 3, 4, 5, 7, 8, 12, 17)
]  # fmt: skip


def text(actions) -> list[str]:
    return [str(action) for action in actions]


def all_schedules(ranks, chunks, microbatches):
    for name in SCHEDULES:
        for group in (None, ranks + 1):
            yield build_schedule(name, ranks, chunks, microbatches, group=group)
    yield forward_only(ranks, chunks, microbatches)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_rank_does_everything_once_and_in_the_order_of_microbatches(sizes):
    """CASES 80: fewer microbatches than stages, and numbers that nothing divides."""
    ranks, chunks, microbatches = sizes
    for schedule in all_schedules(*sizes):
        kinds = {"forward-only": "F", "zero-bubble": "FIW"}.get(schedule.name, "FB")
        expected = Counter((k, c, m) for k in kinds for c in range(chunks) for m in range(microbatches))
        for actions in schedule.actions:
            assert Counter((a.kind.value, a.chunk, a.microbatch) for a in actions) == expected
            for kind in kinds:
                for chunk in range(chunks):
                    order = [a.microbatch for a in actions if (a.kind.value, a.chunk) == (kind, chunk)]
                    assert order == list(range(microbatches)), schedule.name


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_no_schedule_stands_still(sizes):
    """CASES 80."""
    for schedule in all_schedules(*sizes):
        timeline = simulate(schedule)
        assert 0 <= timeline.bubble < 1
        done = {}
        for rank, timed in enumerate(timeline.ranks):
            for t in timed:
                done[t.action.kind.value, schedule.stage(rank, t.action.chunk), t.action.microbatch] = t
        for (kind, stage, m), t in done.items():  # nothing starts before what it needs has ended
            if kind == "F" and stage:
                assert t.start >= done["F", stage - 1, m].stop
            if kind in "BI":
                assert t.start >= done["F", stage, m].stop
                if stage < schedule.stages - 1:
                    assert t.start >= done[kind, stage + 1, m].stop
            if kind == "W":
                assert t.start >= done["I", stage, m].stop


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_messages_between_two_stages_arrive_in_the_order_in_which_they_are_awaited(sizes):
    """NCCL has no tags: between two ranks, in one direction and not around the ring, order is all there is."""
    ranks = sizes[0]
    for schedule in all_schedules(*sizes):
        for rank in range(ranks if ranks > 1 else 0):
            after = (rank + 1) % ranks
            for kinds, sender, receiver, step in (("F", rank, after, 1), ("BI", after, rank, -1)):
                sent = _messages(schedule, sender, kinds, step, sending=True)
                awaited = _messages(schedule, receiver, kinds, step, sending=False)
                assert sent == awaited


def _messages(schedule: Schedule, rank: int, kinds: str, step: int, *, sending: bool) -> list[tuple[int, int]]:
    """(receiving stage, microbatch) of a rank's messages in one direction."""
    found = []
    for action in schedule.actions[rank]:
        stage = schedule.stage(rank, action.chunk) + (step if sending else 0)
        source = stage - step
        if action.kind.value in kinds and 0 <= stage < schedule.stages and 0 <= source < schedule.stages:
            found.append((stage, action.microbatch))
    return found


def test_a_wrong_order_stands_still():
    """The simulation sees what it is there for: rank 1 wants microbatch 1 first, and sends back 0 last."""
    good = build_schedule("1f1b", 2, 1, 2)
    swapped = tuple(Action(a.kind, a.chunk, 1 - a.microbatch) for a in good.actions[1])
    first = (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0), *good.actions[0][1:2], *good.actions[0][3:])
    with pytest.raises(ValueError, match="stands still before B0, F1"):
        simulate(Schedule("wrong", 2, 1, 2, (first, swapped)))


# The order of torch.distributed.pipelining


def executed(ranks: int, rank: int, microbatches: int) -> list[str]:
    """What torch's 1F1B calls, on a stage that only takes notes."""
    calls = []
    stage = mock.MagicMock(stage_index=rank, num_stages=ranks, is_last=rank == ranks - 1)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    stage.forward_one_chunk.side_effect = lambda m, *_, **__: calls.append(f"F{m}")
    stage.backward_one_chunk.side_effect = lambda m, *_, **__: calls.append(f"B{m}")
    self = mock.MagicMock(_stage=stage, _num_stages=ranks, _n_microbatches=microbatches)
    self._check_inputs.return_value = [()] * microbatches, [{}] * microbatches
    oracle.Schedule1F1B._step_microbatches(self)
    return calls


def oracle_order(kind: str, ranks: int, chunks: int, microbatches: int) -> list[list[str]]:
    """torch's lists of compute actions, written as ours are."""
    if kind == "Schedule1F1B":  # its list for display has the last rank's microbatches off by one: run it instead
        return [executed(ranks, rank, microbatches) for rank in range(ranks)]
    if kind == "ScheduleGPipe":
        self = SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches)
        lists = oracle.ScheduleGPipe._get_pipeline_order(self)
    else:
        rounds = max(1, microbatches // ranks)
        self = SimpleNamespace(
            pp_group_size=ranks,
            n_local_stages=chunks,
            _n_microbatches=microbatches,
            number_of_rounds=rounds,
            microbatches_per_round=microbatches // rounds,
        )
        lists = {r: getattr(oracle, kind)._calculate_single_rank_operations(self, r) for r in range(ranks)}
    return [
        [str(Action(Kind(a.computation_type.value), a.stage_index // ranks, a.microbatch_index)) for a in actions
         if a is not None and a.computation_type.value in "FBIW"]
        for _, actions in sorted(lists.items())
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [
        ("gpipe", "ScheduleGPipe", 1),
        ("1f1b", "Schedule1F1B", 1),
        ("1f1b", "ScheduleInterleaved1F1B", 2),
        ("1f1b", "ScheduleInterleaved1F1B", 3),
        ("zero-bubble", "ScheduleInterleavedZeroBubble", 1),
        ("zero-bubble", "ScheduleInterleavedZeroBubble", 2),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_order_is_that_of_torch(name, kind, chunks, ranks, times):
    microbatches = ranks * times
    ours = build_schedule(name, ranks, chunks, microbatches)
    assert [text(actions) for actions in ours.actions] == oracle_order(kind, ranks, chunks, microbatches)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 9])
def test_order_is_that_of_torch_with_any_number_of_microbatches(microbatches):
    for name, kind in (("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")):
        ours = build_schedule(name, 4, 1, microbatches)
        assert [text(actions) for actions in ours.actions] == oracle_order(kind, 4, 1, microbatches)


# What schedules cost, by hand


# (name, ranks, chunks, microbatches, rank) -> what it does
BY_HAND = {
    ("1f1b", 2, 1, 3, 0): "F0 F1 B0 F2 B1 B2",
    ("1f1b", 2, 1, 3, 1): "F0 B0 F1 B1 F2 B2",
    ("zero-bubble", 2, 1, 3, 0): "F0 F1 I0 W0 F2 I1 W1 I2 W2",
    ("zero-bubble", 2, 1, 3, 1): "F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ("1f1b", 2, 2, 2, 1): "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1",
}


@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_lists_by_hand(case):
    *sizes, rank = case
    assert " ".join(text(build_schedule(*sizes).actions[rank])) == BY_HAND[case]


@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (4, 8), (4, 4), (8, 16)])
def test_bubbles(ranks, m):
    """1F1B and GPipe idle (p - 1) of m + p - 1 steps; v chunks divide that by v; ZB-H1 leaves a third (Qi et al.)."""
    ideal = (ranks - 1) / (m + ranks - 1)
    for name in ("gpipe", "1f1b"):
        assert simulate(build_schedule(name, ranks, 1, m)).bubble == pytest.approx(ideal)
    interleaved = simulate(build_schedule("1f1b", ranks, 2, m)).bubble
    assert interleaved == pytest.approx((ranks - 1) / (2 * m + ranks - 1))
    deferred = simulate(build_schedule("zero-bubble", ranks, 1, m))
    assert deferred.length == pytest.approx(3 * m + ranks - 1)


@pytest.mark.parametrize(("ranks", "m"), [(2, 8), (4, 8), (4, 2)])
def test_what_is_held(ranks, m):
    for rank in range(ranks):
        assert peak_microbatches(build_schedule("gpipe", ranks, 1, m).actions[rank]) == m
        assert peak_microbatches(build_schedule("1f1b", ranks, 1, m).actions[rank]) == min(m, ranks - rank)
        deferred = build_schedule("zero-bubble", ranks, 1, m).actions[rank]
        assert peak_microbatches(deferred) == min(m, ranks - rank)
        assert peak_deferred(deferred) == min(m, rank + 1)


def test_costs_and_messages_count():
    schedule = build_schedule("1f1b", 2, 1, 1)
    assert simulate(schedule, Costs(2, 3, 4, 0.5)).length == 2 * (2 + 7) + 2 * 0.5
    assert simulate(build_schedule("1f1b", 1, 1, 3), Costs(2, 3, 4, 9)).bubble == 0


def test_flags_know_which_schedules_there_are_and_which_defer():
    assert set(CONFIGURED) == set(SCHEDULES)
    for name, defers in CONFIGURED.items():
        assert build_schedule(name, 2, 1, 4).defers is defers, name
