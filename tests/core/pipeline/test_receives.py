"""When receives are posted: nothing ever stands still under NCCL's rules, and the rules see what would."""

import pytest

from megafp8.core.pipeline.p2p import Message
from megafp8.core.pipeline.receives import awaited, once_sent, one_ahead
from megafp8.core.pipeline.schedules import SCHEDULES, Action, Kind, Schedule, build_schedule, forward_only
from tests.core.pipeline.nccl_rules import WORK, MismatchError, Post, Side, StuckError, Wait, check, trace_of

SIZES = [(ranks, chunks, m) for ranks in (2, 3, 4) for chunks in (1, 2, 3) for m in (1, 2, 4, 7)]


def all_schedules(ranks, chunks, microbatches):
    for name in SCHEDULES:
        yield build_schedule(name, ranks, chunks, microbatches)
        if chunks > 1:
            yield build_schedule(name, ranks, chunks, microbatches, group=ranks + 1)
    yield forward_only(ranks, chunks, microbatches)


def traces(schedule, plan, pairs=True):
    return [trace_of(schedule, rank, plan(schedule, rank), pairs=pairs) for rank in range(schedule.ranks)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_once_sent_never_stands_still(sizes):
    for schedule in all_schedules(*sizes):
        for pairs in (True, False):
            found = traces(schedule, once_sent, pairs)
            check(found, busy=True)
            check(found, busy=False)


def test_one_ahead_stands_still_where_the_device_may_wait():
    """What hung on two H200: the last stage awaited microbatch 1 before it sent the gradient of microbatch 0."""
    schedule = build_schedule("1f1b", 2, 1, 4)
    both = r"rank 0 at .*'receive'.*forward=False.*microbatch=0.*; rank 1 at .*'receive'.*microbatch=1"
    with pytest.raises(StuckError, match=both):
        check(traces(schedule, one_ahead), busy=True)
    check(traces(schedule, one_ahead), busy=False)


def test_at_use_is_not_enough_with_several_chunks():
    """The first rank's forwards would wait for a last rank that can't get rid of what goes around."""
    schedule = build_schedule("gpipe", 2, 2, 4)

    def at_use(schedule, rank):
        messages = [awaited(schedule, rank, action) for action in schedule.actions[rank]]
        return [() if message is None else (message,) for message in messages]

    with pytest.raises(StuckError):
        check(traces(schedule, at_use), busy=True)


def test_one_communicator_for_both_directions_mixes_them_up():
    schedule = build_schedule("1f1b", 2, 1, 4)
    mixed = [
        [Post("pair", (0, 1), e.sides) if isinstance(e, Post) else e for e in trace]
        for trace in traces(schedule, once_sent)
    ]
    with pytest.raises(StuckError):
        check(mixed, busy=False)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_message_is_posted_once_and_in_time(sizes):
    for schedule in all_schedules(*sizes):
        for plan in (one_ahead, once_sent):
            for rank in range(schedule.ranks):
                posted = set()
                for action, messages in zip(schedule.actions[rank], plan(schedule, rank), strict=True):
                    assert not posted & set(messages)
                    posted |= set(messages)
                    assert awaited(schedule, rank, action) in posted | {None}
                assert posted == {awaited(schedule, rank, a) for a in schedule.actions[rank]} - {None}


def test_plans_by_hand():
    schedule = build_schedule("1f1b", 2, 1, 2)  # F0 F1 B0 B1 and F0 B0 F1 B1
    forward, backward = ([Message(f, 0, m) for m in (0, 1)] for f in (True, False))
    assert once_sent(schedule, 0) == ((), (), (backward[0],), (backward[1],))
    assert once_sent(schedule, 1) == ((forward[0],), (forward[1],), (), ())
    assert one_ahead(schedule, 0) == ((), (backward[0],), (backward[1],), ())
    assert one_ahead(schedule, 1) == ((forward[0],), (forward[1],), (), ())


def test_a_schedule_that_stands_still_has_no_plan():
    lists = ((Action(Kind.BACKWARD, 0, 0),), (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)))
    with pytest.raises(ValueError, match="stands still"):
        once_sent(Schedule("wrong", 2, 1, 1, lists), 0)


def test_plans_are_made_once_for_all_steps():
    first, again = (build_schedule("1f1b", 4, 2, 8, group=None) for _ in range(2))
    assert first is again
    assert build_schedule("1f1b", 4, 2, 9, group=None) is not first
    assert once_sent(first, 1) is once_sent(again, 1)
    assert once_sent(first, 2) != once_sent(first, 1)


def collective(comm, what, like=4):
    return Post(comm, (0, 1), (Side(what, None, like),))


def test_collectives_must_come_in_the_same_order_on_all_ranks():
    one, two = collective("a", "sum"), collective("b", "gather")
    check([[one, two], [one, two]], busy=False)
    check([[one, WORK, two], [one, two]], busy=True)
    with pytest.raises(StuckError):
        check([[one, Wait(0), two], [two, Wait(0), one]], busy=False)
    with pytest.raises(StuckError):
        check([[one, WORK, two], [two, WORK, one]], busy=True)
    for other in ("gather", 5):
        with pytest.raises(MismatchError):
            check([[one], [collective("a", "gather") if other == "gather" else collective("a", "sum", 5)]], busy=False)
    with pytest.raises(MismatchError, match="not as many"):
        check([[one], []], busy=False)


def test_a_send_and_a_receive_posted_as_one_meet():
    def swap(peer):
        return Post("group", (0, 1), (Side("send", peer, 8), Side("receive", peer, 8)))

    check([[swap(1)], [swap(0)]], busy=True)
    apart = [[Post("group", (0, 1), (side,)) for side in swap(peer).sides] for peer in (1, 0)]
    with pytest.raises(StuckError):
        check(apart, busy=False)
