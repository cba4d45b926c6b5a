"""Directories as they are met in the field: links, files in the way, half-deleted, unreadable, not shared, hostile."""

import errno
import json
import os
import shutil
import tempfile
import time
import zlib
from multiprocessing import get_context

import pytest
import torch

from megafp8.checkpoint import DamagedFileError, find_checkpoint, load_checkpoint, save_checkpoint, storage
from megafp8.checkpoint.directory import saved_iterations
from megafp8.checkpoint.index import compact
from megafp8.params import StateItem
from tests.checkpoint.helpers import assert_equal_items, make_items, poisoned


def loads(save, iteration):
    found, wanted = find_checkpoint(save, iteration), poisoned(make_items())
    load_checkpoint(found.directory, wanted)
    assert_equal_items(wanted, make_items(iteration))
    return True


def test_a_link_to_the_directory_and_to_a_checkpoint(tmp_path):
    """People link scratch disks in; only files within a checkpoint must not be links."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "ckpt").symlink_to(tmp_path / "disk")
    save_checkpoint(tmp_path / "ckpt", 10, make_items(10), {})
    assert loads(tmp_path / "ckpt", 10)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "iter_0000010").symlink_to(tmp_path / "disk" / "iter_0000010")
    assert loads(tmp_path / "kept", 10)


@pytest.mark.parametrize("name", [".partial-iter_0000007", ".deleted-iter_0000007", ".replaced-iter_0000007"])
def test_files_and_links_where_directories_are_expected(tmp_path, name):
    """They are removed, and what a link points to is not touched."""
    save_checkpoint(tmp_path, 7, make_items(7), {})
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "file").write_text("x")
    for make in (lambda p: p.write_text("x"), lambda p: p.symlink_to(treasure), lambda p: p.symlink_to("nowhere")):
        make(tmp_path / name)
        assert save_checkpoint(tmp_path, 7, make_items(7), {}) is not None
        assert not os.path.lexists(tmp_path / name)
    assert (treasure / "file").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000007", "latest", "treasure"]


def test_what_cannot_be_deleted_does_not_fail_saves(tmp_path, monkeypatch, caplog):
    """On NFS a file that somebody reads can't be deleted for good: its directory stays."""
    rmtree = shutil.rmtree

    def busy(path, *args, **kwargs):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    for iteration in (10, 20):
        save_checkpoint(tmp_path, iteration, make_items(iteration), {}, retain_interval=100)
    monkeypatch.setattr(shutil, "rmtree", busy)
    for iteration in (30, 30, 40, 40, 50):  # also replaced ones
        assert save_checkpoint(tmp_path, iteration, make_items(iteration), {}, retain_interval=100) is not None
    assert "could not delete" in caplog.text
    assert saved_iterations(tmp_path) == [50]
    assert loads(tmp_path, 50)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert save_checkpoint(tmp_path, 60, make_items(60), {}, retain_interval=100) is not None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000060", "latest"]


def test_a_half_deleted_replacement_is_no_checkpoint(tmp_path, monkeypatch):
    """Deleting a replaced checkpoint begins with a name that counts for nothing."""

    def half(path, *args, **kwargs):
        next(path.glob("optimizer-*")).unlink()
        raise KeyboardInterrupt

    save_checkpoint(tmp_path, 10, make_items(1), {})
    monkeypatch.setattr(shutil, "rmtree", half)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 10, make_items(10), {})
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "iter_0000010")
    assert saved_iterations(tmp_path) == []
    assert save_checkpoint(tmp_path, 20, make_items(20), {}) is not None
    assert saved_iterations(tmp_path) == [20]


def test_resume_from_a_half_deleted_directory(tmp_path):
    """`rm -r`, interrupted: without its index it is no checkpoint, with it it is a damaged one."""
    for iteration in (10, 20, 30):
        save_checkpoint(tmp_path, iteration, make_items(iteration), {})
    (tmp_path / "iter_0000030" / "index.json").unlink()
    assert find_checkpoint(tmp_path).iteration == 20
    (tmp_path / "iter_0000020" / "model-00000.safetensors").unlink()
    with pytest.raises(DamagedFileError, match="model-00000.safetensors is missing"):
        load_checkpoint(find_checkpoint(tmp_path).directory, poisoned(make_items()))
    assert save_checkpoint(tmp_path, 30, make_items(30), {}) is not None
    assert loads(tmp_path, 30)


def as_nobody(pipe, save: str) -> None:
    """What another user meets: whether a save worked, the refusal of a closed directory, and the iteration found."""
    os.setuid(65534)
    saved = save_checkpoint(save, 20, make_items(20), {})
    try:
        refusal = find_checkpoint(f"{save}/closed")
    except ValueError as error:
        refusal = str(error)
    pipe.send((saved, refusal, find_checkpoint(save).iteration))


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
def test_a_directory_of_somebody_else():
    """Reading works, saving is refused, and what can't be read is told in one line."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preload"])
    with tempfile.TemporaryDirectory() as save:
        os.chmod(save, 0o755)
        save_checkpoint(save, 10, make_items(10), {})
        os.mkdir(f"{save}/closed", mode=0o700)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=as_nobody, args=(theirs, save))
        process.start()
        theirs.close()
        saved, refusal, iteration = ours.recv()
        process.join()
    assert (saved, iteration) == (None, 10)
    assert refusal == f"--load {save}/closed: Permission denied; give a directory of checkpoints"


def test_a_directory_that_this_rank_does_not_see(tmp_path, monkeypatch, caplog):
    """--save on a disk of each node's own: the other nodes' ranks don't find what rank 0 has made."""
    monkeypatch.setattr(storage.CheckpointWriter, "_partial", tmp_path / "of another node")
    monkeypatch.setattr(storage.Path, "mkdir", lambda *args, **kwargs: None)
    assert save_checkpoint(tmp_path, 10, make_items(), {}) is None
    assert "--save must be a directory that all ranks share" in caplog.text


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["latest", "iter_0000010/index.json", "iter_0000010/run.json"])
def test_pipes_and_devices_are_not_read(tmp_path, name):
    save_checkpoint(tmp_path, 10, make_items(10), {})
    for make in (os.mkfifo, lambda p: p.symlink_to("/dev/zero")):
        (tmp_path / name).unlink()
        make(tmp_path / name)
        if name == "latest":
            assert find_checkpoint(tmp_path).iteration == 10
        elif "index" in name:
            assert find_checkpoint(tmp_path) is None
        else:
            with pytest.raises(DamagedFileError, match="not a regular file"):
                find_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model/\x1b[31mred", "model/\ud800", "model/a\nb"])
def test_names_that_would_write_to_the_terminal(tmp_path, name):
    directory = save_checkpoint(tmp_path, 10, make_items(), {})
    body = json.loads((directory / "index.json").read_text())["index"]
    body["tensors"][name] = body["tensors"].pop("model/norm.weight")
    content = {"crc32": f"{zlib.crc32(compact(body).encode()):08x}", "index": body}
    (directory / "index.json").write_text(json.dumps(content))
    with pytest.raises(DamagedFileError, match="is not a name") as error:
        load_checkpoint(directory, poisoned(make_items()))
    assert str(error.value).isprintable()


def test_an_index_beyond_memory(tmp_path):
    directory = save_checkpoint(tmp_path, 10, make_items(), {})
    os.truncate(directory / "index.json", 1 << 40)
    with pytest.raises(DamagedFileError, match="it has 1099511627776 bytes"):
        find_checkpoint(tmp_path)


def test_thousands_of_parts_are_planned_in_no_time(tmp_path):
    """A tensor in as many parts as a large job has ranks."""
    parts, width = 3000, 8
    whole = torch.arange(parts * width).view(parts, width)
    items = {
        f"optimizer/x@{i}" if i else "optimizer/x": StateItem(whole[i : i + 1], whole.shape, ((i, i + 1), (0, width)))
        for i in range(parts)
    }
    directory = save_checkpoint(tmp_path, 1, items, {})
    wanted = {"optimizer/x": StateItem(torch.zeros_like(whole), whole.shape)}
    start = time.process_time()
    load_checkpoint(directory, wanted)
    assert time.process_time() - start < 10
    assert torch.equal(wanted["optimizer/x"].tensor, whole)
