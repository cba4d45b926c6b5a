"""What an unfinished preprocessing has written so far, so that the same command goes on from there.

`PREFIX.partial/` holds, for the key number N, `N.bin` (token ids of all documents) and `N.lengths` (int32, tokens of
each document read, 0 where it has none), and for all of them `hashes` (uint64 a document), `lock` and `progress.json`,
which says how much of the other files counts and where reading goes on. It is replaced in one step after the others are
on the disk: a process that is killed leaves the old state or the new one, and whatever lies beyond is cut off.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import time
import zlib
from pathlib import Path

import numpy as np

from megafp8.data.documents import Cursor
from megafp8.data.indexed import index_path, token_path

FORMAT = 2  # raise when the meaning of a file in there changes
SECONDS_BETWEEN_COMMITS = 5.0
_MOST_OF_THE_TIME = 0.05  # that commits may take
_OWN = re.compile(r"lock|progress\.json(\.new)?|hashes|marks|\d+\.(bin|kept\.bin|lengths|idx)")


class Partial:
    """The state of one job; one process at a time holds it.

    Attributes: `records` (documents read), `tokens` by key number, `cursor` (where reading goes on), all of what is
    written; `committed` (documents that a restart finds again); `finished`: None, or what `finish` was given.
    """

    def __init__(self, prefix: str, dtype: np.dtype, keys: int, job: dict, *, restart: bool, resumable: bool):
        """Opens the state at an output prefix, made when missing. job: what must be the same for going on, JSON-able,
        {kind: {name: value}}. restart: what is there is thrown away. resumable: False never keeps any.

        Raises ValueError when there is the state of another job, or another process is at work on it, or the directory
        holds somebody's files.
        """
        self.directory = Path(f"{prefix}.partial")
        self.dtype, self.job, self.resumable = np.dtype(dtype), job, resumable
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--output-prefix {prefix}: can't write there ({error.strerror}); give another") from None
        self._check_contents()
        self._lock = self._take_lock()
        try:
            state = None if restart else self._read()
            if state is None:
                self._empty()
                state = {"records": 0, "tokens": [0] * keys, "cursor": {}, "finished": None}
            self.records, self.tokens, self.finished = state["records"], state["tokens"], state["finished"]
            self.committed, self.cursor = self.records, Cursor(**state["cursor"])
            sizes = {} if self.finished else self._sizes()
            self._files = {name: self._open(name, size) for name, size in sizes.items()}
        except BaseException:
            self._lock.close()
            raise
        self._next_commit = time.monotonic() + SECONDS_BETWEEN_COMMITS

    def path(self, name: str) -> Path:
        return self.directory / name

    def _sizes(self) -> dict[str, int]:
        """File -> bytes of it that count."""
        sizes = {f"{key}.bin": tokens * self.dtype.itemsize for key, tokens in enumerate(self.tokens)}
        sizes |= {f"{key}.lengths": 4 * self.records for key in range(len(self.tokens))}
        return sizes | {"hashes": 8 * self.records}

    def _check_contents(self) -> None:
        """What is in there will be deleted, so it must be ours."""
        others = [path.name for path in self.directory.iterdir() if not _OWN.fullmatch(path.name)]
        if others:
            raise ValueError(
                f"{self.directory}/ is for what an interrupted run keeps, and holds {min(others)}; move that, or give "
                "another --output-prefix"
            )

    def _take_lock(self):
        file = open(self.path("lock"), "a")  # noqa: SIM115 - closed by close()
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process: its forked workers don't share it
        except BlockingIOError:
            file.close()
            raise ValueError(
                f"{self.directory}/: another process is writing this output; wait for it, or give another "
                "--output-prefix"
            ) from None
        except OSError:
            pass  # a file system without locks
        return file

    def _read(self) -> dict | None:
        """The state there is; None when there is none, or none that anything was committed to."""
        try:
            state = json.loads(self.path("progress.json").read_text())
            written, checksum = state["format"], state.pop("checksum", None)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.path('progress.json')}: damaged; --restart begins anew") from None
        if written != FORMAT:
            raise ValueError(f"{self.directory}/: left by another version of megafp8; --restart begins anew")
        if checksum != _checksum(state):
            raise ValueError(f"{self.path('progress.json')}: damaged; --restart begins anew")
        found = differences(state["job"], json.loads(json.dumps(self.job)))
        if found:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            raise ValueError(
                f"{self.directory}/ holds {state['records']} documents of an interrupted run, but {found[0]}{more}; "
                "give what that run had to go on with it, or --restart to begin anew"
            )
        return state

    def _empty(self) -> None:
        for path in self.directory.iterdir():
            if path.name != "lock":
                path.unlink()

    def _open(self, name: str, size: int):
        path = self.path(name)
        path.touch()
        if path.stat().st_size < size:
            raise ValueError(
                f"{path}: {path.stat().st_size} bytes where {size} were committed: damaged; --restart begins anew"
            )
        os.truncate(path, size)
        return open(path, "ab")

    def add(self, ids: list[np.ndarray], lengths: list[np.ndarray], hashes: np.ndarray, cursor: Cursor) -> None:
        """Appends a chunk: for each key ids end to end and tokens of each document, and the documents' hashes; reading
        goes on at the cursor."""
        for key, (tokens, counts) in enumerate(zip(ids, lengths, strict=True)):
            self._files[f"{key}.bin"].write(tokens.tobytes())
            self._files[f"{key}.lengths"].write(counts.tobytes())
            self.tokens[key] += len(tokens)
        self._files["hashes"].write(hashes.tobytes())
        self.records += len(hashes)
        self.cursor = cursor
        if self.resumable and time.monotonic() >= self._next_commit:
            self.commit()

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def _sync(self) -> None:
        self.flush()
        for file in self._files.values():
            os.fsync(file.fileno())

    def commit(self) -> None:
        """From here on the next process goes on, whatever happens to this one."""
        begin = time.monotonic()
        self._sync()
        state = {"format": FORMAT, "job": self.job, "records": self.records, "tokens": self.tokens}
        state |= {"cursor": dataclasses.asdict(self.cursor), "finished": self.finished}
        temporary = self.path("progress.json.new")
        with open(temporary, "w") as f:
            f.write(json.dumps(state | {"checksum": _checksum(state)}))
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, self.path("progress.json"))
        self.committed = self.records
        now = time.monotonic()
        self._next_commit = now + max(SECONDS_BETWEEN_COMMITS, (now - begin) / _MOST_OF_THE_TIME)

    def finish(self, report: dict) -> None:
        """All is read and the index files `N.idx` are written: nothing is left but to publish them. report: JSON-able,
        for whoever comes to publish."""
        self.finished = report
        if self.resumable:
            self.commit()
        else:
            self._sync()

    def publish(self, prefixes: list[str], tokens_suffix: str) -> None:
        """Moves `N{tokens_suffix}` and `N.idx` to the prefixes, by key number, and removes this state. What a killed
        process has moved stays moved. No index stands beside tokens that it doesn't describe: the old one goes first,
        the new one last.
        """
        self._close_files()
        for key, prefix in enumerate(prefixes):
            tokens, index = self.path(f"{key}{tokens_suffix}"), self.path(f"{key}.idx")
            if tokens.exists():
                index_path(prefix).unlink(missing_ok=True)
                os.replace(tokens, token_path(prefix))
            if index.exists():
                os.replace(index, index_path(prefix))
        self.discard()

    def discard(self) -> None:
        """Removes all of it. A state that is given up is none from the first moment on, one that is published stays
        one to the last."""
        self._close_files()
        names = sorted(path.name for path in self.directory.iterdir() if path.name != "lock")
        for name in sorted(names, key=lambda name: (name == "progress.json") == bool(self.finished)):
            self.path(name).unlink()
        self.path("lock").unlink(missing_ok=True)  # last: as long as it is there, nobody else begins
        self._lock.close()
        with contextlib.suppress(OSError):  # somebody has begun since
            self.directory.rmdir()

    def close(self) -> None:
        """Leaves the state as it was last committed."""
        self._close_files()
        self._lock.close()

    def _close_files(self) -> None:
        """Their content is on the disk by then, or doesn't count: no error of a full disk hides the one before."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


def _checksum(state: dict) -> int:
    """So that whatever happened to the file is one mistake: its numbers are trusted with what is cut off and read."""
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def differences(old: dict[str, dict], new: dict[str, dict]) -> list[str]:
    """What changed between two jobs, in words."""
    found = []
    for name, value in new["flags"].items():
        if value != old["flags"].get(name):
            found.append(f"{name} was {_words(old['flags'].get(name))} and is {_words(value)} now")
    if new["tokenizer"] != old["tokenizer"]:
        found.append("the tokenizer is another one (--tokenizer-type, --tokenizer-model)")
    files, before = new["inputs"], old["inputs"]
    found += [f"--input {name} is new" for name in files if name not in before]
    found += [f"--input {name} is not given now" for name in before if name not in files]
    found += [f"--input {name} has changed since" for name in files if name in before and files[name] != before[name]]
    if not found and list(files) != list(before):
        found.append("the files of --input stand in another order")
    return found


def _words(value) -> str:
    if isinstance(value, bool) or value is None:
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
