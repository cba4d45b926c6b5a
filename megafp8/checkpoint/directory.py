"""A directory of checkpoints: names, what is complete, what an interrupted save left behind.

    <save>/iter_0000100/     a complete checkpoint, always: written as .partial-iter_0000100, then renamed
    <save>/latest            the name of the newest one, replaced atomically after the rename

A hidden name marks unfinished work: `.partial-*` a save, `.replaced-*` the previous checkpoint of an iteration that is
saved again, `.deleted-*` one on its way out.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megafp8.checkpoint.index import INDEX_FILE
from megafp8.checkpoint.tensor_file import write_bytes

LATEST = "latest"
PARTIAL, REPLACED, DELETED = ".partial-", ".replaced-", ".deleted-"
ITERATION_NAME = re.compile(r"iter_(\d{7,18})")
log = logging.getLogger(__name__)


def iteration_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """The iteration in a checkpoint's name, None for any other name."""
    match = ITERATION_NAME.fullmatch(name)
    return int(match[1]) if match else None


def checkpoint_path(save: Path, iteration: int) -> Path | None:
    """Where the complete checkpoint of an iteration lies, None when there is none.

    Only reads: another process may be saving here. Killed between two renames, a save that replaces a checkpoint
    leaves the old one under its hidden name.
    """
    name = iteration_name(iteration)
    return next((p for p in (save / name, save / (REPLACED + name)) if (p / INDEX_FILE).is_file()), None)


def saved_iterations(save: Path) -> list[int]:
    """Iterations of the complete checkpoints, ascending."""
    if not save.is_dir():
        return []
    found = {iteration_of(path.name.removeprefix(REPLACED)) for path in save.iterdir()} - {None}
    return sorted(i for i in found if checkpoint_path(save, i) is not None)


def checkpoints_below(load: str | Path) -> str:
    """Where in a directory without checkpoints some lie one level down, such as DIR/ckpt; empty if nowhere."""
    return " and ".join(sorted(str(file.parent) for file in Path(load).glob(f"*/{LATEST}")))


def latest_iteration(save: Path) -> int | None:
    """The iteration that `latest` names, or the newest complete one when it names none; None without checkpoints."""
    saved = saved_iterations(save)
    try:
        name = (save / LATEST).read_text(errors="replace").strip() if (save / LATEST).is_file() else ""
    except OSError:
        name = ""
    iteration = iteration_of(name)
    if iteration in saved:
        return iteration
    newest = saved[-1] if saved else None
    if name:
        log.warning("%s names %r, which is not a complete checkpoint there; taking %s", save / LATEST, name, newest)
    return newest


def clean(save: Path) -> None:
    """Removes what interrupted saves left; puts back a checkpoint whose replacement was never finished.

    Only for the process that saves here.
    """
    for path in sorted(save.glob(".*-iter_*")):
        if path.name.startswith(REPLACED):
            original = save / path.name.removeprefix(REPLACED)
            if not original.exists():
                path.rename(original)
                continue
        if path.name.startswith((PARTIAL, REPLACED, DELETED)):
            log.info("removing %s, left by an interrupted save", path)
            delete(path)


def publish(save: Path, iteration: int) -> list[Path]:
    """Turns the finished partial directory into the checkpoint of `iteration` and points `latest` at it; returns what
    it has replaced, hidden, for `sweep`."""
    name = iteration_name(iteration)
    target, replaced = save / name, save / (REPLACED + name)
    partial = save / (PARTIAL + name)
    sync_directory(partial)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    sync_directory(save)
    temporary = save / f".{LATEST}.tmp"
    temporary.unlink(missing_ok=True)
    write_bytes(temporary, f"{name}\n".encode())
    temporary.rename(save / LATEST)
    sync_directory(save)
    return hide(replaced) if replaced.exists() else []


def delete(path: Path) -> None:
    """Deletes a checkpoint, or what is left of one; interrupted, it leaves none that looks complete."""
    sweep(hide(path))


def hide(path: Path) -> list[Path]:
    """Gives a checkpoint, or what is left of one, a name that counts for nothing, and returns it in its new place."""
    if path.name.startswith(DELETED):
        return [path]
    name = path.name.removeprefix(PARTIAL).removeprefix(REPLACED)
    places = (path.with_name(f"{DELETED}{name}{suffix}") for suffix in ("", *(f".{n}" for n in range(1, 1000))))
    try:
        return [path.rename(next(place for place in places if not os.path.lexists(place)))]
    except OSError as error:
        log.warning("could not delete %s: %s", path, error)
        return []


def sweep(hidden: Iterable[Path]) -> None:
    """Deletes what is hidden. What can't be deleted (on NFS, files that somebody still reads) is told, and left to the
    next save: no reason for one to fail."""
    for path in hidden:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            if path.exists():
                log.warning("could not delete %s: %s", path, error)


def discard_partial(save: Path, iteration: int) -> None:
    """Gives up an unfinished save; whatever goes wrong with that is left to `clean`."""
    with suppress(OSError):
        shutil.rmtree(save / (PARTIAL + iteration_name(iteration)))


def sync_directory(directory: Path) -> None:
    """Has the names in a directory on the disk, where the file system knows how."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
