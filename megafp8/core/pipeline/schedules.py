"""Pipeline schedules as data: pure functions that say what each rank does, in which order.

The model is cut into `ranks * chunks` stages; rank r holds the stages r, r + ranks, r + 2 ranks, ... as its chunks 0,
1, 2, ... Every rank gets a list of actions, which the executor runs one by one and the planner draws:

    F  forward of a microbatch through a chunk        I  backward without the weight gradients of linears
    B  backward of a microbatch through a chunk       W  those weight gradients

Per chunk, microbatches go in order in F, B, I and W alike: gradients are added up in the order of one process, so that
a pipeline has its bits. Messages between two stages are sent in the order in which they are awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

GPIPE, ONE_F_ONE_B, ZERO_BUBBLE = SCHEDULES = ("gpipe", "1f1b", "zero-bubble")


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


@dataclass(frozen=True)
class Action:
    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        """E.g. `F2`, or `F2.1` for chunk 1."""
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, eq=False)
class Schedule:
    """actions: of each rank, in order. Made by `build_schedule` or `forward_only`, which give one object step after
    step: a large job's lists take tens of milliseconds."""

    name: str
    ranks: int
    chunks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def defers(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return any(a.kind is Kind.WEIGHT for a in self.actions[0])

    def stage(self, rank: int, chunk: int) -> int:
        return chunk * self.ranks + rank


@lru_cache(maxsize=4)
def build_schedule(name: str, ranks: int, chunks: int, microbatches: int, *, group: int | None = None) -> Schedule:
    """The training schedule `name`, one of SCHEDULES; with several chunks a rank it is interleaved.

    gpipe: all forwards, then all backwards (Huang et al. 2019). Holds every microbatch's activations.
    1f1b: one forward, one backward in turn (Narayanan et al. 2021, also interleaved): at most `ranks` microbatches.
    zero-bubble: 1f1b whose weight gradients wait and fill the bubble at the end (ZB-H1 of Qi et al. 2023).

    Args:
        group: least number of microbatches that go through one chunk before the next chunk's turn, `ranks` by
            default. What doesn't fill a round is spread over the others: a small last round would stand still.
    """
    lists = (rank_actions(name, rank, ranks, chunks, microbatches, group=group) for rank in range(ranks))
    return Schedule(name, ranks, chunks, microbatches, tuple(lists))


def rank_actions(
    name: str, rank: int, ranks: int, chunks: int, microbatches: int, *, group: int | None = None
) -> tuple[Action, ...]:
    """One rank's actions of `build_schedule`, which has the arguments."""
    assert name in SCHEDULES, name
    assert min(ranks, chunks, microbatches) >= 1, (ranks, chunks, microbatches)
    if name == GPIPE:
        return _gpipe(chunks, microbatches)
    rounds = max(1, microbatches // max(group or 0, ranks)) if chunks > 1 else 1
    size = -(-microbatches // rounds)
    return tuple(_alternating(rank, ranks, chunks, microbatches, size, name == ZERO_BUBBLE))


@lru_cache(maxsize=4)
def forward_only(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Evaluation: each microbatch through all chunks, `ranks` microbatches at a time."""
    order = tuple(Action(Kind.FORWARD, c, m) for c, m in _rounds(chunks, microbatches, ranks, forward=True))
    return Schedule("forward-only", ranks, chunks, microbatches, (order,) * ranks)


def _gpipe(chunks: int, microbatches: int) -> tuple[Action, ...]:
    forward = [Action(Kind.FORWARD, c, m) for c in range(chunks) for m in range(microbatches)]
    return (*forward, *(Action(Kind.BACKWARD, c, m) for c in reversed(range(chunks)) for m in range(microbatches)))


def _rounds(chunks: int, microbatches: int, size: int, *, forward: bool) -> Iterator[tuple[int, int]]:
    """(chunk, microbatch) in the order of forward or of backward: a round's microbatches chunk by chunk."""
    for start in range(0, microbatches, size):
        for chunk in range(chunks) if forward else reversed(range(chunks)):
            for microbatch in range(start, min(start + size, microbatches)):
                yield chunk, microbatch


def _alternating(
    rank: int, ranks: int, chunks: int, microbatches: int, size: int, zero_bubble: bool
) -> Iterator[Action]:
    """1F1B and zero-bubble: warm-up of forwards, then a forward and a backward in turn, then the other backwards.

    Interleaved 1F1B warms up with two forwards more for each rank that follows: so many steps pass until the first
    gradient comes back. In zero-bubble a weight gradient waits until `rank` more have joined it: gradients reach the
    ranks before sooner, and the ranks that follow fill with them the time in which they would have waited at the end.
    """
    total = chunks * microbatches
    steps_a_rank = 2 if chunks > 1 and not zero_bubble else 1
    warm_up = min(total, (chunks - 1) * size + steps_a_rank * (ranks - 1 - rank))
    forward = [Action(Kind.FORWARD, c, m) for c, m in _rounds(chunks, microbatches, size, forward=True)]
    backward = list(_rounds(chunks, microbatches, size, forward=False))
    kind, lag = (Kind.INPUT, rank) if zero_bubble else (Kind.BACKWARD, total)
    yield from forward[:warm_up]
    for turn, (chunk, microbatch) in enumerate(backward):
        yield from forward[warm_up + turn : warm_up + turn + 1]
        yield Action(kind, chunk, microbatch)
        if turn >= lag:
            yield Action(Kind.WEIGHT, *backward[turn - lag])
    if zero_bubble:
        for chunk, microbatch in backward[max(0, total - lag) :]:
            yield Action(Kind.WEIGHT, chunk, microbatch)


@dataclass(frozen=True)
class Costs:
    """Time of one chunk's forward, of the two halves of its backward, and of a message, in any unit."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    message: float = 0.0

    def of(self, kind: Kind) -> float:
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.input + self.weight,
            Kind.INPUT: self.input,
            Kind.WEIGHT: self.weight,
        }[kind]


@dataclass(frozen=True)
class Timed:
    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """When every rank runs its actions, each as soon as its rank is free and its message there."""

    schedule: Schedule
    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def length(self) -> float:
        return max(timed.stop for rank in self.ranks for timed in rank)

    def idle(self, rank: int) -> float:
        """Share of the time in which the rank has nothing to do."""
        return 1 - sum(timed.stop - timed.start for timed in self.ranks[rank]) / self.length

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle."""
        return sum(self.idle(rank) for rank in range(len(self.ranks))) / len(self.ranks)


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs] = Costs()) -> Timeline:
    """Runs a schedule on paper. Raises ValueError where it can't go on: an action waits for one that never comes.

    costs: of every stage, or of each in order; a message's are the first one's.
    """
    costs = [costs] * schedule.stages if isinstance(costs, Costs) else costs
    done: dict[tuple[str, int, int], float] = {}  # (F or B, stage, microbatch) -> when it ended
    clock, next_one = [0.0] * schedule.ranks, [0] * schedule.ranks
    timed: list[list[Timed]] = [[] for _ in range(schedule.ranks)]
    while any(n < len(actions) for n, actions in zip(next_one, schedule.actions, strict=True)):
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while next_one[rank] < len(actions):
                action = actions[next_one[rank]]
                ready = _ready(schedule, rank, action, done.get, costs[0].message)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                stage = schedule.stage(rank, action.chunk)
                clock[rank] = start + costs[stage].of(action.kind)
                timed[rank].append(Timed(action, start, clock[rank]))
                half = {Kind.FORWARD: "F", Kind.WEIGHT: "W"}.get(action.kind, "B")
                done[half, stage, action.microbatch] = clock[rank]
                next_one[rank] += 1
                progress = True
        if not progress:
            stuck = [str(a[n]) for n, a in zip(next_one, schedule.actions, strict=True) if n < len(a)]
            raise ValueError(f"schedule {schedule.name} stands still before {', '.join(stuck)}")
    return Timeline(schedule, tuple(map(tuple, timed)))


def _ready(
    schedule: Schedule, rank: int, action: Action, done: Callable[[tuple[str, int, int]], float | None], message: float
) -> float | None:
    """When what the action waits for has come; None while it has not."""
    stage, m = schedule.stage(rank, action.chunk), action.microbatch
    if action.kind is Kind.WEIGHT:
        return done(("B", stage, m))
    if action.kind is Kind.FORWARD:
        needed, far = ("F", stage - 1, m), stage > 0
    else:
        needed, far = ("B", stage + 1, m), stage < schedule.stages - 1
        if done(("F", stage, m)) is None:
            return None
    if not far:
        return 0.0
    when = done(needed)
    return None if when is None else when + message * (schedule.ranks > 1)


def peak_microbatches(actions: tuple[Action, ...]) -> int:
    """Most (chunk, microbatch) pairs whose activations a rank holds at once: from F to B or I."""
    return _peak(actions, {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: -1})


def peak_deferred(actions: tuple[Action, ...]) -> int:
    """Most (chunk, microbatch) pairs whose weight gradients wait at once: from I to W."""
    return _peak(actions, {Kind.INPUT: 1, Kind.WEIGHT: -1})


def _peak(actions: tuple[Action, ...], changes: dict[Kind, int]) -> int:
    held = peak = 0
    for action in actions:
        held += changes.get(action.kind, 0)
        peak = max(peak, held)
    return peak
