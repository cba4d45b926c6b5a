"""Scripts as a user runs them, in processes that fork from this one: importing torch once more would cost seconds."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch


def start(argv: list[str], output: Path, *, cwd: Path | None = None, session: bool = False) -> BaseProcess:
    """`python SCRIPT ARGUMENTS...`, started. `argv` begins with the script, or with "-c" and code.

    output: a file for both of its streams. session: in a process group of its own, as under a scheduler.
    """
    process = multiprocessing.get_context("fork").Process(target=_execute, args=(argv, output, cwd, session))
    process.start()
    return process


def run(argv: list[str], output: Path, *, cwd: Path | None = None, timeout: float = 1800) -> int:
    """The same to its end; returns the exit code. After `timeout` seconds it is killed: TimeoutError."""
    process = start(argv, output, cwd=cwd)
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"python {' '.join(argv)} took more than {timeout:g} s")
    return process.exitcode


def _execute(argv: list[str], output: Path, cwd: Path | None, session: bool) -> None:
    if session:
        os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdin = open(os.devnull)  # noqa: SIM115 -- until the process ends
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    if cwd is not None:
        os.chdir(cwd)
    torch.set_num_threads(1)
    atexit._clear()  # what is to be done when the parent ends
    try:
        _run(argv)
    finally:
        atexit._run_exitfuncs()  # as at an interpreter's end, which a forked process never comes to


def _run(argv: list[str]) -> None:
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")
