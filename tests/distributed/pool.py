"""A pool of worker processes for tests that need several ranks: started once a pytest session, used by all of them.

    pool.run_on(4, function, *args)  ->  [function(*args) of rank 0, ..., of rank 3]

The workers fork from a server that has imported torch once, so a pool costs one import and its restart next to
nothing. A job's ranks find the default process group in place, so that `build_parallel` starts from it as it does in
anybody's program; it is closed when every rank has its result, since one that leaves early breaks the connections that
another is still making. Ranks meet in a file: a TCP store may wait 5 s for a name server.

A job that fails or hangs never spoils the next one: its error (the first rank's, with its traceback) is raised here,
and all workers are killed and started anew.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZE = 4
"""Workers; the largest world of a job."""
GRACE_S = 20.0
"""How long the other ranks may still take once one has failed."""
PATIENCE_S = 400.0
"""How long a job may take: a limit for hangs, which no busy machine comes near."""


class WorkerError(RuntimeError):
    """A rank failed. `rank`; `kind`: the exception's class name; `message`: its text; `trace`: its traceback."""

    def __init__(self, rank: int, kind: str, message: str, trace: str):
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.rank, self.kind, self.message, self.trace = rank, kind, message, trace


class WorkerPool:
    """Starts workers when first needed; `close()` ends them."""

    def __init__(self, size: int = SIZE):
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["tests.distributed.preload"] if _importable() else ["torch.distributed"])

    def run_on(
        self, world: int, function: Callable, *args: Any, timeout: float = PATIENCE_S, env: dict | None = None
    ) -> list:
        """`function(*args)` on ranks 0 to world - 1, each in a process of its own; their results in that order.

        function: at the top level of a module (a test's own module is fine). Arguments and results are pickled.
        env: more environment variables of the job.
        Raises WorkerError with the first failing rank's error, TimeoutError when a rank takes longer than `timeout`
        seconds.
        """
        assert 1 <= world <= self.size, world
        self._start()
        where = inspect.getfile(function), function.__module__, function.__qualname__
        payload = pickle.dumps(args)
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self._workers[:world]):
                variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), **(env or {})}
                pipe.send((rank, world, f"{folder}/store", timeout, variables, where, payload))
            try:
                results = self._collect(world, timeout)
                for _, pipe in self._workers[:world]:
                    pipe.send("all have their results")
                return results
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._workers]

    def _start(self) -> None:
        while len(self._workers) < self.size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, world: int, timeout: float) -> list:
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world])}
        results: dict[int, Any] = {}
        failures: list[WorkerError] = []
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < world:
            ready = wait([p for p, r in pipes.items() if r not in results], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    kind, content = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    kind, content = "died", ("WorkerDied", "the process ended", "")
                if kind == "done":
                    results[rank] = content
                else:
                    failures.append(WorkerError(rank, *content[1:] if kind == "failed" else content))
                    failures[-1].when = content[0] if kind == "failed" else time.time()
                    results.pop(rank, None)
                    pipes.pop(pipe)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise min(failures, key=lambda failure: failure.when)
        if missing := [rank for rank in range(world) if rank not in results]:
            raise TimeoutError(f"rank(s) {missing} of {world} did not finish within {timeout:g} s")
        return [results[rank] for rank in range(world)]


def _importable() -> bool:
    return str(ROOT) in sys.path


def _function(path: str, module: str, qualname: str) -> Callable:
    """The function, from a module that is imported by name if it can be, else by its file (a test's)."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    found: Any = sys.modules[module]
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _serve(pipe: Connection) -> None:
    """A worker: one job after another until the pool hangs up."""
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    clean = dict(os.environ)
    while True:
        try:
            *job, variables, where, payload = pipe.recv()
        except (EOFError, OSError):
            return
        os.environ.update(variables)
        reply, done = _run(job, where, payload)
        os.environ.clear()
        os.environ.update(clean)
        pipe.send_bytes(reply)
        if done:
            try:
                pipe.recv()
            except (EOFError, OSError):
                return
            _close_groups()


def _run(job: list, where: tuple[str, str, str], payload: bytes) -> tuple[bytes, bool]:
    """The pickled result, ("done", value) or ("failed", (when, kind, message, trace)); whether it is the first."""
    import torch.distributed as dist

    rank, world, store, timeout = job
    try:
        if world > 1:
            limit, store = timedelta(seconds=timeout), dist.FileStore(store, world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        return pickle.dumps(("done", _function(*where)(*pickle.loads(payload)))), True
    except BaseException as error:  # noqa: BLE001 -- whatever it was, the test wants to see it
        # The time is taken before the groups close: their end is what makes the other ranks fail as well.
        told = time.time(), type(error).__name__, str(error), traceback.format_exc()
    _close_groups()  # once nothing refers to the error, whose traceback would keep them alive
    return pickle.dumps(("failed", told)), False


def _close_groups() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
