"""A cache of arrays on disk, keyed by a hash of everything they are computed from.

Every entry is a directory `CACHE_DIR/KEY` with one `.npy` file an array, `arrays.json` (what they must look like) and
`description.json`. It is written under
another name and renamed when complete, so that no process ever sees part of one: ranks, nodes and jobs may share a
directory, or have one each, without talking to each other. A file lock only saves them from doing the work twice.
"""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np

_FORMAT = 2  # raise when the meaning of a cached array changes


def cached_arrays(
    cache_dir: str | os.PathLike | None, description: dict, build: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays that `build()` returns, from the cache when it holds them.

    Args:
        cache_dir: directory of the cache (made when missing), or None to build in memory.
        description: JSON-able; two descriptions are equal only if `build` gives equal arrays.
        build: called at most once, only on a miss.
    Returns:
        name -> array, memory-mapped read-only when they come from disk.
    """
    if cache_dir is None:
        return build()
    description = {"format": _FORMAT, **description}
    text = json.dumps(description, sort_keys=True)
    entry = Path(cache_dir) / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    if not entry.is_dir():
        Path(cache_dir).mkdir(parents=True, exist_ok=True)
        with _lock(Path(cache_dir) / "lock"):
            if not entry.is_dir():
                _publish(entry, text, build())
    return _load(entry)


def _publish(entry: Path, description: str, arrays: dict[str, np.ndarray]) -> None:
    temporary = entry.with_name(f"{entry.name}.tmp-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        for name, value in arrays.items():
            with open(temporary / f"{name}.npy", "wb") as f:
                np.save(f, value, allow_pickle=False)
                f.flush()
                os.fsync(f.fileno())
        (temporary / "description.json").write_text(description + "\n")
        (temporary / "arrays.json").write_text(json.dumps(_outline(arrays)) + "\n")
        try:
            os.rename(temporary, entry)
        except OSError:
            if not entry.is_dir():  # otherwise another process published it first: its arrays are the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _load(entry: Path) -> dict[str, np.ndarray]:
    try:
        arrays = {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(entry.glob("*.npy"))}
        expected = json.loads((entry / "arrays.json").read_text())
        if _outline(arrays) != expected:
            raise ValueError(f"arrays {_outline(arrays)} instead of {expected}")
        return arrays
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{entry}: damaged cache entry ({error}); delete this directory and start again") from None


def _outline(arrays: dict[str, np.ndarray]) -> dict[str, list]:
    """Name -> dtype and shape, in JSON types."""
    return {name: [value.dtype.str, *value.shape] for name, value in sorted(arrays.items())}


@contextlib.contextmanager
def _lock(path: Path):
    """Hold an exclusive lock on `path`, where the file system knows locks; without one the work is done twice."""
    import fcntl

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no locks here, or another user's file
            fcntl.flock(stack.enter_context(open(path, "a")), fcntl.LOCK_EX)
        yield  # closing the file releases the lock
