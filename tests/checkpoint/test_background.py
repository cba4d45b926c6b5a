"""Saving beside training: the state of its moment, one at a time, errors told, memory kept."""

import errno
import gc
import os
import shutil
import threading

import psutil
import pytest
import torch

from megafp8.checkpoint import (
    BackgroundSaver,
    CheckpointWriter,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    tensor_file,
)
from megafp8.checkpoint.background import HostCopy
from megafp8.params import StateItem
from tests.checkpoint.helpers import assert_equal_items, make_items, poisoned


class Gate:
    """Holds the disk back until it is opened, then lets it go on, or fail."""

    def __init__(self, monkeypatch):
        self.reached, self.open, self.error = threading.Event(), threading.Event(), None
        blocks = tensor_file._blocks

        def held(tensor):
            self.reached.set()
            assert self.open.wait(300)
            if self.error is not None:
                raise self.error
            return blocks(tensor)

        monkeypatch.setattr(tensor_file, "_blocks", held)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


def test_the_state_of_its_moment_is_saved_while_training_goes_on(tmp_path, gate):
    saver, items = BackgroundSaver(), make_items(1)
    assert saver.start(CheckpointWriter(tmp_path, 10, {"x": 1}), items)
    assert gate.reached.wait(300)
    assert saver.busy
    assert not saver.written
    for item in items.values():  # the next step
        item.tensor.zero_()
    assert find_checkpoint(tmp_path) is None
    gate.open.set()
    directory = saver.finish()
    assert not saver.busy
    found = find_checkpoint(tmp_path)
    assert (found.directory, found.metadata["x"]) == (directory, 1)
    wanted = poisoned(items)
    load_checkpoint(directory, wanted)
    assert_equal_items(wanted, make_items(1))


def test_the_same_files_as_a_save_at_once(tmp_path):
    items = make_items(1)
    one = save_checkpoint(tmp_path / "a", 10, items, {"x": 1})
    saver = BackgroundSaver()
    saver.start(CheckpointWriter(tmp_path / "b", 10, {"x": 1}), items)
    other = saver.finish()
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_ends_the_save_not_the_run(tmp_path, gate, caplog, code):
    saver = BackgroundSaver()
    save_checkpoint_at_once = saver.start(CheckpointWriter(tmp_path, 10), make_items(1))
    assert save_checkpoint_at_once
    gate.error = OSError(code, os.strerror(code))
    gate.open.set()
    assert saver.finish() is None
    assert os.strerror(code) in caplog.text
    assert "iteration 10" in caplog.text
    assert list(tmp_path.iterdir()) == []
    gate.error = None
    assert saver.start(CheckpointWriter(tmp_path, 20), make_items(2))
    assert saver.finish() is not None
    assert find_checkpoint(tmp_path).iteration == 20


def test_a_place_that_is_none_is_told_at_once(tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    saver = BackgroundSaver()
    assert not saver.start(CheckpointWriter(tmp_path / "file", 10), make_items(1))
    assert not saver.busy
    assert "was not saved" in caplog.text


def test_our_own_mistakes_surface(tmp_path, gate):
    saver = BackgroundSaver()
    saver.start(CheckpointWriter(tmp_path, 10), make_items(1))
    gate.error = ZeroDivisionError("a bug")
    gate.open.set()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        saver.finish()
    assert find_checkpoint(tmp_path) is None


def test_one_save_at_a_time(tmp_path, gate):
    saver = BackgroundSaver()
    saver.start(CheckpointWriter(tmp_path, 10), make_items(1))
    with pytest.raises(AssertionError):
        saver.start(CheckpointWriter(tmp_path, 20), make_items(2))
    gate.open.set()
    saver.finish()


def test_any_shape_stride_and_dtype_is_copied():
    dtypes = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.int64, torch.bool)
    tensors = [torch.arange(15, dtype=torch.uint8).reshape(3, 5).to(torch.float32).to(dtype) for dtype in dtypes]
    tensors += [torch.tensor(7), torch.zeros(0, 3), torch.randn(4, 6).t(), torch.randn(8, 8)[::2, 1::3]]
    host = HostCopy(pinned=False)
    copies = host.copy(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert copy.is_contiguous()
        same = copy.contiguous().reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(*same)
        assert copy.data_ptr() % 64 == 0 or copy.numel() == 0
    before = host.nbytes
    assert host.copy(tensors)[0].data_ptr() == copies[0].data_ptr()
    assert host.nbytes == before


def test_memory_stays_flat_over_saves(tmp_path):
    """CASES 89: one copy, kept from the start."""
    saver = BackgroundSaver()
    items = {f"optimizer/{i}": StateItem.whole(torch.randn(100_000)) for i in range(8)}
    assert saver.prepare(items) >= 8 * 400_000
    process, resident = psutil.Process(), []
    for iteration in range(1, 14):
        assert saver.start(CheckpointWriter(tmp_path, iteration, retain_interval=1000), items)
        assert saver.finish() is not None
        gc.collect()
        resident.append(process.memory_info().rss)
    assert resident[-1] <= resident[2] * 1.02
    assert saver.prepare(items) == saver.prepare(items)


def test_deleting_the_one_before_takes_no_time_of_training(tmp_path, monkeypatch):
    """Files of a large checkpoint take long to delete; the next save waits for that, the step does not."""
    rmtree, gate = shutil.rmtree, threading.Event()

    def slow(path, *args, **kwargs):
        assert gate.wait(300)
        return rmtree(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", slow)
    saver = BackgroundSaver()
    for iteration in (1, 2):
        assert saver.start(CheckpointWriter(tmp_path, iteration, retain_interval=100), make_items(iteration))
        assert saver.finish() is not None
    assert sorted(p.name for p in tmp_path.iterdir()) == [".deleted-iter_0000001", "iter_0000002", "latest"]
    gate.set()
    assert saver.start(CheckpointWriter(tmp_path, 3, retain_interval=100), make_items(3))
    assert not (tmp_path / ".deleted-iter_0000001").exists()
    assert saver.finish() is not None
    saver._sweeper.join()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000003", "latest"]
