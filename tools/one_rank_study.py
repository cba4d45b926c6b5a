#!/usr/bin/env python3
"""One rank each of jobs of hundreds of GPUs, alone on one GPU: memory and time, measured beside the plan.

    python tools/one_rank_study.py --output runs/one_rank.json      # one H200; about 2 minutes
    python tools/one_rank_study.py --plan-only                      # the plan alone: no GPU needed
    python tools/one_rank_study.py --only "405B, middle"

The jobs are those of examples/, with more flags where a study says so; ranks are told by `--fake-process-group`
(docs/scaling.md). Exit code 1 where a peak is off by more than 10%, or a study fails.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafp8.config.publish import publish
from megafp8.config.tool_parser import ToolParser, check_output

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.10
GIB = 1 << 30
LLAMA_405B = (
    "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --num-query-groups 8 "
    "--tensor-model-parallel-size 8 --context-parallel-size 1 --pipeline-model-parallel-size 16 "
    "--num-layers-per-virtual-pipeline-stage 8 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split --global-batch-size 128"
)
"""Over the flags of examples/llama3_70b.sh: 16 stages of 8 layers, the ends of 7; 8 replicas on 1024 GPUs."""
DEEPSEEK = "--global-batch-size 1024"
"""Over those of examples/deepseek_v3.sh: 16 microbatches for each of 64 replicas."""

TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"


@dataclass(frozen=True)
class Study:
    """script: in examples/; nodes: of 8 GPUs; rank: of the job; more: flags; precision: fp8 or bf16."""

    name: str
    script: str
    nodes: int
    rank: int
    more: str
    precision: str = "fp8"


STUDIES = (
    Study("DeepSeek-V3, first, FP8", "deepseek_v3", 128, 0, DEEPSEEK),
    Study("DeepSeek-V3, middle, FP8", "deepseek_v3", 128, 500, DEEPSEEK),
    Study("DeepSeek-V3, middle, BF16", "deepseek_v3", 128, 500, DEEPSEEK, "bf16"),
    Study("DeepSeek-V3, last, FP8", "deepseek_v3", 128, 1023, DEEPSEEK),
    Study("Llama-3-405B, first, FP8", "llama3_70b", 128, 0, LLAMA_405B),
    Study("Llama-3-405B, middle, tensorwise", "llama3_70b", 128, 520, f"{LLAMA_405B} {TENSORWISE}"),
    Study("Llama-3-405B, middle, BF16", "llama3_70b", 128, 520, LLAMA_405B, "bf16"),
    Study("Llama-3-405B, last, FP8", "llama3_70b", 128, 1020, LLAMA_405B),
)  # fmt: skip


def flags_of(study: Study) -> list[str]:
    """The arguments that the example script would give to pretrain_gpt.py."""
    env = os.environ | {"ONE_RANK": str(study.rank), "NNODES": str(study.nodes), "PYTHON": "echo"}
    env |= {"PRECISION": study.precision, "GPUS_PER_NODE": "8"}
    command = ["bash", str(ROOT / "examples" / f"{study.script}.sh"), *shlex.split(study.more)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()[1:]  # none of these scripts' arguments has a space


def run(study: Study, *, plan_only: bool, holders: bool = False) -> dict[str, Any]:
    """The study's row. Bytes and seconds; without a measurement None. holders: with a page on what held the peak."""
    from megafp8.config import parse_args as parse_flags
    from megafp8.plan.at_peak import at_peak, peak_lines, recorded
    from megafp8.plan.comparison import with_vocabulary
    from megafp8.plan.measured import owner_lines
    from megafp8.plan.memory import plan_memory
    from megafp8.training.build import pick_device
    from megafp8.training.one_rank import measure_one_rank
    from megafp8.training.one_rank_report import planned_seconds, traffic_differs

    config = with_vocabulary(parse_flags(flags_of(study), env={"WORLD_SIZE": str(8 * study.nodes)}))
    stage = study.rank // (8 * study.nodes // config.parallel.pipeline_model_parallel_size)
    device = "cuda" if not plan_only else "cpu"
    plan = plan_memory(config, device, stage)
    row = {"name": study.name, "rank": study.rank, "of": 8 * study.nodes, "stage": stage}
    row |= {"static_planned": plan.static, "peak_planned": plan.total, "owners": plan.owners}
    if plan_only:
        return row
    device = pick_device("cuda")
    with recorded() if holders else nullcontext():
        measured = measure_one_rank(config, device, study.rank)
        page = [*owner_lines(plan), *peak_lines(at_peak(device))] if holders else []
    return row | {
        "page": page,
        "static_measured": measured.static,
        "peak_measured": measured.peak,
        "seconds_planned": planned_seconds(config, device, stage),
        "seconds_measured": measured.seconds,
        "seconds_copying": measured.copying,
        "finite": measured.finite,
        "traffic_as_planned": not traffic_differs(config, measured),
    }


def in_process(study: Study, how: dict[str, bool], pipe: Any) -> None:
    try:
        begin = time.perf_counter()
        pipe.send(run(study, **how) | {"wall_seconds": time.perf_counter() - begin})
    except BaseException:
        pipe.send({"name": study.name, "error": traceback.format_exc()})


def fresh(study: Study, how: dict[str, bool], timeout: float) -> dict[str, Any]:
    """The row, from a process of its own, with a CUDA context of its own. how: keywords of `run`."""
    fork = multiprocessing.get_context("fork")  # torch is imported once, before
    ours, theirs = fork.Pipe()
    process = fork.Process(target=in_process, args=(study, how, theirs))
    process.start()
    theirs.close()
    try:
        row = ours.recv() if ours.poll(timeout) else {"name": study.name, "error": f"longer than {timeout:g} s"}
    except EOFError:
        row = {"name": study.name, "error": "the process ended"}
    process.kill()
    process.join()
    return row


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown; GiB and ms."""
    lines = [
        "| study | peak planned, GiB | measured | off | stays planned | measured | off | step planned, ms | measured |",
        "|---|" + "---:|" * 8,
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['name']} | failed: {row['error'].strip().splitlines()[-1][:80]} |" + " |" * 7)
            continue
        cells = [row["name"]]
        for what in ("peak", "static"):
            planned, measured = row[f"{what}_planned"], row.get(f"{what}_measured")
            cells += [f"{planned / GIB:.1f}"]
            cells += ["-", "-"] if measured is None else [f"{measured / GIB:.1f}", f"{planned / measured - 1:+.1%}"]
        for what in ("seconds_planned", "seconds_measured"):
            cells.append("-" if row.get(what) is None else f"{1e3 * row[what]:,.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def is_good(row: dict[str, Any]) -> bool:
    if "error" in row:
        return False
    measured = row.get("peak_measured")
    near = measured is None or abs(row["peak_planned"] / measured - 1) <= TOLERANCE
    return near and row.get("traffic_as_planned", True) and row.get("finite", True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", metavar="TEXT", help="studies whose name contains one of these")
    add("--plan-only", action="store_true", help="print the plan, run nothing")
    add("--holders", action="store_true", help="print what the plan's peak is made of, and what held the measured one")
    add("--output", type=Path, metavar="FILE.json", help="rows, unrounded")
    add("--timeout", type=float, default=120.0, metavar="SECONDS", help="of one study (default: 120)")
    args = parser.parse_args(argv)
    args.studies = [s for s in STUDIES if args.only is None or any(text in s.name for text in args.only)]
    if not args.studies:
        names = ", ".join(f"'{study.name}'" for study in STUDIES)
        parser.error(f"--only {' '.join(args.only)}: no study has such a name; there are {names}")
    if not args.timeout > 0:
        parser.error(f"--timeout {args.timeout:g}: give seconds above 0")
    if args.holders and args.plan_only:
        parser.error("--holders: with --plan-only nothing is measured; leave one of them out")
    try:
        check_output(args.output)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import megafp8.training.one_rank  # noqa: F401 -- before studies fork; takes no GPU

    rows = []
    for study in args.studies:
        how = {"plan_only": args.plan_only, "holders": args.holders}
        rows.append(fresh(study, how, args.timeout))
        print("\n".join([table(rows[-1:])[-1], *rows[-1].get("page", ())]), flush=True)
        if "error" in rows[-1]:
            print(rows[-1]["error"], file=sys.stderr, flush=True)
    print("\n".join(["", *table(rows)]))
    if args.output is not None:
        publish(args.output, json.dumps(rows, indent=1) + "\n")
    return 0 if all(map(is_good, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
