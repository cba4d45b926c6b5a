"""NCCL's rules on paper: which of what ranks have posted can ever end.

Each rank has a trace: what it posts, what it waits for and where it runs something, in order. Then

- a communicator runs what a rank posts on it in that order, sends, receives and collectives alike;
- a message ends once both sides have come to it, a collective once all ranks have; they must want the same;
- what is posted starts after the work before it on the rank's stream, and that after what it waits for;
- busy: before a rank runs anything, its device may wait for all that was posted (a kernel that is loaded, memory that
  is allocated, a connection that is made).

    check(traces, busy=True)      raises StuckError or MismatchError
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from megafp8.core.pipeline.p2p import Message
from megafp8.core.pipeline.receives import awaited, produced
from megafp8.core.pipeline.schedules import Schedule


class MismatchError(Exception):
    """Two ranks that meet want different things."""


class StuckError(Exception):
    """Ranks wait for each other."""


@dataclass(frozen=True)
class Side:
    """what: "send", "receive" or a collective's name; peer: the other rank of a message; like: what must agree."""

    what: str
    peer: int | None
    like: Any


@dataclass(frozen=True)
class Post:
    """comm: the communicator, alike on all its ranks; sides: more than one where they are posted as one kernel."""

    comm: Hashable
    members: tuple[int, ...]
    sides: tuple[Side, ...]


@dataclass(frozen=True)
class Wait:
    """post: what is waited for, as its number among the rank's posts."""

    post: int


WORK = "work"
"""The rank runs something."""

Trace = list[Post | Wait | str]
Place = tuple[int, int]
"""A post: its rank, and its number there."""


def check(traces: Sequence[Trace], *, busy: bool) -> None:
    """Runs the traces of all ranks. StuckError tells the first thing on each rank that never ends."""
    posts = [[event for event in trace if isinstance(event, Post)] for trace in traces]
    partners = _partners(posts)
    lists = [_needs(trace, rank, busy=busy) for rank, trace in enumerate(traces)]
    waiting = {(rank, n): need for rank, needs in enumerate(lists) for n, need in enumerate(needs)}
    ended: set[Place] = set()
    while True:
        free = {post for post, need in waiting.items() if need <= ended}
        over = _together(free, partners)
        if not over:
            break
        ended |= over
        for post in over:
            del waiting[post]
    if waiting:
        first = {rank: min(n for r, n in waiting if r == rank) for rank in sorted({rank for rank, _ in waiting})}
        told = "; ".join(f"rank {rank} at {posts[rank][n].sides} on {posts[rank][n].comm}" for rank, n in first.items())
        raise StuckError(f"{len(waiting)} of {len(waiting) + len(ended)} posts never end: {told}")


def _needs(trace: Trace, rank: int, *, busy: bool) -> list[set[Place]]:
    """Of each post, the rank's earlier ones that must have ended before it starts."""
    found: list[set[Place]] = []
    before: set[Place] = set()
    last: dict[Hashable, Place] = {}
    for event in trace:
        if isinstance(event, Wait):
            before.add((rank, event.post))
        elif isinstance(event, Post):
            own = (rank, len(found))
            found.append(before | ({last[event.comm]} if event.comm in last else set()))
            last[event.comm] = own
        elif busy:
            before.update((rank, n) for n in range(len(found)))
    return found


def _partners(posts: list[list[Post]]) -> dict[Place, set[Place]]:
    """Of each post, those of other ranks that it meets."""
    queues: dict[tuple, list[tuple[int, int, Any]]] = defaultdict(list)
    members: dict[tuple, set[tuple]] = {}
    for rank, own in enumerate(posts):
        for n, post in enumerate(own):
            for side in post.sides:
                if side.peer is None:
                    key = (post.comm, rank, None)
                    members[post.comm, "all"] = {(post.comm, member, None) for member in post.members}
                    queues[key].append((rank, n, (side.what, side.like)))
                else:
                    ends = (rank, side.peer) if side.what == "send" else (side.peer, rank)
                    members[post.comm, ends] = {(post.comm, *ends, what) for what in ("send", "receive")}
                    queues[post.comm, *ends, side.what].append((rank, n, side.like))
    partners: dict[Place, set[Place]] = defaultdict(set)
    for meeting, keys in members.items():
        lengths = {key: len(queues[key]) for key in keys}
        if len(set(lengths.values())) > 1:
            raise MismatchError(f"{meeting}: not as many on each side, {lengths}")
        for together in zip(*(queues[key] for key in sorted(keys, key=repr)), strict=True):
            if len({like for *_, like in together}) > 1:
                raise MismatchError(f"{meeting}: {together}")
            for rank, n, _ in together:
                partners[rank, n] |= {(r, k) for r, k, _ in together} - {(rank, n)}
    return partners


def _together(free: set[Place], partners: dict[Place, set[Place]]) -> set[Place]:
    """Those of `free` all of whose partners, and theirs, are free."""
    over = set(free)
    while lost := {post for post in over if not partners[post] <= over}:
        over -= lost
    return over


def trace_of(schedule: Schedule, rank: int, plan: Sequence[Sequence[Message]], *, pairs: bool) -> Trace:
    """What the executor does with a plan of receives, for check(). pairs: a communicator a pair of ranks and group, as
    torch makes them when first used; otherwise a group's one, as with groups that are bound to a device."""
    trace: Trace = []
    numbers: dict[Message, int] = {}
    leaving: Message | None = None

    def post(message: Message, what: str) -> None:
        source, target = message.ends(schedule.ranks)
        peer = target if what == "send" else source
        group = (message.forward, message.wraps(schedule.ranks))
        comm = (group, *sorted((source, target))) if pairs else group
        numbers[message] = len(numbers)
        trace.append(Post(comm, tuple(range(schedule.ranks)), (Side(what, peer, message),)))

    for place, action in enumerate(schedule.actions[rank]):
        if leaving is not None:
            post(leaving, "send")
        for message in plan[place]:
            post(message, "receive")
        message = awaited(schedule, rank, action)
        trace += [Wait(numbers[message])] if message is not None else []
        trace.append(WORK)
        leaving = produced(schedule, rank, action)
    if leaving is not None:
        post(leaving, "send")
    return [*trace, WORK]
