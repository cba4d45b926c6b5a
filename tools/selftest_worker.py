#!/usr/bin/env python3
"""A process of the self-test; selftest_nccl.py starts it.

    python tools/selftest_worker.py DIR --reference --recipes bf16          # one process: what layouts must equal
    torchrun ... tools/selftest_worker.py DIR --lane 0 --parts layouts ...  # checks, one row a line in DIR/rows_0.jsonl

A check that is not over in time, or that fails on one rank alone, ends the process: nobody can say in what state it has
left the others. It leaves the name of what it was at; started again, it goes on behind it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from selftest_checks import PARTS, every_check, machine, references
from selftest_runs import RECIPES, Runner
from selftest_speed import CASES, WHOLE_NAME, WHOLE_TIME

GONE = 75
"""Exit code of a process that gave up a check."""
GRACE = 5.0
"""Seconds that other ranks leave rank 0 to tell that time is out: their end looks like a fault of the network to it."""


class Rows:
    """Lines of JSON that several processes append to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, row: dict) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def begun(self) -> set[str]:
        """Names of checks that an earlier process began."""
        if not self._path.exists():
            return set()
        return {row["begin"] for row in map(json.loads, self._path.read_text().splitlines()) if "begin" in row}


@contextmanager
def limited(seconds: float, rows: Rows, name: str) -> Iterator[None]:
    """Ends this process when what runs inside takes longer than that; its stacks go to stderr. Rank 0 goes first."""

    def give_up() -> None:
        faulthandler.dump_traceback(file=sys.stderr)
        if int(os.environ.get("RANK", "0")) == 0:
            rows.add({"name": name, "passed": False, "error": f"no end after {seconds:g} s"})
        else:
            time.sleep(GRACE)
        os._exit(GONE)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_checks(args: argparse.Namespace, rows: Rows) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    runner = Runner(args.folder, args.device, args.lane)
    elements = args.elements if args.device == "cuda" else min(args.elements, 1 << 16)
    begun = rows.begun()
    dist.barrier(device_ids=[torch.cuda.current_device()] if args.device == "cuda" else None)  # all have read
    if rank == 0:
        rows.add({"machine": machine(args.device, n)})
    for part, name, check in every_check(runner, n, args.parts, args.recipes, elements, args.cases):
        if name in begun:
            continue
        print(f"--- {name}", flush=True)
        if rank == 0:
            rows.add({"begin": name, "part": part})
        start = time.monotonic()
        longest = args.check_seconds * (WHOLE_TIME if name.startswith(WHOLE_NAME) else 1)
        with limited(longest, rows, name):
            try:
                row = check()
            except ValueError as error:  # a mistake, which every rank has seen
                row = {"passed": False, "error": str(error).splitlines()[0][:300]}
            except BaseException as error:
                traceback.print_exc()
                rows.add({"name": name, "passed": False, "error": f"rank {rank}: {error!r}".splitlines()[0][:300]})
                sys.stdout.flush()
                os._exit(GONE)
        if rank == 0:
            rows.add({"name": name, "seconds": round(time.monotonic() - start, 1)} | row)
    if rank == 0:
        rows.add({"end": True})


def write_references(folder: Path, device: str, recipes: list[str]) -> None:
    for recipe in recipes:
        runner = Runner(folder, device, f"one_{recipe}")
        try:
            for model in references(recipe):
                runner.write_reference(recipe, model)
        except BaseException as error:
            (folder / f"reference_{recipe}.failed").write_text(repr(error)[:300])
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--reference", action="store_true", help="one process: write what the others must equal")
    parser.add_argument("--lane", default="0", help="name of the files of this job")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="of the part speed")
    parser.add_argument("--elements", type=int, default=1 << 26, help="of a collective's buffer (default 2^26)")
    parser.add_argument("--check-seconds", type=float, default=60.0, help="longest time of a check")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    if args.reference:
        write_references(args.folder, args.device, args.recipes)
        return 0
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    run_checks(args, Rows(args.folder / f"rows_{args.lane}.jsonl"))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
