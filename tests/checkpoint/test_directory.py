"""Publishing, interruption, retention, a full disk, memory."""

import errno
import gc
import os

import psutil
import pytest
import torch

from megafp8.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, tensor_file
from megafp8.checkpoint.directory import latest_iteration, saved_iterations
from megafp8.checkpoint.index import group_of
from megafp8.params import StateItem
from tests.checkpoint.helpers import assert_equal_items, make_items, poisoned


def load(save, step=None):
    found = find_checkpoint(save, step)
    wanted = poisoned(make_items())
    load_checkpoint(found.directory, wanted)
    return found, wanted


def test_latest_is_the_last_one_saved(tmp_path):
    for iteration in (10, 20):
        save_checkpoint(tmp_path, iteration, make_items(iteration), {})
    assert (tmp_path / "latest").read_text() == "iter_0000020\n"
    found, wanted = load(tmp_path)
    assert found.iteration == 20
    assert_equal_items(wanted, make_items(20))
    assert_equal_items(load(tmp_path, 10)[1], make_items(10))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_latest_may_be_edited_and_falls_back_when_it_names_nothing(tmp_path):
    for iteration in (10, 20):
        save_checkpoint(tmp_path, iteration, make_items(iteration), {})
    for content, expected in (("iter_0000010", 10), ("iter_0000030", 20), ("../x", 20), ("", 20), ("\xff\xfe", 20)):
        (tmp_path / "latest").write_text(content)
        assert latest_iteration(tmp_path) == expected
    (tmp_path / "latest").unlink()
    assert latest_iteration(tmp_path) == 20


def test_an_unknown_step_lists_what_is_there(tmp_path):
    save_checkpoint(tmp_path, 10, make_items(), {})
    with pytest.raises(ValueError, match=r"--ckpt-step 11.*\[10\]"):
        find_checkpoint(tmp_path, 11)


def test_a_directory_without_checkpoints_starts_a_new_run(tmp_path):
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "none") is None


def test_a_checkpoint_itself_can_be_named(tmp_path):
    directory = save_checkpoint(tmp_path, 10, make_items(), {})
    save_checkpoint(tmp_path, 20, make_items(), {})
    assert find_checkpoint(directory).iteration == 10


def test_an_iteration_saved_again_is_replaced(tmp_path):
    save_checkpoint(tmp_path, 10, make_items(1), {})
    save_checkpoint(tmp_path, 10, make_items(2), {})
    assert_equal_items(load(tmp_path)[1], make_items(2))
    assert saved_iterations(tmp_path) == [10]


@pytest.mark.parametrize(
    ("interval", "kept"), [(None, [10, 20, 30, 40, 50]), (20, [20, 40, 50]), (100, [50]), (10, [10, 20, 30, 40, 50])]
)
def test_retain_interval_keeps_multiples_and_the_newest(tmp_path, interval, kept):
    for iteration in (10, 20, 30, 40, 50):
        save_checkpoint(tmp_path, iteration, make_items(), {}, retain_interval=interval)
    assert saved_iterations(tmp_path) == kept


def test_interrupted_work_is_skipped_and_cleaned(tmp_path):
    directory = save_checkpoint(tmp_path, 10, make_items(10), {})
    save_checkpoint(tmp_path, 20, make_items(20), {})
    partial = tmp_path / ".partial-iter_0000030"
    partial.mkdir()
    (partial / "model-00000.safetensors").write_bytes(b"half")
    directory.rename(tmp_path / ".deleted-iter_0000010")
    (tmp_path / "iter_0000020").rename(tmp_path / ".replaced-iter_0000020")  # killed between two renames
    assert find_checkpoint(tmp_path).iteration == 20
    assert partial.exists(), "a load must not disturb a save that may be running"
    save_checkpoint(tmp_path, 40, make_items(40), {})
    assert saved_iterations(tmp_path) == [20, 40]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_ends_the_save_not_the_run(tmp_path, monkeypatch, caplog, code):
    save_checkpoint(tmp_path, 10, make_items(10), {})
    blocks = tensor_file._blocks

    def failing(tensor):
        yield from list(blocks(tensor))[:1]
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tensor_file, "_blocks", failing)
    assert save_checkpoint(tmp_path, 20, make_items(20), {}) is None
    assert os.strerror(code) in caplog.text
    assert "iteration 20" in caplog.text
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert find_checkpoint(tmp_path).iteration == 10
    assert save_checkpoint(tmp_path, 30, make_items(30), {}) is not None


def test_a_really_full_disk(tmp_path):
    """/dev/full refuses every byte: the writer meets the kernel's own error."""
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "wb", buffering=0) as full:
        tensor_file.ChecksumWriter(full).write(b"x")


def test_what_is_not_json_is_our_own_mistake(tmp_path):
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 10, make_items(), {"args": object()})
    assert find_checkpoint(tmp_path) is None


class Killed(BaseException):
    """Ends a save like a kill: nothing catches it."""


def killed_at(monkeypatch, count):
    """From the `count`-th change of names or fsync on, every one raises Killed instead."""
    done = 0

    def dying(call):
        def run(*args, **kwargs):
            nonlocal done
            done += 1
            if done >= count:
                raise Killed
            return call(*args, **kwargs)

        return run

    for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))


@pytest.mark.parametrize(("iteration", "retain"), [(20, None), (20, 100), (30, None), (30, 100)])
def test_a_kill_at_any_point_of_a_save_loses_nothing(tmp_path, monkeypatch, iteration, retain):
    """Every point at once: a save that replaces, one that adds, each with and without deleting the previous one."""
    for count in range(1, 100):
        save = tmp_path / str(count)
        for old in (10, 20):
            save_checkpoint(save, old, make_items(old), {})
        finished = True
        with monkeypatch.context() as patch:
            killed_at(patch, count)
            try:
                save_checkpoint(save, iteration, make_items(99), {}, retain_interval=retain)
            except Killed:
                finished = False
        found, wanted = load(save)
        if finished or found.iteration == 30:
            assert_equal_items(wanted, make_items(99))
        else:
            assert any(
                torch.equal(wanted["model/norm.weight"].tensor, make_items(v)["model/norm.weight"].tensor)
                for v in (20, 99)
            )
        assert_equal_items(load(save, 10)[1], make_items(10))
        for step in saved_iterations(save):
            load(save, step)
        assert save_checkpoint(save, 40, make_items(40), {}) is not None
        assert_equal_items(load(save)[1], make_items(40))
        assert [p.name for p in save.iterdir() if p.name.startswith(".")] == []
        if finished:
            assert count > 12
            return
    pytest.fail("the save never finished")


def test_saving_the_latest_again_does_not_delete_it(tmp_path):
    for seed in (1, 2):
        assert save_checkpoint(tmp_path, 15, make_items(seed), {}, retain_interval=10).is_dir()
    assert_equal_items(load(tmp_path)[1], make_items(2))


def test_memory_and_size_stay_flat_over_saves(tmp_path):
    """CASES 89."""
    items = {f"optimizer/{i}": StateItem.whole(torch.randn(100_000)) for i in range(8)}
    process = psutil.Process()
    sizes, resident = [], []
    for iteration in range(1, 13):
        directory = save_checkpoint(tmp_path, iteration, items, {}, retain_interval=1000)
        load_checkpoint(directory, items)
        gc.collect()
        sizes.append(sum(p.stat().st_size for p in directory.glob("*.safetensors")))
        resident.append(process.memory_info().rss)
    assert len(set(sizes)) == 1
    assert resident[-1] <= resident[2] * 1.02


def test_the_group_of_a_name_is_its_file():
    """Names of other programs may have no group, or one that must not become a file's name."""
    names = ("model/w", "optimizer/master/w", "w", "../w/x", "a b/c", "/w", "w/", "é/w")
    assert [group_of(name) for name in names] == ["model", "optimizer"] + ["tensors"] * 6
