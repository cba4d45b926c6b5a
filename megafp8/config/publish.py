"""Files that are replaced in one step, so that a reader never sees half of one; and whether a place can be written."""

import errno
import os
import uuid
from pathlib import Path


def publish(path: str | Path, content: str | bytes) -> None:
    """Writes a file, in place of the one that is there; its directory is made. Raises OSError, and leaves no trace.

    A link stays one: the file that it names is replaced. What is no file (/dev/null, /dev/stdout, a pipe) is written
    to: replacing it would take it from the whole machine.
    """
    path = Path(path)
    content = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve() if path.is_symlink() else path
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def writable_directory(path: str | os.PathLike) -> bool:
    """Whether files can be made in `path`, which is made when missing."""
    probe = Path(path) / f".probe-{uuid.uuid4().hex}"
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True
