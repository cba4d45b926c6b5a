#!/usr/bin/env python3
"""Writes one HTML page about runs: curves, events, FP8 statistics, arguments and what differs between them.

    tools/report.py runs/blockwise --output report.html
    tools/report.py runs/bf16 runs/blockwise runs/tensorwise --labels bf16 blockwise tensorwise --output report.html

The page is one file without network access: mail it, or keep it beside the run. What a run lacks (validation, the
monitor, arguments) is left out or named; a run that is still going on is read as far as it has come. Exit codes: 0 the
page was written, 2 a mistake.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from compare_runs import short_labels
from report_data import load_run
from report_page import page

from megafp8.config.publish import publish
from megafp8.config.tool_parser import ToolParser


def default_window(lengths: list[int]) -> int:
    """Iterations of smoothing: odd, a thirtieth of the longest run, 51 at most."""
    return min(51, max([0, *lengths]) // 30 // 2 * 2 + 1)


def report(args: argparse.Namespace) -> str:
    """The page, and nothing written yet. Raises ValueError, in one line, for what is wrong."""
    labels = args.labels or short_labels(args.runs)
    if len(labels) != len(args.runs):
        raise ValueError(f"--labels: {len(labels)} names for {len(args.runs)} runs; give one a run")
    if args.window is not None and args.window < 1:
        raise ValueError(f"--window {args.window}: give 1 (no smoothing) or more")
    if args.output.is_dir():
        raise ValueError(f"--output {args.output}: is a directory; give a file, e.g. {args.output / 'report.html'}")
    if args.output.suffix not in ("", ".html", ".htm"):
        raise ValueError(f"--output {args.output}: the page is HTML; give {args.output.with_suffix('.html')}")
    runs = [load_run(path, label) for path, label in zip(args.runs, labels, strict=True)]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("matplotlib is not installed; pip install matplotlib") from None
    for run in runs:
        for note in run.notes:
            print(f"note: {run.label}: {note}")
    return page(runs, args.window or default_window([len(run.training) for run in runs]))


def main(argv: list[str] | None = None) -> int:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="--log-dir of a run")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help="page to write")
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="names of the runs (default: from paths)")
    parser.add_argument(
        "--window", type=int, metavar="N", help="iterations of smoothing (default: a thirtieth of a run, 51 at most)"
    )
    args = parser.parse_args(argv)
    try:
        text = report(args)
        publish(args.output, text)
    except (OSError, ValueError) as error:
        print(f"report.py: error: {error}", file=sys.stderr)
        return 2
    print(f"page: {args.output} ({len(text.encode()) / 1024:.0f} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
