#!/usr/bin/env python3
"""Plans of a job, from its flags, before anything runs.

    python tools/plan.py memory FLAGS                              what a rank of every stage holds
    python tools/plan.py memory --output memory.png FLAGS          the same as a picture
    python tools/plan.py forecast --gpus 64 --cluster examples/clusters/h100_80gb.toml FLAGS
    python tools/plan.py search --gpus 64 --cluster examples/clusters/h100_80gb.toml FLAGS
    python tools/plan.py schedule --pipeline-model-parallel-size 4 --microbatches 8 --schedule zero-bubble

FLAGS are those of a training (`pretrain_gpt.py --help`), --config included.

`memory` prints what each pipeline stage's ranks will hold, and what other precisions of weights and optimizer state
would hold instead; --measure builds the job on this machine's GPU, in one process, runs three steps without data and
prints what CUDA's allocator counts beside the forecast, and which lines of code held the most at the peak. `forecast`
adds the time of a step on a cluster, tokens a second, MFU, and what a rank sends. `search` tries the layouts that the
flags leave open, in BF16 and in FP8, and lists the fastest that fit; exit code 1: none does. `schedule` prints what
every pipeline rank does and when; `F3.1` is the forward of microbatch 3 in the rank's second virtual stage, B a
backward, I one without weight gradients, W those.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import plan_schedule

from megafp8.config import Config
from megafp8.config import parse_args as parse_flags
from megafp8.config.tool_parser import ToolParser, check_output

if TYPE_CHECKING:
    from megafp8.plan.memory import MemoryPlan


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The tool's own flags, and those of a training."""
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    plan_schedule.add_flags(commands.add_parser("schedule", help="order, bubble and activations of a pipeline"))
    for name, what in (("memory", "what a rank of every stage holds"), ("forecast", "time of a step on a cluster"),
                       ("search", "the fastest layouts that fit")):  # fmt: skip
        command = commands.add_parser(name, help=f"{what}; takes the flags of pretrain_gpt.py", allow_abbrev=False)
        add = command.add_argument
        add("--gpus", type=int, metavar="N", required=name == "search", help="in all (default: WORLD_SIZE, or 1)")
        add("--cluster", type=Path, metavar="FILE", required=name != "memory", help="see examples/clusters")
        if name != "search":
            add("--output", type=Path, metavar="FILE.png", help="picture of memory by stage (needs matplotlib)")
        if name == "memory":
            add("--measure", action="store_true", help="also build it on this GPU and measure")
        if name == "search":
            add("--top", type=int, default=5, metavar="N", help="layouts to list (default: 5)")
    args, rest = parser.parse_known_args(argv)
    if args.command == "schedule" and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args, rest


def configuration(args: argparse.Namespace, rest: Sequence[str]) -> Config:
    """The training's configuration, vocabulary included. Raises ValueError as `pretrain_gpt.py` does."""
    from megafp8.plan.comparison import with_vocabulary

    return with_vocabulary(parse_flags(list(rest), env=_environment(args.gpus), check_files=False))


def _environment(gpus: int | None) -> dict[str, str]:
    if gpus is None:
        return dict(os.environ)
    if gpus < 1:
        raise ValueError(f"--gpus {gpus}: give 1 or more")
    return {"WORLD_SIZE": str(gpus)}


def memory(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    from megafp8.plan.comparison import comparison_lines
    from megafp8.plan.measured import measured_lines
    from megafp8.plan.memory import plan_stages
    from megafp8.plan.summary import memory_lines, small_linear_lines

    config = configuration(args, rest)
    plans = plan_stages(config)
    lines = [
        "memory of one rank (estimate)",
        *memory_lines(config, plans),
        *small_linear_lines(config),
        "",
        *comparison_lines(config),
    ]
    lines += ["", *measured_lines(config)] if args.measure else []
    return lines + _picture(args, config, plans)


def forecast(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    from megafp8.plan.cluster import read_cluster
    from megafp8.plan.communication import step_traffic
    from megafp8.plan.forecast import forecast as forecast_of
    from megafp8.plan.forecast_report import forecast_lines
    from megafp8.plan.memory import plan_stages
    from megafp8.plan.summary import small_linear_lines, stage_memory_lines

    cluster, config = read_cluster(args.cluster), configuration(args, rest)
    plans = plan_stages(config)
    largest = max(range(len(plans)), key=lambda stage: plans[stage].total)
    lines = forecast_lines(forecast_of(config, cluster), plans, step_traffic(config, largest))
    lines += small_linear_lines(config)
    return [*lines, "", "== memory", *stage_memory_lines(plans), *_picture(args, config, plans)]


class NoLayoutError(Exception):
    """A search has found none that fits. Its argument: lines that say why."""


def search(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    from megafp8.plan.cluster import read_cluster
    from megafp8.plan.search import PRECISIONS, Search, given_flags, precisions
    from megafp8.plan.search_report import contrast_lines, layout_flags, search_lines
    from megafp8.plan.summary import small_linear_lines

    cluster, (given, foreign) = read_cluster(args.cluster), given_flags(rest)
    _environment(args.gpus)
    found = {}
    for name, values in precisions(given).items():
        job = Search.of(given, cluster, args.gpus, foreign=foreign, keep=max(1, args.top))
        found[name] = job, job.run(values, _progress(name))
    lines = search_lines(found, cluster, args.gpus)
    if not any(layouts for _, layouts in found.values()):
        raise NoLayoutError(lines)
    bf16, fp8 = (found[name][1] for name in PRECISIONS)
    lines += ["", *contrast_lines(found[PRECISIONS[0]][0], bf16, fp8)]
    for name, (_, layouts) in found.items():
        if layouts:
            best = layouts[0].config
            lines += ["", f"{name}: {' '.join(layout_flags(best))}", *small_linear_lines(best)]
    return lines


def _progress(title: str):
    """Told (number, of): a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda number, total: None
    from tqdm import tqdm

    bar = tqdm(desc=title, unit=" layouts", leave=False)

    def step(number: int, total: int) -> None:
        bar.total = total
        bar.update(number - bar.n)

    return step


def _picture(args: argparse.Namespace, config: Config, plans: list[MemoryPlan]) -> list[str]:
    """FP8 beside the same job in BF16."""
    if args.output is None:
        return []
    from megafp8.plan.cluster import read_cluster
    from megafp8.plan.comparison import in_bf16
    from megafp8.plan.memory import plan_stages
    from megafp8.plan.picture import draw_memory

    limit = None if args.cluster is None else read_cluster(args.cluster).usable_bytes
    shown = (
        {"FP8": plans, "the same in BF16": plan_stages(in_bf16(config))} if config.fp8.enabled else {"memory": plans}
    )
    draw_memory(shown, args.output, limit)
    return [f"wrote {args.output}"]


COMMANDS = {"memory": memory, "forecast": forecast, "search": search}


def check_picture(output: Path | None) -> None:
    """Raises ValueError for a picture that can't be drawn or written, before the work that it would show."""
    if output is not None and find_spec("matplotlib") is None:
        raise ValueError(f"--output {output} needs matplotlib: pip install matplotlib")
    check_output(output)


def main(argv: list[str] | None = None) -> int:
    args, rest = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        check_picture(getattr(args, "output", None))
        lines = plan_schedule.run(args) if args.command == "schedule" else COMMANDS[args.command](args, rest)
    except ValueError as error:
        print(f"plan.py: error: {error}", file=sys.stderr)
        return 2
    except NoLayoutError as error:
        print("\n".join(error.args[0]), flush=True)
        print(f"plan.py: no layout of {args.gpus} GPU(s) fits, in BF16 or in FP8", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
