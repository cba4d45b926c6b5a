"""The cache of indices under many processes, and when it must not be used (CASES 69)."""

import multiprocessing
import os
import time

import numpy as np
import pytest

from megafp8.data import SampleCounts, build_datasets, build_tokenizer
from megafp8.data.cache import cached_arrays
from tests.data.helpers import data_flags, random_documents, write_dataset

FORK = multiprocessing.get_context("fork")  # the others would import torch again


def entries(directory):
    return sorted(p.name for p in directory.iterdir() if p.is_dir())


def test_built_once_then_read(tmp_path):
    calls = []

    def build():
        calls.append(1)
        return {"a": np.arange(5), "b": np.ones((2, 3))}

    for _ in range(3):
        arrays = cached_arrays(tmp_path / "new" / "cache", {"x": 1}, build)
        np.testing.assert_array_equal(arrays["a"], np.arange(5))
        np.testing.assert_array_equal(arrays["b"], np.ones((2, 3)))
    assert len(calls) == 1
    cached_arrays(tmp_path / "new" / "cache", {"x": 2}, build)
    assert len(calls) == 2
    assert len(entries(tmp_path / "new" / "cache")) == 2


def test_failed_build_leaves_nothing(tmp_path):
    def build():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached_arrays(tmp_path, {}, build)
    assert entries(tmp_path) == []


def test_damaged_entry_is_named(tmp_path):
    cached_arrays(tmp_path, {}, lambda: {"a": np.arange(1000)})
    path = next(tmp_path.glob("*/a.npy"))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=f"{path.parent}: damaged cache entry.*delete this directory"):
        cached_arrays(tmp_path, {}, lambda: {"a": np.arange(1000)})


@pytest.mark.parametrize("wrong", [None, np.arange(3), np.arange(1000.0)])
def test_array_that_is_missing_or_another(tmp_path, wrong):
    """Well-formed files of the wrong length would be an IndexError in the middle of training."""
    cached_arrays(tmp_path, {}, lambda: {"a": np.arange(1000), "b": np.arange(9)})
    path = next(tmp_path.glob("*/a.npy"))
    path.unlink()
    if wrong is not None:
        np.save(path, wrong)
    with pytest.raises(ValueError, match=f"{path.parent}: damaged cache entry.*delete this directory"):
        cached_arrays(tmp_path, {}, lambda: {"a": np.arange(1000)})


def _slow_build():
    time.sleep(0.3)
    return {"a": np.arange(300_000), "b": np.arange(300_000) ** 2}


def _use_cache(directory, lock_works, start, results):
    if not lock_works:  # as on a file system without locks: all build, one publishes
        import fcntl

        def refuse(*_):
            raise OSError("no locks here")

        fcntl.flock = refuse
    start.wait()
    for i in range(3):
        arrays = cached_arrays(directory, {"round": i}, _slow_build)
        ok = (arrays["a"] == np.arange(300_000)).all() and (arrays["b"] == np.arange(300_000) ** 2).all()
        results.put(bool(ok))


@pytest.mark.parametrize("lock_works", [True, False])
def test_processes_that_start_at_once(tmp_path, lock_works):
    """CASES 69: two jobs at once on one directory never read a partial file, with file locks and without."""
    results, start = FORK.Queue(), FORK.Event()
    jobs = [FORK.Process(target=_use_cache, args=(tmp_path, lock_works, start, results)) for _ in range(4)]
    for job in jobs:
        job.start()
    start.set()
    assert [results.get(timeout=300) for _ in range(12)] == [True] * 12
    for job in jobs:
        job.join(300)
        assert job.exitcode == 0
    assert len(entries(tmp_path)) == 3  # and no temporary ones


def _build_on_node(prefix, cache, start, results):
    start.wait()
    flags = data_flags(data_path=("1", prefix, "2", prefix + "2"), data_cache_path=cache, split="90,8,2")
    sets = build_datasets(flags, build_tokenizer(flags), SampleCounts(300, 20, 20), seed=1)
    results.put([sets.train[i].tolist() for i in range(300)] + [sets.valid["valid"][3].tolist()])


@pytest.mark.parametrize("shared", [True, False])
def test_two_nodes(tmp_path, shared):
    """CASES 69: four processes, as two nodes with a cache directory each or one for all, get the same samples."""
    rng = np.random.default_rng(0)
    prefix = write_dataset(tmp_path / "set", random_documents(rng, 300))
    write_dataset(tmp_path / "set2", random_documents(rng, 100))
    results, start = FORK.Queue(), FORK.Event()
    caches = [str(tmp_path / ("cache" if shared else f"cache-{rank // 2}")) for rank in range(4)]
    ranks = [FORK.Process(target=_build_on_node, args=(prefix, cache, start, results)) for cache in caches]
    for rank in ranks:
        rank.start()
    start.set()
    first, *others = [results.get(timeout=300) for _ in ranks]
    assert all(other == first for other in others)
    for rank in ranks:
        rank.join(300)


def test_changes_are_noticed(tmp_path):
    """CASES 69: another seed, split, length or other data: indices are built anew, never taken from the old ones."""
    rng = np.random.default_rng(0)
    documents = random_documents(rng, 100)
    prefix = write_dataset(tmp_path / "set", documents)
    cache = tmp_path / "cache"

    def train(seed=1, **flags):
        flags = data_flags(**{"data_path": (prefix,), "data_cache_path": str(cache), "split": "90,8,2", **flags})
        return build_datasets(flags, build_tokenizer(flags), SampleCounts(50), seed=seed).train

    train()
    number = len(entries(cache))
    train()
    assert len(entries(cache)) == number
    for change in ({"seed": 2}, {"split": "80,18,2"}, {"seq_length": 17}):
        train(**change)
        assert len(entries(cache)) > number, change
        number = len(entries(cache))
    write_dataset(tmp_path / "set", [np.append(d, 7) for d in documents])
    assert 7 in np.concatenate([train()[i] for i in range(50)])
    assert len(entries(cache)) > number


def test_without_a_place_to_write(tmp_path, monkeypatch):
    """Data on a read-only disk trains from memory; a --data-cache-path that can't be written is an error."""
    monkeypatch.setattr("megafp8.data.build.writable_directory", lambda path: False)
    prefix = write_dataset(tmp_path / "set", random_documents(np.random.default_rng(0), 30))
    flags = data_flags(data_path=(prefix,))
    assert len(build_datasets(flags, build_tokenizer(flags), SampleCounts(5), seed=1).train) >= 5
    assert sorted(os.listdir(tmp_path)) == ["set.bin", "set.idx"]
    flags = data_flags(data_path=(prefix,), data_cache_path=str(tmp_path / "x"))
    with pytest.raises(ValueError, match="--data-cache-path .*can't write there"):
        build_datasets(flags, build_tokenizer(flags), SampleCounts(5), seed=1)
