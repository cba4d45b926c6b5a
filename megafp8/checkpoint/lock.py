"""One writer at a time: a save holds a lock on its directory, so that two runs can't clean up each other's work.

It is a lock of the operating system on `<save>/.lock`: it ends with its process, however that dies, and works between
the nodes of a job where the shared file system passes locks on (NFS, Lustre with `flock`, GPFS do). Where locks are not
known, saves go without one.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

LOCK_FILE = ".lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
UNKNOWN = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class SaveLock:
    """The lock on a directory of checkpoints, from now until `release()`.

    Raises BlockingIOError (an OSError) when another process, or another save of this one, has it.
    """

    def __init__(self, save: Path):
        self._path = save / LOCK_FILE
        self._descriptor: int | None = None
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _lock(descriptor, save)
                if _is_at(descriptor, self._path):  # else the one that held it has just removed the file
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def release(self) -> None:
        """Ends it, once; children that inherited the file hold nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def _lock(descriptor: int, save: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            raise BlockingIOError(f"another run is saving into {save}; give each run a --save of its own") from None
        if error.errno not in UNKNOWN:
            raise


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
