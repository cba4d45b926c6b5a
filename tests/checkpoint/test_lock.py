"""Two runs that save into one directory."""

import os
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from megafp8.checkpoint import BackgroundSaver, CheckpointWriter, find_checkpoint, save_checkpoint
from megafp8.checkpoint.directory import saved_iterations
from megafp8.checkpoint.lock import LOCK_FILE, SaveLock
from tests.checkpoint.helpers import make_items


def hold(pipe, save: str) -> None:
    """Takes the lock, says so, and keeps it until the process is killed."""
    lock = SaveLock(Path(save))
    pipe.send("held")
    time.sleep(600)
    lock.release()


@pytest.fixture
def holder(tmp_path):
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(theirs, str(tmp_path)), daemon=True)
    process.start()
    assert ours.recv() == "held"
    yield process
    process.kill()
    process.join()


def test_another_process_is_refused_until_the_first_one_is_gone(tmp_path, holder, caplog):
    partial = tmp_path / ".partial-iter_0000007"
    partial.mkdir()
    assert save_checkpoint(tmp_path, 8, make_items(), {}) is None
    assert "another run is saving into" in caplog.text
    assert "--save of its own" in caplog.text
    assert partial.exists(), "the other run's unfinished work was removed"
    holder.kill()
    holder.join()
    assert save_checkpoint(tmp_path, 8, make_items(), {}) is not None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000008", "latest"]


def test_a_save_beside_one_in_the_background(tmp_path):
    """Also within one process."""
    saver = BackgroundSaver()
    assert saver.start(CheckpointWriter(tmp_path, 1), make_items())
    assert save_checkpoint(tmp_path, 2, make_items(), {}) is None
    assert saver.finish() is not None
    assert save_checkpoint(tmp_path, 3, make_items(), {}) is not None
    assert saved_iterations(tmp_path) == [1, 3]


def test_loading_needs_no_lock(tmp_path):
    save_checkpoint(tmp_path, 1, make_items(), {})
    lock = SaveLock(tmp_path)
    assert find_checkpoint(tmp_path).iteration == 1
    lock.release()
    lock.release()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_lock_taken_between_opening_and_locking_is_a_new_one(tmp_path, monkeypatch):
    """The file that was opened may be removed by its holder before it can be locked: then it locks nothing."""
    import fcntl

    first, flock, calls = SaveLock(tmp_path), fcntl.flock, []

    def late(descriptor, operation):
        if not calls:
            calls.append(first)
            first.release()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    second = SaveLock(tmp_path)
    assert os.path.samestat(os.fstat(second._descriptor), (tmp_path / LOCK_FILE).stat())
    with pytest.raises(BlockingIOError):
        SaveLock(tmp_path)
    second.release()


@pytest.mark.parametrize("missing", ["ENOLCK", "ENOTSUP"])
def test_file_systems_without_locks_are_saved_to_all_the_same(tmp_path, monkeypatch, missing):
    import errno
    import fcntl

    def unknown(*_):
        raise OSError(getattr(errno, missing), missing)

    monkeypatch.setattr(fcntl, "flock", unknown)
    assert save_checkpoint(tmp_path, 1, make_items(), {}) is not None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000001", "latest"]
