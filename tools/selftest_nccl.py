#!/usr/bin/env python3
"""Does megafp8 run right on the GPUs of this machine? See selftest_nccl.sh, which makes the data and starts it.

    python tools/selftest_nccl.py DIR [--gpus 2] [--parts layouts speed] [--recipes fp32 blockwise] [--cases DP]

Layouts must agree with one GPU: losses and gradient norms of FP32 within 1e-6 over five steps; of BF16 and FP8, whose
ranks round on their own, losses within 5e-3, the first gradient norm within 1e-2 and later ones within 5e-2. Switches
that move bytes or overlap them must change no number at all. FP8 on the wire must save 45 %
of each trip (or gather) that is FP8, and cost no time.

Checks run in several jobs beside each other (`--jobs`), each on all GPUs, with the recipes dealt out to them; what
measures speed runs alone, last. A check that hangs or fails costs its own row: its job is started again behind it.
Exit code 0: every check has passed; 1: one has not, or has not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megafp8.config.publish import writable_directory
from megafp8.config.tool_parser import ToolParser, check_least

WORKER = Path(__file__).resolve().parent / "selftest_worker.py"
PARTS = ("switches", "graphs", "layouts", "checkpoint", "collectives", "speed")
ALONE = ("collectives", "speed")
RECIPES = ("fp32", "blockwise", "bf16", "delayed", "mxfp8", "tensorwise")
"""In the order in which they are dealt to jobs, forth and back: so jobs have about as much to do."""
CASES = ("DP", "EP", "TP", "GRAPHS", "WHOLE")
"""Of the part speed."""
ONE_WILL_DO = ("collectives",)
"""Parts that can be run on one GPU; in the others it would be compared with itself."""
RESTARTS = 5
"""Of a job: more than that, and the machine has to be looked at first."""
Typed = Callable[..., str]
"""Name of a flag and its value, if any, as on the command line."""


@dataclass
class Job:
    """A run of the worker under torchrun, started again while it has checks left. rows: what it has told so far."""

    lane: str
    command: list[str]
    folder: Path
    env: dict[str, str]
    rows: dict[str, dict] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    over: bool = False
    machine: dict = field(default_factory=dict)
    _starts: int = 0
    _read: int = 0

    def start(self) -> None:
        self._starts += 1
        with (self.folder / f"log_{self.lane}.txt").open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, env=self.env)

    def poll(self) -> list[dict]:
        """Rows that have come since; starts the job again where it has given up a check."""
        code = self.process.poll()  # before its rows are read: nothing comes after it
        fresh = self._rows()
        if code is None:
            return fresh
        fresh += self._missing("the job ended")
        if code == 0 or self._starts > RESTARTS or not fresh and not self.rows:
            self.over = True
        else:
            self.start()
        return fresh

    def stop(self) -> list[dict]:
        """Ends the job: time is out."""
        fresh = self._rows() + self._missing("time was out")
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.over = True
        return fresh

    def _rows(self) -> list[dict]:
        path = self.folder / f"rows_{self.lane}.jsonl"
        text = path.read_bytes() if path.exists() else b""
        whole = text.rfind(b"\n") + 1
        fresh = []
        for row in map(json.loads, text[self._read : whole].splitlines()):
            if "machine" in row:
                self.machine = row["machine"]
            elif "begin" in row:
                self.rows[row["begin"]] = {"part": row["part"], "name": row["begin"]}
            elif "name" in row and "passed" not in self.rows.get(row["name"], {"passed": None}):
                self.rows[row["name"]] |= row
                fresh.append(self.rows[row["name"]])
        self._read = whole
        return fresh

    def _missing(self, why: str) -> list[dict]:
        """Checks that began and told nothing."""
        lost = [row for row in self.rows.values() if "passed" not in row]
        for row in lost:
            row |= {"passed": False, "error": f"{why}; see {self.folder / f'log_{self.lane}.txt'}"}
        return lost


def line(row: dict) -> str:
    limits = zip(row.get("gaps", ()), row.get("allowed", ()), strict=True)
    gaps = [f"{gap:.1e}" if row["passed"] else f"{gap:.1e} of {limit:g}" for gap, limit in limits]
    numbers = {"gb_per_s": "{:.1f} GB/s", "tokens_per_second": "{:,.0f} tokens/s", "to_bf16": "{:.3f} of BF16",
               "step_ms": "{:.1f} ms a step", "host_ms": "host {:.1f} ms",
               "gather_mib": "gathers {:.1f} MiB", "deal_mib": "deals {:.1f} MiB",
               "bytes_to_off": "bytes {:.3f} of off", "speed_to_off": "speed {:.3f} of off",
               "communication_ms": "communication {:.1f} ms", "exposed_ms": "exposed {:.1f} ms",
               "peak_gib": "peak {:.1f} GiB", "best_to_bf16": "best FP8 {:.3f} of BF16", "left_out": "left out: {}",
               "error": "{}"}  # fmt: skip
    told = ", ".join([*gaps, *(form.format(row[key]) for key, form in numbers.items() if key in row)])
    if not row["passed"] and row.get("off"):
        told += "".join(
            f"\n{'':9}{name}: {where_time_went(found)}" for name, found in (("off", row["off"]), ("on", row))
        )
    mark = "FAIL" if not row["passed"] else "skip" if "left_out" in row else "ok  "
    return f"{mark} {row['name']:60} {told}"


def where_time_went(row: dict) -> str:
    """A step of a speed row, for people: rounds, host, and what the device did."""
    rounds = " ".join(f"{ms:.1f}" for ms in row["ms"])
    busy = row.get("busy_ms", {}) | {name: row[f"{name}_ms"] for name in ("idle", "exposed") if f"{name}_ms" in row}
    device = ", ".join(f"{kind} {ms:.1f}" for kind, ms in busy.items())
    return f"rounds {rounds} ms a step, host {row['host_ms']:.1f}; profiled: {device or 'nothing'}"


def torchrun(gpus: int) -> list[str]:
    # The module, not the command: a torchrun on PATH may belong to another Python (a venv over a site's torch).
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]


def deal(recipes: list[str], jobs: int) -> list[list[str]]:
    """The recipes of each job; none is idle."""
    lanes: list[list[str]] = [[] for _ in range(min(jobs, len(recipes)))]
    order = [*range(len(lanes)), *reversed(range(len(lanes)))]
    for place, recipe in enumerate(recipes):
        lanes[order[place % len(order)]].append(recipe)
    return lanes


class Selftest:
    """All jobs, their rows as they come, and the files that hold them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin, self.jobs = args, time.monotonic(), list[Job]()
        self.env = {"OMP_NUM_THREADS": "1"} | os.environ
        for pattern in ("rows_*.jsonl", "log_[0-9]*.txt", "log_alone.txt", "reference_*"):
            for old in args.folder.glob(pattern):
                old.unlink()

    def job(self, lane: str, parts: list[str], recipes: list[str]) -> Job:
        a = self.args
        flags = ["--device", a.device, "--lane", lane, "--check-seconds", str(a.check_seconds), "--parts", *parts]
        command = [*torchrun(a.gpus), str(WORKER), str(a.folder), *flags, "--elements", str(a.elements)]
        return Job(lane, [*command, "--recipes", *recipes, "--cases", *a.cases], a.folder, self.env)

    def start_references(self) -> list[subprocess.Popen]:
        """One process a recipe, in turn on the GPUs."""
        found = []
        for place, recipe in enumerate(self.args.recipes):
            flags = [str(self.args.folder), "--reference", "--device", self.args.device, "--recipes", recipe]
            env = self.env | {"LOCAL_RANK": str(place % self.args.gpus)}
            with (self.args.folder / f"log_one_{recipe}.txt").open("w") as log:
                found.append(subprocess.Popen([sys.executable, str(WORKER), *flags], stdout=log, stderr=log, env=env))
        return found

    def run(self, jobs: list[Job], until: float | None) -> None:
        """Runs jobs beside each other, and prints their rows. until: seconds since the begin, at most."""
        self.jobs += jobs
        for job in jobs:
            job.start()
        while open_jobs := [job for job in jobs if not job.over]:
            late = until is not None and time.monotonic() - self.begin > until
            for job in open_jobs:
                for row in job.stop() if late else job.poll():
                    print(f"{time.monotonic() - self.begin:5.0f} s {line(row)}", flush=True)
                    self.save()
            time.sleep(0.1)

    def rows(self) -> list[dict]:
        return [row for job in self.jobs for row in job.rows.values() if "passed" in row]

    def save(self) -> None:
        machine = next((job.machine for job in self.jobs if job.machine), {})
        text = json.dumps({"machine": machine, "rows": self.rows()}, indent=1)
        (self.args.folder / "selftest.json").write_text(text)

    def main(self) -> int:
        a = self.args
        beside, alone = ([part for part in a.parts if (part in ALONE) == last] for last in (False, True))
        references = self.start_references() if {"layouts", "checkpoint"} & set(beside) else []
        try:
            if beside:
                lanes = deal(a.recipes, a.jobs)
                share = None if a.seconds is None else a.seconds * (0.6 if "speed" in alone else 0.9 if alone else 1.0)
                self.run([self.job(str(place), beside, recipes) for place, recipes in enumerate(lanes)], share)
        finally:
            for process in references:
                process.terminate()
                process.wait()
        if alone:
            self.run([self.job("alone", alone, a.recipes)], a.seconds)
        self.save()
        rows = self.rows()
        failed = [row["name"] for row in rows if not row["passed"]]
        unfinished = [job.lane for job in self.jobs if not (self.args.folder / f"rows_{job.lane}.jsonl").exists()
                      or '"end"' not in (self.args.folder / f"rows_{job.lane}.jsonl").read_text()]  # fmt: skip
        print(f"{len(rows)} checks, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
        if unfinished:
            print(f"not all checks of these jobs have run (see log_JOB.txt): {', '.join(unfinished)}")
        return int(bool(failed or unfinished))


def as_flag(name: str, value: object = "") -> str:
    """How a value was typed, for the line on a mistake."""
    return f"--{name} {value}".rstrip()


def check_parts(parts: Sequence[str], cases: Sequence[str] | None, gpus: int, typed: Typed = as_flag) -> None:
    """Raises ValueError for cases of what doesn't run, and for one GPU where two are compared."""
    if cases and "speed" not in parts:
        raise ValueError(f"{typed('cases', ' '.join(cases))}: of the part speed; add it to {typed('parts')}")
    if gpus < 2 and (wide := [part for part in parts if part not in ONE_WILL_DO]):
        raise ValueError(f"{typed('gpus', gpus)}: {', '.join(wide)} need 2 or more, else nothing is compared; "
                         f"give 2, or {typed('parts', ' '.join(ONE_WILL_DO))}")  # fmt: skip


def check_gpus(device: str, gpus: int, typed: Typed = as_flag) -> None:
    """Raises ValueError when there are fewer GPUs than processes: they would all start, and each wait for its own."""
    import torch

    if device == "cuda" and gpus > (seen := torch.cuda.device_count()):
        raise ValueError(
            f"{typed('gpus', gpus)}: torch sees {seen} CUDA GPU(s) here; give no more, or {typed('device', 'cpu')}"
        )


def main(argv: list[str] | None = None) -> int:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--jobs", type=int, default=3, help="jobs beside each other (default 3)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--cases", nargs="+", choices=CASES, help="of speed (default all)")
    parser.add_argument("--elements", type=int, default=1 << 26, help="of a collective's buffer (default 2^26)")
    parser.add_argument("--check-seconds", type=float, default=60.0,
                        help="longest time of a check (default 60); a whole model's has three times that")  # fmt: skip
    parser.add_argument("--seconds", type=float, help="longest time of all; what has not run by then is a failure")
    args = parser.parse_args(argv)
    try:
        check_least(args, 1, "gpus", "jobs", "elements", "check_seconds", "seconds")
        if not writable_directory(args.folder):
            raise ValueError(f"{args.folder}: can't write there; give another directory")
        check_parts(args.parts, args.cases, args.gpus)
        check_gpus(args.device, args.gpus)
    except ValueError as error:
        parser.error(str(error))
    args.recipes = [recipe for recipe in RECIPES if recipe in args.recipes]
    args.parts = [part for part in PARTS if part in args.parts]
    args.cases = args.cases or list(CASES)
    return Selftest(args).main()


if __name__ == "__main__":
    sys.exit(main())
