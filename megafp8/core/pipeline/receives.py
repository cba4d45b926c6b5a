"""When a rank starts to receive: which messages, before which action. Plans of a schedule, made from its lists alone.

Where sends never hold anything up, as on gloo, a receive is posted one action early, so that the message travels while
the rank computes. On NCCL a message is a kernel that waits on both GPUs until the other side has started its own, and
any CUDA call may wait for the whole device, such kernels included: loading a kernel, allocating, connecting. So there
a rank may hold back its next action until all that it has posted is over, and must never post what the other side can
only answer after that action. With receives one action early two ranks come to wait for each other already with two
stages: the last one awaits the next hidden states before it makes the gradient without which they don't come.
"""

from __future__ import annotations

from functools import lru_cache

from megafp8.core.pipeline.p2p import Message
from megafp8.core.pipeline.schedules import Action, Kind, Schedule

Plan = tuple[tuple[Message, ...], ...]
"""Of a rank: before each action, the messages that it starts to receive there, in this order."""


def awaited(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What has to arrive before a rank can run an action."""
    stage = schedule.stage(rank, action.chunk)
    if action.kind is Kind.FORWARD:
        return Message(True, stage - 1, action.microbatch) if stage > 0 else None
    if action.kind is Kind.WEIGHT or stage == schedule.stages - 1:
        return None
    return Message(False, stage, action.microbatch)


def produced(schedule: Schedule, rank: int, action: Action) -> Message | None:
    """What a rank sends after an action."""
    stage = schedule.stage(rank, action.chunk)
    if action.kind is Kind.FORWARD:
        return Message(True, stage, action.microbatch) if stage < schedule.stages - 1 else None
    if action.kind is Kind.WEIGHT or stage == 0:
        return None
    return Message(False, stage - 1, action.microbatch)


def one_ahead(schedule: Schedule, rank: int) -> Plan:
    """Every message is posted before the action in front of the one that needs it."""
    actions, known, plan = schedule.actions[rank], set(), []
    for place in range(len(actions)):
        near = [awaited(schedule, rank, action) for action in actions[place : place + 2]]
        plan.append(tuple(message for message in near if message is not None and message not in known))
        known.update(near)
    return tuple(plan)


@lru_cache(maxsize=4)
def once_sent(schedule: Schedule, rank: int) -> Plan:
    """A message is posted before the first action that its receiver starts after it was sent, if all ranks keep step.

    So every action that a rank starts finds its messages there, and all that it has posted is answered by actions that
    others can run before it goes on: no rank waits for itself, whatever holds it up meanwhile. Every rank comes to the
    same plan. Raises ValueError where the schedule itself stands still.
    """
    lists, ranks = schedule.actions, range(schedule.ranks)
    places: list[int] = [0] * schedule.ranks
    plans: list[list[tuple[Message, ...]]] = [[] for _ in ranks]
    on_their_way: list[list[Message]] = [[] for _ in ranks]
    there: set[Message | None] = {None}
    while any(place < len(actions) for place, actions in zip(places, lists, strict=True)):
        ready = []
        for r in (r for r in ranks if places[r] < len(lists[r])):
            arrived, on_their_way[r] = tuple(on_their_way[r]), []
            there.update(arrived)
            if places[r] == len(plans[r]):
                plans[r].append(arrived)
            else:  # it stood still in the last round
                plans[r][-1] += arrived
            if awaited(schedule, r, lists[r][places[r]]) in there:
                ready.append(r)
        if not ready:
            raise ValueError(f"schedule {schedule.name} stands still")
        for r in ready:
            message = produced(schedule, r, lists[r][places[r]])
            places[r] += 1
            if message is not None:
                on_their_way[message.ends(schedule.ranks)[1]].append(message)
    return tuple(plans[rank])
