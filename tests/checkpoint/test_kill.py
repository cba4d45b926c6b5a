"""kill -9 at random moments of saves, at once and in the background: no complete checkpoint is ever lost.

The saver writes a line before and after each step of a save. A kill counts only when the last line says that a save
was going on; the rest of the log says which step it was in, and the directory what lay there at that moment.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import BackgroundSaver, CheckpointWriter, find_checkpoint, load_checkpoint, save_checkpoint
from megafp8.checkpoint.directory import saved_iterations
from megafp8.params import StateItem

SIZE, TENSORS, RETAIN = 40_000, 3, 3


def saver(pipe, save: str, mode: str, first: int) -> None:
    """Saves one round after another, for ever; runs in a process of its own."""
    torch.set_num_threads(1)
    background = BackgroundSaver()
    items = {f"model/{i}": StateItem.whole(torch.zeros(SIZE)) for i in range(TENSORS)}

    def say(word: str, number: int) -> None:
        pipe.send_bytes(f"{word} {number}".encode())

    for number in range(first, 10**6):
        for item in items.values():
            item.tensor.fill_(number)
        iteration = (number - 1) % 7 + 1  # also replaces checkpoints
        say("begin", number)
        if mode == "async":
            writer = CheckpointWriter(save, iteration, {"round": number}, retain_interval=RETAIN)
            assert background.start(writer, items)
            say("training", number)
            for item in items.values():
                item.tensor.fill_(-1)  # the next step, while the copy is written
            done = background.finish()
        else:
            done = save_checkpoint(save, iteration, items, {"round": number}, retain_interval=RETAIN)
        assert done is not None
        say("end", number)


@dataclass
class Log:
    """The kills that fell inside a save, and what they met."""

    inside: int = 0
    outside: int = 0
    steps: Counter = field(default_factory=Counter)
    found: Counter = field(default_factory=Counter)


def one_kill(save: Path, mode: str, rng: random.Random, first: int) -> list[tuple[str, int]]:
    """Runs the saver, kills it some time after the beginning of a save, and returns its log."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=saver, args=(theirs, str(save), mode, first), daemon=True)
    process.start()
    theirs.close()
    lines: list[tuple[str, int]] = []

    def read() -> bool:
        try:
            word, number = ours.recv_bytes().decode().split()
        except (EOFError, OSError):
            return False
        lines.append((word, int(number)))
        return True

    wanted, took, begun = rng.randint(1, 3), 0.01, 0.0
    while wanted:
        assert read(), "the saver ended by itself"
        if lines[-1][0] == "begin":
            begun, wanted = time.monotonic(), wanted - 1
        elif lines[-1][0] == "end":
            took = time.monotonic() - begun
    time.sleep(rng.random() * took)
    process.kill()
    while read():
        pass
    process.join()
    return lines


def value_of(directory: Path) -> float:
    """The one value that all elements of a checkpoint have."""
    wanted = {f"model/{i}": StateItem.whole(torch.full((SIZE,), -77.0)) for i in range(TENSORS)}
    load_checkpoint(directory, wanted)
    (value,) = {float(v) for item in wanted.values() for v in item.tensor.unique()}
    return value


def what_lies_there(save: Path) -> str:
    """Of unfinished work."""
    partial = [p for p in save.glob(".partial-*") if p.is_dir()]
    files = sorted(f.name.split("-")[0] for p in partial for f in p.iterdir())
    hidden = {p.name.split("-")[0] for p in save.iterdir() if p.name.startswith((".replaced", ".deleted", ".latest"))}
    found = sorted(hidden) + ["partial with " + (", ".join(files) or "nothing")] * len(partial)
    return " ".join(found) or ("the lock alone" if (save / ".lock").exists() else "nothing")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_kill_9_inside_a_save_loses_nothing(tmp_path, kills, mode):
    rng, log, last = random.Random(kills), Log(), 0
    while log.inside < kills:
        assert log.outside < 3 * kills + 20, "kills hardly ever fall inside a save"
        lines = one_kill(tmp_path, mode, rng, last + 1)
        word, number = lines[-1]
        inside = word != "end"
        log.inside, log.outside = log.inside + inside, log.outside + (not inside)
        if inside:
            log.steps[word] += 1
            log.found[what_lies_there(tmp_path)] += 1
        last = max([last, *(n for w, n in lines if w == "end")])
        found = find_checkpoint(tmp_path)
        if found is None:
            assert last == 0, "every checkpoint is gone"
            continue
        value = value_of(found.directory)
        assert value == found.metadata["round"]
        assert last <= value <= number, "a save that had ended was lost"
        last = int(value)
        for step in saved_iterations(tmp_path):  # whatever counts as complete loads
            other = find_checkpoint(tmp_path, step)
            assert value_of(other.directory) == other.metadata["round"]
    print(f"\n{mode}: {log.inside} kills inside a save, {log.outside} more outside; last said: {dict(log.steps)}")
    for what, count in log.found.most_common():
        print(f"  {count} x {what}")
