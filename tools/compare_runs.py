#!/usr/bin/env python3
"""Compares the loss curves of several runs: a table, a verdict, and a picture or page.

    tools/compare_runs.py runs/bf16 runs/fp8 --output comparison.png
    tools/compare_runs.py runs/bf16 runs/bf16-seed2 runs/blockwise runs/tensorwise --noise bf16-seed2 \\
        --budgets blockwise=0.0025 tensorwise=0.005 --output report.html

The first run is the base. The gap of a run is (its loss - base loss) / base loss over the iterations that both have:
of the training loss as the mean over the last quarter of them (one iteration is noise), of the validation loss at the
last common evaluation. The largest smoothed gap along the curve (where at least half of the window is there) is shown
too, and the 95% confidence interval of the training gap: from the means of blocks of neighbouring iterations, whose
losses hang together.

A run is within its budget when both gaps are at most `budget + noise`, where the noise is the gap of the --noise run:
the base once more with another seed. Exit code 0: all with a budget are, 1: one isn't, 2: a mistake.

Runs that saw other data or other learning rates than the base are named: their gap is not that of the recipes alone.

With --bytes the table also says what a rank of each run holds (static: weights, FP8 copies, gradients, optimizer state,
workspaces; held: by a microbatch for backward) and sends in a step (wire), by the planner's count from the run's
args.json, for GPUs; with --layout "FLAGS" and --gpus N what it would in such a job:

    tools/compare_runs.py runs/blockwise runs/weight-1d --gpus 4 \\
        --layout "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import compare_bytes
import numpy as np

from megafp8.config.tool_parser import ToolParser, check_least, check_output, split_flags
from megafp8.training.run_log import EVENTS_FILE, read_lines, read_metrics

FORMATS = (".html", ".png", ".svg", ".pdf", ".jpg")
"""Of what --output writes: a page, or a picture."""


@dataclass(frozen=True)
class Run:
    """A run's curves: iteration numbers and losses in nats a token, for training and for validation.

    conditions: iteration -> (consumed samples, learning rate), as far as the lines have them. data: fingerprints of the
    documents that were read, where the run has told.
    """

    label: str
    iterations: np.ndarray
    losses: np.ndarray
    valid_iterations: np.ndarray
    valid_losses: np.ndarray
    conditions: dict[int, tuple[float | None, float | None]]
    grad_norms: np.ndarray = field(default_factory=lambda: np.array([]))
    data: list[str] | None = None


@dataclass(frozen=True)
class Gap:
    """Relative differences to the base; NaN where the runs share no such point. interval: half the width of the 95%
    confidence interval of `train`."""

    train: float
    largest: float
    valid: float
    interval: float = math.nan

    def within(self, budget: float) -> bool:
        """False for a NaN gap (nothing in common, or a diverged run)."""
        return abs(self.train) <= budget and abs(self.valid) <= budget


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
        np.array([line.get("grad_norm", math.nan) for line in training], dtype=float),
        data_of(path),
    )


def data_of(path: Path) -> list[str] | None:
    """Fingerprints in the last start's event; None where there is none."""
    events = path / EVENTS_FILE
    lines, _ = read_lines(events) if events.is_file() else ([], [])
    told = [line["data"] for line in lines if line.get("event") == "start" and isinstance(line.get("data"), list)]
    return told[-1] if told else None


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
    if run.data is not None and base.data is not None and run.data != base.data:
        return f"{run.label}: other documents than {base.label}"
    for iteration in sorted(run.conditions.keys() & base.conditions.keys()):
        (samples, rate), (base_samples, base_rate) = run.conditions[iteration], base.conditions[iteration]
        if samples != base_samples:
            return f"{run.label}: {samples} samples at iteration {iteration}, {base.label} {base_samples}"
        if rate != base_rate:
            return f"{run.label}: learning rate {rate:.6g} at iteration {iteration}, {base.label} {base_rate:.6g}"
    return None


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over a centred window of `window` values; towards the ends it narrows on both sides, so that it stays
    centred (else a falling curve would start too low and end too high). NaN where less than half of it is left: a mean
    of one or two values would jump as they do. NaN values (skipped steps) are left out of the means."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    half = np.minimum(window // 2, np.minimum(places, places[::-1]))
    first, last = places - half, places + half + 1
    total, count = sums[last] - sums[first], counts[last] - counts[first]
    wide = half >= (window // 2 + 1) // 2
    return np.divide(total, count, out=np.full(len(values), np.nan), where=wide & (count > 0))


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


def half_interval(differences: np.ndarray) -> float:
    """Half the 95% confidence interval of the mean of a series whose neighbours hang together: the means of about
    sqrt(n) blocks are taken as independent (batch means), with Student's t. NaN for fewer than 8 values."""
    values = differences[np.isfinite(differences)]
    blocks = int(len(values) ** 0.5)
    if len(values) < 8:
        return math.nan
    means = np.array([part.mean() for part in np.array_split(values, blocks)])
    return student_t(blocks - 1) * float(means.std(ddof=1)) / blocks**0.5


def student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t, to 1%."""
    table = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
    return table.get(freedom, 1.96 + 2.72 / freedom)


def gap_of(run: Run, base: Run, window: int) -> Gap:
    common, mine, theirs = np.intersect1d(run.iterations, base.iterations, return_indices=True)
    train = largest = valid = interval = float("nan")
    if len(common):
        tail = max(1, len(common) // 4)
        reference = finite_mean(base.losses[theirs][-tail:])
        train = (finite_mean(run.losses[mine][-tail:]) - reference) / reference
        interval = half_interval((run.losses[mine][-tail:] - base.losses[theirs][-tail:]) / reference)
        curve = np.abs(gap_curve(run, base, window)[1])
        largest = float(curve[np.isfinite(curve)].max(initial=-1.0))
        largest = largest if largest >= 0 else float("nan")
    common, mine, theirs = np.intersect1d(run.valid_iterations, base.valid_iterations, return_indices=True)
    if len(common):
        reference = base.valid_losses[theirs][-1]
        valid = (run.valid_losses[mine][-1] - reference) / reference
    return Gap(float(train), largest, float(valid), interval)


def tail_losses(run: Run, runs: list[Run]) -> np.ndarray:
    """A run's losses in the last quarter of the iterations that all have, so that means can be compared down the table
    also where one starts late or ends early; of its own iterations where no one is common to all."""
    shared = set(run.iterations).intersection(*(other.iterations for other in runs))
    mine = run.losses[np.isin(run.iterations, list(shared))] if shared else run.losses
    return mine[-max(1, len(mine) // 4) :]


def last_common_evaluation(run: Run, base: Run) -> int | None:
    """Its iteration; None where the two share none."""
    common = np.intersect1d(run.valid_iterations, base.valid_iterations)
    return int(common[-1]) if len(common) else None


def valid_loss(run: Run, base: Run) -> float | None:
    """Of the evaluation that the run's gap is of: the last that it shares with the base; else of its own last."""
    if not len(run.valid_losses):
        return None
    common = last_common_evaluation(run, base)
    return float(run.valid_losses[-1] if common is None else run.valid_losses[run.valid_iterations == common][0])


def earlier_evaluation(run: Run, base: Run) -> str | None:
    """Says of a gap that is of an earlier evaluation than the base's last which one that is."""
    common = last_common_evaluation(run, base)
    if common is None or common == base.valid_iterations[-1]:
        return None
    reference = float(base.valid_losses[base.valid_iterations == common][0])
    return f"{run.label}: validation at iteration {common}, where {base.label} had {reference:.4f}"


def table(runs: list[Run], gaps: list[Gap], sizes: list[list[str]] | None = None) -> str:
    """sizes: cells of further columns, `compare_bytes.HEADS`, a row each."""
    width = max(len("run"), *(len(run.label) for run in runs))
    head = f"{'run':{width}}  iterations  train loss  valid loss  train gap  valid gap  largest gap  95% of train gap"
    heads = compare_bytes.HEADS if sizes else ()
    lines = [head + "".join(f"  {name:>12}" for name in heads)]
    lines.append("-" * len(lines[0]))
    for number, (run, gap) in enumerate(zip(runs, gaps, strict=True)):
        losses, evaluated = tail_losses(run, runs), valid_loss(run, runs[0])
        valid = f"{'-':>10}" if evaluated is None else f"{evaluated:10.4f}"
        last = f"{'-':>9}" if last_common_evaluation(run, runs[0]) is None else f"{gap.valid:+9.3%}"
        spread = f"  +-{gap.interval:.3%}" if math.isfinite(gap.interval) else ""
        shown = f"{'(base)':>9}" if run is runs[0] else f"{gap.train:+9.3%}  {last}  {gap.largest:11.3%}{spread}"
        line = f"{run.label:{width}}  {run.iterations[-1]:10d}  {finite_mean(losses):10.4f}  {valid}  {shown}"
        cells = "".join(f"  {cell:>12}" for cell in sizes[number]) if sizes else ""
        lines.append(f"{line:{len(head)}}{cells}" if cells else line)
    return "\n".join(lines)


def check_other(flag: str, label: str, labels: list[str]) -> None:
    """Raises ValueError, for the flag as it was given, unless the label is that of a run after the base."""
    others = ", ".join(labels[1:])
    if label not in labels[1:]:
        there = f"they are {others}" if others else "give more runs, the base first"
        raise ValueError(f"{flag}: no run after the base is called {label!r}; {there}")


def parse_budgets(texts: list[str], labels: list[str], noise: str | None = None) -> dict[str, float]:
    """Label -> budget, from `LABEL=X`. Raises ValueError."""
    budgets = {}
    for text in texts:
        label, equals, value = text.rpartition("=")
        if not equals:
            raise ValueError(f"--budgets {text}: give LABEL=X, such as {text}=0.005")
        check_other(f"--budgets {text}", label, labels)
        if label == noise:
            raise ValueError(f"--budgets {text}: {label} is the --noise run, whose gap is allowed; leave one out")
        try:
            budgets[label] = float(value)
        except ValueError:
            budgets[label] = math.nan
        if not budgets[label] >= 0:
            raise ValueError(f"--budgets {text}: give a share of the loss, 0 or more: 0.005 is half a percent")
    return budgets


def read_arguments(args: argparse.Namespace) -> tuple[list[Run], dict[str, float]]:
    """(runs, label -> budget). Raises ValueError, in one line, for what is wrong."""
    labels = args.labels or short_labels(args.runs)
    if len(labels) != len(args.runs):
        raise ValueError(f"--labels: {len(labels)} names for {len(args.runs)} runs; give one a run")
    if twice := [label for label in args.labels or () if labels.count(label) > 1]:
        raise ValueError(f"--labels {' '.join(labels)}: {twice[0]} is there twice; give each run a name of its own")
    check_least(args, 1, "window")
    if args.max_gap is not None and not args.max_gap >= 0:
        raise ValueError(f"--max-gap {args.max_gap}: give 0 or more")
    if args.noise is not None:
        check_other(f"--noise {args.noise}", args.noise, labels)
    budgets = {} if args.max_gap is None else {n: args.max_gap for n in labels[1:] if n != args.noise}
    budgets |= parse_budgets(args.budgets or [], labels, args.noise)
    check_least(args, 1, "gpus")
    check_output(args.output)
    if args.output is not None and args.output.suffix not in FORMATS:
        raise ValueError(f"--output {args.output}: give a name that ends in one of {', '.join(FORMATS)}")
    return [load_run(path, label) for path, label in zip(args.runs, labels, strict=True)], budgets


def sizes_of(args: argparse.Namespace) -> list[list[str]] | None:
    """Cells of the bytes' columns, where they are asked for. Raises ValueError, in one line."""
    if not (args.bytes or args.layout or args.gpus):
        return None
    layout = split_flags(args.layout or "", "--layout")
    configs = [compare_bytes.arranged(path, layout, args.gpus) for path in args.runs]
    return [compare_bytes.run_bytes(config).cells for config in configs]


def notes_on(runs: list[Run]) -> list[str]:
    """What a reader must know of the gaps."""
    others = runs[1:]
    unlike = [f"not the same conditions: {note}" for run in others if (note := unlike_base(run, runs[0]))]
    return [f"note: {n}" for n in (*unlike, *filter(None, (earlier_evaluation(run, runs[0]) for run in others)))]


def verdicts(runs: list[Run], gaps: list[Gap], budgets: dict[str, float], noise: str | None) -> list[tuple[bool, str]]:
    """(within, line) of every run that has a budget."""
    by_label = {run.label: gap for run, gap in zip(runs, gaps, strict=True)}
    spread = max(abs(by_label[noise].train), abs(by_label[noise].valid)) if noise else 0.0
    found = []
    for label, budget in budgets.items():
        good = by_label[label].within(budget + spread)
        beside = f" + {spread:.3%} between seeds" if noise else ""
        found.append((good, f"{label}: {'within' if good else 'ABOVE'} {budget:.2%}{beside}"))
    return found


def write_output(args: argparse.Namespace, runs: list[Run], window: int, text: str, notes: list[str]) -> None:
    """A picture, or with the suffix .html a page. Raises OSError or ValueError (no such format)."""
    from compare_report import draw, page

    options = {"smooth": smooth, "gap_curve": gap_curve, "paths": args.runs, "noise": args.noise}
    if args.output.suffix != ".html":
        draw(runs, window, args.output, **options)
        return
    picture = io.BytesIO()
    draw(runs, window, picture, **options)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page(f"Runs against {runs[0].label}", text, notes, picture.getvalue()), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="--log-dir of a run; the first is the base")
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="names in table and picture (default: from paths)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="picture (.png), or page (.html), to write")
    parser.add_argument(
        "--window", type=int, metavar="N", help="iterations of smoothing (default: a fifteenth of a run, 21 at most)"
    )
    parser.add_argument(
        "--max-gap", type=float, metavar="X", help="exit with 1 when |train gap| or |valid gap| of a run is above X"
    )
    parser.add_argument("--budgets", nargs="+", metavar="LABEL=X", help="the same for single runs, by label")
    parser.add_argument("--noise", metavar="LABEL", help="the base with another seed: its gap is allowed on top")
    parser.add_argument("--bytes", action="store_true", help="also what a rank holds and sends, from args.json")
    parser.add_argument("--layout", metavar='"FLAGS"', help="--bytes, as if the runs had these flags, too")
    parser.add_argument("--gpus", type=int, metavar="N", help="--bytes, of a job of so many (default: the run's own)")
    args = parser.parse_args(argv)
    try:
        runs, budgets = read_arguments(args)
        sizes = sizes_of(args)
    except ValueError as error:
        print(f"compare_runs.py: error: {error}", file=sys.stderr)
        return 2
    window = args.window or default_window(runs)
    gaps = [gap_of(run, runs[0], window) for run in runs]
    text = table(runs, gaps, sizes)
    found = verdicts(runs, gaps, budgets, args.noise)
    notes = [*notes_on(runs), *(line for _, line in found)]
    print("\n".join([text, *notes]))
    if args.output:
        try:
            write_output(args, runs, window, text, notes)
        except OSError as error:
            print(f"compare_runs.py: error: --output {args.output}: {error}", file=sys.stderr)
            return 2
        print(f"{'page' if args.output.suffix == '.html' else 'picture'}: {args.output}")
    return int(not all(good for good, _ in found))


if __name__ == "__main__":
    sys.exit(main())
