"""Who holds a hung job up: the verdict, and a job whose rank is really stuck."""

import threading
import time

import pytest

from megafp8.training import watchdog
from megafp8.training.watchdog import Watchdog, behind


def place(iteration, phase, at=100.0):
    return iteration, phase, 9.0, at


def test_the_rank_at_an_earlier_phase_or_iteration_is_behind():
    assert "rank 2, at iteration 7 (data)" in behind({0: place(7, 1), 1: place(7, 1), 2: place(7, 0)}, 10)
    assert "rank 0, at iteration 6 (save)" in behind({0: place(6, 5), 1: place(7, 1)}, 10)


def test_a_silent_rank_is_named_first():
    places = {0: place(7, 1), 1: None, 2: place(9, 1, at=20.0)}
    assert behind(places, 10) == "no sign of life from rank 1, 2"


def test_when_all_are_alike_their_stacks_have_to_tell():
    assert "all ranks are at iteration 7 (update)" in behind({0: place(7, 2), 1: place(7, 2)}, 10)


class Clock:
    """Time that moves when the test says so, whatever a busy machine does; naps are real."""

    time, sleep = staticmethod(time.time), staticmethod(time.sleep)

    def __init__(self):
        self.seconds = 0.0

    def monotonic(self):
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


class Shelf(dict):
    """A store within one process."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


def stuck_in_the_loader(event):
    event.wait(300)


def test_both_ranks_dump_and_are_ended(capfd, clock):
    """Two ranks of a job, as threads: rank 1 is stuck in its data, rank 0 waits for it."""
    store, ended, event = Shelf(), [], threading.Event()
    stuck = threading.Thread(target=stuck_in_the_loader, args=(event,))
    stuck.start()
    with Watchdog(0, 2, store, 4.0, end=ended.append) as waits, Watchdog(1, 2, store, 4.0, end=ended.append) as loads:
        waits.at(3, "forward and backward")
        loads.at(3, "data")
        clock.seconds = 100.0
        while len(ended) < 2:
            time.sleep(0.05)
    event.set()
    stuck.join()
    err = capfd.readouterr().err
    assert "hung: rank 0 has been at iteration 3 (forward and backward)" in err
    assert "behind: rank 1, at iteration 3 (data)" in err
    assert "stuck_in_the_loader" in err, "the stack of every thread"
    assert ended == [watchdog.EXIT_HUNG] * 2


def test_who_moves_is_left_alone(capfd, clock):
    ended = []
    with Watchdog(0, 1, Shelf(), 1.0, end=ended.append) as dog:
        for i in range(20):
            dog.at(i, "update")
            clock.seconds += 0.6
            time.sleep(0.05)
    assert "hung" not in capfd.readouterr().err
    assert not ended


def test_one_process_is_not_watched():
    with Watchdog(0, 1, None, 0.1) as dog:
        assert dog._thread is None
