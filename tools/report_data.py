"""What tools/report.py knows of a run: its lines, events, monitor and arguments, read as leniently as can be.

A report is asked for when something went wrong, too: half a line of a killed run, a missing file or an args.json of
another version costs a note on the page and nothing else. Only a path that is no run at all is an error.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.training.run_log import EVENTS_FILE, LIFECYCLE, METRICS_FILE, MONITOR_FILE, by_iteration, read_lines

ARGS_FILE = "args.json"
POINTS = 600
"""Of a curve: longer runs are drawn as means over pieces, with the range of each piece behind them."""
LOOKS = 80
"""Columns of a heat map: more looks of the monitor are averaged in pieces."""
PLACES = ("log_dir", "tensorboard_dir", "save", "load", "wandb_exp_name", "wandb_save_dir")
"""Arguments that differ between any two runs and say nothing of them."""


@dataclass
class Run:
    """One run. training, validation: lines by iteration, the later of two for one iteration; monitor: by iteration,
    linear and role; args: args.json, or {}; notes: what is missing or damaged, a line each."""

    label: str
    path: Path
    training: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    monitor: dict[tuple[int, str, str], dict[str, Any]] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(iterations, values) of a training number, where lines have it; empty where none is finite."""
        return _curve(self.training, key)

    def validation_curves(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name of the validation set ("" for the only one) -> its losses."""
        names = sorted({str(line.get("dataset", "")) for line in self.validation})
        pieces = {name: [v for v in self.validation if str(v.get("dataset", "")) == name] for name in names}
        return {name: _curve(lines, "valid_loss") for name, lines in pieces.items()}

    def values(self) -> dict[str, Any]:
        """Field name -> value of the resolved configuration, whatever group and version it is of."""
        groups = self.args.get("config")
        groups = groups.values() if isinstance(groups, dict) else ()
        return {name: value for group in groups if isinstance(group, dict) for name, value in group.items()}

    def given(self) -> dict[str, Any]:
        given = self.args.get("given")
        return given if isinstance(given, dict) else {}

    def provenance(self) -> dict[str, Any]:
        found = self.args.get("provenance")
        return found if isinstance(found, dict) else {}


def drawable(value: float) -> float:
    """NaN for what is too large for differences and margins of it to be finite; JSON's integers have no limit."""
    return value if abs(value) <= 1e300 else math.nan


def _curve(lines: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(line["iteration"], drawable(line[key])) for line in lines if isinstance(line.get(key), (int, float))]
    x, y = np.array([f[0] for f in found], dtype=float), np.array([f[1] for f in found], dtype=float)
    return (x, y) if np.isfinite(y).any() else (np.array([]), np.array([]))


def load_run(path: Path, label: str) -> Run:
    """Raises ValueError where `path` holds neither metrics nor arguments."""
    if not path.is_dir():
        what = "a file, not a directory" if path.exists() else "no such directory"
        raise ValueError(f"{path}: {what}; give a directory written by --log-dir")
    if not any((path / name).is_file() for name in (METRICS_FILE, ARGS_FILE)):
        below = sorted(str(file.parent) for file in path.glob(f"*/{METRICS_FILE}"))
        mend = f"there are the runs {' '.join(below)}" if below else "give a directory written by --log-dir"
        raise ValueError(f"{path}: neither {METRICS_FILE} nor {ARGS_FILE} there; {mend}")
    run = Run(label, path)
    metrics = _lines(run, METRICS_FILE)
    run.training, run.validation = by_iteration(metrics)
    if not run.training:
        run.notes.append("no training line yet: it was started, and has not reached its first --log-interval")
    run.events = sorted(_lines(run, EVENTS_FILE), key=lambda line: line["iteration"])
    if not any(event.get("event") in LIFECYCLE for event in run.events):
        run.events = sorted([*run.events, *_restarts(metrics)], key=lambda line: line["iteration"])
    run.events = sorted([*run.events, *_untold_skips(run)], key=lambda line: line["iteration"])
    for line in _lines(run, MONITOR_FILE):
        if "linear" in line and "role" in line:
            run.monitor[line["iteration"], str(line["linear"]), str(line["role"])] = line
    run.args = _read_args(run)
    return run


def _lines(run: Run, name: str) -> list[dict[str, Any]]:
    if not (run.path / name).is_file():
        return []
    lines, damaged = read_lines(run.path / name)
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        run.notes.append(f"{name}: {len(damaged)} damaged line{'s' * (len(damaged) > 1)} left out (number {shown})")
    return lines


def _read_args(run: Run) -> dict[str, Any]:
    path = run.path / ARGS_FILE
    if not path.is_file():
        run.notes.append(f"no {ARGS_FILE}: its arguments and version are not known")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        reason = "no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    run.notes.append(f"{ARGS_FILE}: damaged ({reason}); its arguments and version are not known")
    return {}


def _restarts(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a run that tells no starts: where its lines go back."""
    numbers = [line["iteration"] for line in metrics if "valid_loss" not in line]
    return [
        {"iteration": now - 1, "event": "start", "message": f"went on from iteration {now - 1}, after {before}"}
        for before, now in zip(numbers, numbers[1:], strict=False)
        if now <= before
    ]


def _untold_skips(run: Run) -> list[dict[str, Any]]:
    """Skipped iterations, a row of neighbours as one event, where no event tells of their first."""
    told = {event["iteration"] for event in run.events if event.get("event") == "nonfinite"}
    rows: list[list[int]] = []
    for line in run.training:
        if line.get("skipped") and rows and rows[-1][1] == line["iteration"] - 1:
            rows[-1][1] = line["iteration"]
        elif line.get("skipped"):
            rows.append([line["iteration"], line["iteration"]])
    return [
        {
            "iteration": first,
            "event": "skipped",
            "message": "skipped" if last == first else f"skipped, as all up to {last}",
        }
        for first, last in rows
        if last > first or first not in told
    ]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    from compare_runs import smooth as centred

    return centred(values, window)


def thin(x: np.ndarray, y: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, lowest, highest) of at most `points` pieces of a curve; NaN where a piece has no finite value."""
    if len(x) <= points:
        return x, y, y, y
    pieces = np.array_split(np.arange(len(x)), points)
    finite = [y[p][np.isfinite(y[p])] for p in pieces]
    reduced = [(v.mean(), v.min(), v.max()) if len(v) else (math.nan,) * 3 for v in finite]
    mean, low, high = np.array(reduced).T
    return np.array([x[p].mean().round() for p in pieces]), mean, low, high


@dataclass(frozen=True)
class Grid:
    """Of one role: rows, looks (the iteration of each column), and values [rows, columns], NaN where nobody looked."""

    role: str
    linears: list[str]
    looks: list[int]
    values: np.ndarray


def grids(run: Run, number: str) -> list[Grid]:
    """The monitor's `number` by role, linear and iteration; scales as log2. Empty where there is none."""
    linears = sorted({linear for _, linear, _ in run.monitor}, key=_natural)
    looks = sorted({iteration for iteration, _, _ in run.monitor})
    found = []
    for role in ("input", "weight", "grad_output"):
        values = np.full((len(linears), len(looks)), np.nan)
        rows, columns = ({name: i for i, name in enumerate(names)} for names in (linears, looks))
        for (iteration, linear, other), line in run.monitor.items():
            value = line.get(number)
            if other == role and isinstance(value, (int, float)):
                value = drawable(value)
                positive = value > 0 if number.startswith("scale_inv") else True
                shown = (math.log2(value) if number.startswith("scale_inv") else value) if positive else math.nan
                values[rows[linear], columns[iteration]] = shown
        if np.isfinite(values).any():
            found.append(Grid(role, linears, *_fewer_looks(looks, values)))
    return found


def _fewer_looks(looks: list[int], values: np.ndarray) -> tuple[list[int], np.ndarray]:
    if len(looks) <= LOOKS:
        return looks, values
    pieces = np.array_split(np.arange(len(looks)), LOOKS)
    sums = np.stack([np.nansum(values[:, p], axis=1) for p in pieces], axis=1)
    counts = np.stack([np.isfinite(values[:, p]).sum(axis=1) for p in pieces], axis=1)
    means = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return [looks[p[0]] for p in pieces], means


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sorts layers.2 before layers.10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in name.split(".")]


def differing(runs: list[Run]) -> list[tuple[str, list[Any]]]:
    """(field, value in each run) of the arguments that are not alike in all runs; `None` stands for an absent one."""
    known = [run.values() for run in runs]
    names = dict.fromkeys(name for values in known for name in values)
    rows = [(name, [values.get(name) for values in known]) for name in names if name not in PLACES]
    told = [bool(values) for values in known]
    return [(n, vs) for n, vs in rows if len({json.dumps(v) for v, t in zip(vs, told, strict=True) if t}) > 1]
