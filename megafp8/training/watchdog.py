"""The watchdog: a job that hangs ends with the name of the rank that holds it up, and every rank's stack.

Each rank tells what it is at, and a thread of its own publishes that in the job's store. When a rank has not moved for
three quarters of `--distributed-timeout-minutes`, its thread dumps the stacks of all its threads, and says which ranks
are behind: those at an earlier iteration or phase than the others, or whose thread has fallen silent. The collective
itself fails at the full time and ends the process; a rank that is stuck elsewhere is ended `GRACE` seconds later, by
exit code `EXIT_HUNG`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch.distributed as dist

from megafp8.config import Config
from megafp8.parallel import ParallelContext

T = TypeVar("T")
EXIT_HUNG = 18
END = "watchdog/end"
"""The store's key, in a start of the job, under which a rank that ends says so."""
TELL_AT, GRACE = 0.75, 15.0
PHASES = ("data", "forward and backward", "update", "log", "evaluation", "save")
"""In the order of an iteration: who is at an earlier one is behind."""


class Store(Protocol):
    """A key-value store that all ranks share, such as the one of `torch.distributed`."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


class Watchdog:
    """A context manager: inside, the process is watched. `at(iteration, phase)` says that it moves."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store | None,
        timeout: float,
        *,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """timeout: seconds. store: None where there is one process, which nobody waits for: it is not watched."""
        self._rank, self._world, self._store, self._timeout, self._end = rank, world_size, store, timeout, end
        # torchrun's store may outlive ranks that it starts again, which shall not end for what ended the ones before.
        self._end_key = f"{END}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._place, self._moved = (0, 0), time.monotonic()
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None

    def at(self, iteration: int, phase: str) -> None:
        self._place, self._moved = (iteration, PHASES.index(phase)), time.monotonic()

    def passing(self, items: Iterable[T]) -> Iterator[T]:
        """The items; each that is asked for is a move within the phase."""
        for item in items:
            self._moved = time.monotonic()
            yield item

    def __enter__(self) -> Watchdog:
        if self._store is not None:
            self._moved = time.monotonic()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _watch(self) -> None:
        told = False
        interval = self._interval
        while not self._leaving.wait(interval):
            with _without_store():
                self._end_with_others()
            idle = time.monotonic() - self._moved
            with _without_store():
                self._store.set(f"watchdog/{self._rank}", json.dumps([*self._place, idle, time.time()]))
            if idle < TELL_AT * self._timeout:
                told = False
            elif not told:
                told = True
                self._tell(idle, interval)
            elif idle > self._timeout + GRACE:
                print(f"rank {self._rank}: hung, ended with exit code {EXIT_HUNG}", file=sys.stderr, flush=True)
                self._end(EXIT_HUNG)
                return

    @property
    def _interval(self) -> float:
        return min(10.0, self._timeout / 20)

    def stand_down(self) -> None:
        """This rank ends by itself: nobody shall end it before it has said why."""
        self._leaving.set()

    def end_all(self, code: int, reason: str) -> bool:
        """Before this rank ends by exit code `code`: lets the others end by it too, wherever they wait. Returns whether
        it is the first to say so."""
        if self._store is None:
            return True
        first = True
        with _without_store():
            first = not self._store.check([self._end_key])
            if first:
                self._store.set(self._end_key, json.dumps([code, reason]))
        self._let_others_read()
        return first

    def _let_others_read(self) -> None:
        if self._rank == 0:  # whose process may hold the store
            time.sleep(self._interval + 1.0)

    def _end_with_others(self) -> None:
        if self._store.check([self._end_key]):
            code, reason = json.loads(self._store.get(self._end_key))
            print(f"rank {self._rank}: ended, for {reason}", file=sys.stderr, flush=True)
            self._let_others_read()
            self._end(code)

    def _tell(self, idle: float, interval: float) -> None:
        time.sleep(interval)  # for the others to have published that they, too, don't move
        iteration, phase = self._place
        lines = [f"rank {self._rank} has been at iteration {iteration} ({PHASES[phase]}) for {idle:.0f} s"]
        with _without_store():
            lines.append(behind(self._places(), self._timeout))
        print("hung: " + "; ".join(lines) + ". Stacks of this rank:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    def _places(self) -> dict[int, tuple[int, int, float, float] | None]:
        found = {}
        for rank in range(self._world):
            key = f"watchdog/{rank}"
            found[rank] = tuple(json.loads(self._store.get(key))) if self._store.check([key]) else None
        return found


def behind(places: dict[int, tuple[int, int, float, float] | None], timeout: float) -> str:
    """Which ranks hold the others up. places: rank -> iteration, phase, seconds without a move, time of publication;
    None of a rank that has never published."""
    now = max((place[3] for place in places.values() if place is not None), default=0.0)
    silent = [rank for rank, place in places.items() if place is None or now - place[3] > max(5.0, timeout / 2)]
    if silent:
        return f"no sign of life from rank {', '.join(map(str, silent))}"
    at = {rank: place[:2] for rank, place in places.items()}
    first = min(at.values())
    late = [rank for rank, place in at.items() if place == first]
    where = f"iteration {first[0]} ({PHASES[first[1]]})"
    if len(late) == len(at):
        return f"all ranks are at {where}: see their stacks"
    return f"behind: rank {', '.join(map(str, late))}, at {where}, for which the others wait"


@contextmanager
def _without_store():
    """The store may be gone, with the rank that held it; what can be said without it is said."""
    try:
        yield
    except Exception as error:  # whatever a broken store raises
        print(f"watchdog: no word from other ranks ({type(error).__name__})", file=sys.stderr, flush=True)


def build_watchdog(config: Config, parallel: ParallelContext) -> Watchdog:
    """The watchdog of this process."""
    store = None
    if parallel.world_size > 1 and dist.is_initialized():
        shared = dist.distributed_c10d._get_default_store()
        store = shared.clone() if hasattr(shared, "clone") else shared  # a connection of its own
    timeout = 60.0 * config.parallel.distributed_timeout_minutes
    return Watchdog(parallel.rank, parallel.world_size, store, timeout)
