#!/usr/bin/env python3
"""Compares the loss curves of several runs: a table, and a picture.

    tools/compare_runs.py runs/bf16 runs/fp8 --output comparison.png

The first run is the base. The gap of a run is (its loss - base loss) / base loss over the iterations that both have:
of the training loss as the mean over the last quarter of them (one iteration is noise), of the validation loss at the
last common evaluation. The largest smoothed gap along the curve is shown too. Runs that saw other data or other
learning rates than the base are named: their gap is not that of the recipes alone.
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
    """A run's curves: iteration numbers and losses in nats a token, for training and for validation.

    conditions: iteration -> (consumed samples, learning rate), as far as the lines have them.
    """

    label: str
    iterations: np.ndarray
    losses: np.ndarray
    valid_iterations: np.ndarray
    valid_losses: np.ndarray
    conditions: dict[int, tuple[float | None, float | None]]


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
        {line["iteration"]: (line.get("consumed_samples"), line.get("learning_rate")) for line in training},
    )


def short_labels(paths: list[Path]) -> list[str]:
    """The paths without the directories that all have in common."""
    parts = [path.resolve().parts for path in paths]
    common = 0
    while common < min(map(len, parts)) - 1 and len({p[common] for p in parts}) == 1:
        common += 1
    return [str(Path(*p[common:])) for p in parts]


def default_window(runs: list[Run]) -> int:
    """Odd, a fifteenth of the shortest run, 21 at most: a wider one would flatten a short run's fall."""
    return min(21, min(len(run.iterations) for run in runs) // 15 // 2 * 2 + 1)


def unlike_base(run: Run, base: Run) -> str | None:
    """Says from which iteration on a run's data or learning rate differs from the base's; None when neither does."""
    for iteration in sorted(run.conditions.keys() & base.conditions.keys()):
        (samples, rate), (base_samples, base_rate) = run.conditions[iteration], base.conditions[iteration]
        if samples != base_samples:
            return f"{run.label}: {samples} samples at iteration {iteration}, {base.label} {base_samples}"
        if rate != base_rate:
            return f"{run.label}: learning rate {rate:.6g} at iteration {iteration}, {base.label} {base_rate:.6g}"
    return None


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over a centred window of `window` values; towards the ends it narrows on both sides, so that it stays
    centred (else a falling curve would start too low and end too high). NaN values (skipped steps) are left out."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    half = np.minimum(window // 2, np.minimum(places, places[::-1]))
    first, last = places - half, places + half + 1
    total, count = sums[last] - sums[first], counts[last] - counts[first]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def finite_mean(values: np.ndarray) -> float:
    """Mean of the finite values; NaN where there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


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
        reference = finite_mean(base.losses[theirs][-tail:])
        train = (finite_mean(run.losses[mine][-tail:]) - reference) / reference
        curve, half = np.abs(gap_curve(run, base, window)[1]), window // 2
        curve = curve[half : len(curve) - half] if len(curve) > 2 * half else curve
        largest = float(curve[np.isfinite(curve)].max(initial=-1.0))
        largest = largest if largest >= 0 else float("nan")
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
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(2.2, 1), constrained_layout=True
    )
    for number, run in enumerate(runs):
        colour = f"C{number}"
        top.plot(run.iterations, run.losses, color=colour, alpha=0.3, linewidth=0.8)
        top.plot(run.iterations, smooth(run.losses, window), color=colour, label=run.label)
        top.plot(run.valid_iterations, run.valid_losses, color=colour, marker="o", linestyle="none", markersize=5)
        if number:
            x, gap = gap_curve(run, runs[0], window)
            bottom.plot(x, 100 * gap, color=colour, label=run.label)
    top.plot([], [], color="grey", marker="o", linestyle="none", label="validation")
    if window > 1:
        top.plot([], [], color="grey", label=f"training, mean over {window} iterations")
        top.plot([], [], color="grey", alpha=0.4, linewidth=0.8, label="training, each iteration")
    top.set_ylabel("loss (nats a token)")
    top.legend()
    top.grid(alpha=0.3)
    bottom.axhline(0, color="C0", linewidth=1)
    bottom.set_title(f"training loss relative to {runs[0].label} (above 0: worse)", fontsize="medium")
    bottom.set_ylabel("gap (%)")
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
        common = np.isin(run.valid_iterations, runs[0].valid_iterations).any()
        last = f"{gap.valid:+9.3%}" if common else f"{'-':>9}"
        shown = f"{'(base)':>9}" if run is runs[0] else f"{gap.train:+9.3%}  {last}  {gap.largest:11.3%}"
        lines.append(
            f"{run.label:{width}}  {run.iterations[-1]:10d}  {finite_mean(run.losses[-tail:]):10.4f}  {valid}  {shown}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="--log-dir of a run; the first is the base")
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="names in table and picture (default: from paths)")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="picture to write (needs matplotlib)")
    parser.add_argument(
        "--window", type=int, metavar="N", help="iterations of smoothing (default: a fifteenth of a run, 21 at most)"
    )
    parser.add_argument(
        "--max-gap", type=float, metavar="X", help="exit with 1 when |train gap| or |valid gap| of a run is above X"
    )
    args = parser.parse_args(argv)
    try:
        labels = args.labels or short_labels(args.runs)
        if len(labels) != len(args.runs):
            raise ValueError(f"--labels: {len(labels)} names for {len(args.runs)} runs; give one a run")
        if args.window is not None and args.window < 1:
            raise ValueError(f"--window {args.window}: give 1 (no smoothing) or more")
        if args.max_gap is not None and not args.max_gap >= 0:
            raise ValueError(f"--max-gap {args.max_gap}: give 0 or more")
        runs = [load_run(path, label) for path, label in zip(args.runs, labels, strict=True)]
    except ValueError as error:
        print(f"compare_runs.py: error: {error}", file=sys.stderr)
        return 2
    window = args.window or default_window(runs)
    gaps = [gap_of(run, runs[0], window) for run in runs]
    print(table(runs, gaps))
    for note in filter(None, (unlike_base(run, runs[0]) for run in runs[1:])):
        print(f"note: not the same conditions: {note}")
    if args.output:
        try:
            draw(runs, window, args.output)
        except (OSError, ValueError) as error:  # ValueError: matplotlib knows no such format
            print(f"compare_runs.py: error: --output {args.output}: {error}", file=sys.stderr)
            return 2
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
