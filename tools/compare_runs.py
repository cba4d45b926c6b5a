#!/usr/bin/env python3
"""Compares the loss curves of several runs: a table, and a picture.

    tools/compare_runs.py runs/bf16 runs/fp8 --output comparison.png

The first run is the base. The gap of a run is (its loss - base loss) / base loss over the iterations that both have:
of the training loss as the mean over the last quarter of them (one iteration is noise), of the validation loss at the
last common evaluation. The largest smoothed gap along the curve is shown too.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megafp8.training.run_log import read_metrics


@dataclass(frozen=True)
class Run:
    """A run's curves: iteration numbers and losses in nats a token, for training and for validation."""

    label: str
    iterations: np.ndarray
    losses: np.ndarray
    valid_iterations: np.ndarray
    valid_losses: np.ndarray


@dataclass(frozen=True)
class Gap:
    """Relative differences to the base; NaN where the runs share no such point."""

    train: float
    largest: float
    valid: float


def load_run(path: Path, label: str) -> Run:
    """Reads a run; raises ValueError when it has no training lines."""
    training, validation = read_metrics(path)
    if not training:
        raise ValueError(f"{path}: no training line in its metrics yet; let it run for one --log-interval")
    validation = [v for v in validation if not v.get("dataset")] or validation
    return Run(
        label,
        np.array([line["iteration"] for line in training]),
        np.array([line["lm_loss"] for line in training], dtype=float),
        np.array([line["iteration"] for line in validation], dtype=int),
        np.array([line["valid_loss"] for line in validation], dtype=float),
    )


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over a centred window of `window` values, shorter at the ends (no value is invented)."""
    half = window // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    stops = np.minimum(np.arange(len(values)) + half + 1, len(values))
    starts = np.maximum(np.arange(len(values)) - half, 0)
    return (sums[stops] - sums[starts]) / (stops - starts)


def gap_curve(run: Run, base: Run, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(common iterations, smoothed relative gap of the training loss)."""
    common, mine, theirs = np.intersect1d(run.iterations, base.iterations, return_indices=True)
    if not len(common):
        return common, np.array([])
    reference = smooth(base.losses[theirs], window)
    return common, (smooth(run.losses[mine], window) - reference) / reference


def gap_of(run: Run, base: Run, window: int) -> Gap:
    common, mine, theirs = np.intersect1d(run.iterations, base.iterations, return_indices=True)
    train = largest = valid = float("nan")
    if len(common):
        tail = max(1, len(common) // 4)
        reference = base.losses[theirs][-tail:].mean()
        train = (run.losses[mine][-tail:].mean() - reference) / reference
        largest = float(np.abs(gap_curve(run, base, window)[1]).max())
    common, mine, theirs = np.intersect1d(run.valid_iterations, base.valid_iterations, return_indices=True)
    if len(common):
        reference = base.valid_losses[theirs][-1]
        valid = (run.valid_losses[mine][-1] - reference) / reference
    return Gap(float(train), largest, float(valid))


def draw(runs: list[Run], window: int, output: Path) -> None:
    """Loss curves above, the gap to the first run below; raw values faint, smoothed ones strong."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 1.3), constrained_layout=True
    )
    for number, run in enumerate(runs):
        colour = f"C{number}"
        top.plot(run.iterations, run.losses, color=colour, alpha=0.2, linewidth=0.8)
        top.plot(run.iterations, smooth(run.losses, window), color=colour, label=run.label)
        top.plot(run.valid_iterations, run.valid_losses, color=colour, marker="o", linestyle="none", markersize=5)
        if number:
            x, gap = gap_curve(run, runs[0], window)
            bottom.plot(x, 100 * gap, color=colour, label=run.label)
    top.plot([], [], color="grey", marker="o", linestyle="none", label="validation")
    top.set_ylabel("loss (nats a token)")
    top.legend()
    top.grid(alpha=0.3)
    bottom.axhline(0, color="C0", linewidth=1)
    bottom.set_ylabel(f"gap to {runs[0].label} (%)")
    bottom.set_xlabel("iteration")
    bottom.grid(alpha=0.3)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def table(runs: list[Run], gaps: list[Gap]) -> str:
    width = max(len("run"), *(len(run.label) for run in runs))
    head = f"{'run':{width}}  iterations  train loss  valid loss  train gap  valid gap  largest gap"
    lines = [head, "-" * len(head)]
    for run, gap in zip(runs, gaps, strict=True):
        tail = max(1, len(run.losses) // 4)
        valid = f"{run.valid_losses[-1]:10.4f}" if len(run.valid_losses) else f"{'-':>10}"
        lines.append(
            f"{run.label:{width}}  {run.iterations[-1]:10d}  {run.losses[-tail:].mean():10.4f}  {valid}  "
            f"{gap.train:+9.3%}  {gap.valid:+9.3%}  {gap.largest:11.3%}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="--log-dir of each run; the first is the base")
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="names in table and picture (default: the paths)")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="picture to write (needs matplotlib)")
    parser.add_argument("--window", type=int, default=21, metavar="N", help="iterations of smoothing (default: 21)")
    parser.add_argument(
        "--max-gap", type=float, metavar="X", help="exit with 1 when |train gap| or |valid gap| of a run is above X"
    )
    args = parser.parse_args(argv)
    try:
        labels = args.labels or [str(path) for path in args.runs]
        if len(labels) != len(args.runs):
            raise ValueError(f"--labels: {len(labels)} names for {len(args.runs)} runs; give one a run")
        if args.window < 1:
            raise ValueError(f"--window {args.window}: give 1 (no smoothing) or more")
        runs = [load_run(path, label) for path, label in zip(args.runs, labels, strict=True)]
    except ValueError as error:
        print(f"compare_runs.py: error: {error}", file=sys.stderr)
        return 2
    gaps = [gap_of(run, runs[0], args.window) for run in runs]
    print(table(runs, gaps))
    if args.output:
        draw(runs, args.window, args.output)
        print(f"picture: {args.output}")
    if args.max_gap is not None:
        # `<=` is false for a NaN gap (nothing in common, or a diverged run), which fails too.
        bad = [
            run.label
            for run, gap in zip(runs, gaps, strict=True)
            if not (abs(gap.train) <= args.max_gap and abs(gap.valid) <= args.max_gap)
        ]
        if bad:
            print(f"gap above {args.max_gap:.2%}: {', '.join(bad)}")
            return 1
        print(f"all gaps within {args.max_gap:.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
