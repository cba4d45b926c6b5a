#!/usr/bin/env python3
"""Weak scaling on the CPU: what each rank sends when a job grows and a rank's share of it stays, counted and planned.

    python tools/weak_scaling.py --output runs/scaling                 # 1, 2, 4, 8 and 16 ranks (minutes)
    python tools/weak_scaling.py --ranks 2 4 --layouts data experts    # a part of it

Ranks are processes of this machine, over gloo. In each layout one axis grows, and with it the batch, the model or the
sequence. Every rank takes two steps of a tiny model; the second one's bytes and messages are counted where they are
handed to torch.distributed (`megafp8.meter`), and compared with the plan (`megafp8.plan.communication`) by kind and
group. Exit code 1 where they differ anywhere.

Writes OUTPUT.json and OUTPUT.png, and prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from datetime import date
from pathlib import Path
from typing import Any

from megafp8.config.publish import publish, writable_directory
from megafp8.config.tool_parser import ToolParser

BASE = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 8,
    "seq_length": 64,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 2,
    "lr": 1e-3,
    "bf16": True,
    "fp8_format": "e4m3",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,
    "device": "cpu",
}
VOCABULARY = 256


def data(n: int) -> dict[str, Any]:
    """Replicas with a sharded optimizer; the global batch grows."""
    return {"use_distributed_optimizer": True, "global_batch_size": 2 * n}


def tensor(n: int) -> dict[str, Any]:
    """Tensor and sequence parallelism; heads and MLP grow, whose parts stay as wide."""
    return {
        "tensor_model_parallel_size": n,
        "sequence_parallel": True,
        "num_attention_heads": 8 * n,
        "kv_channels": 16,
        "ffn_hidden_size": 256 * n,
    }


def pipeline(n: int) -> dict[str, Any]:
    """Stages of two layers; the model grows."""
    return {"pipeline_model_parallel_size": n, "num_layers": 2 * n}


def context(n: int) -> dict[str, Any]:
    """Sequences that ranks share; they grow."""
    return {"context_parallel_size": n, "seq_length": 64 * n}


def experts(n: int) -> dict[str, Any]:
    """Experts on all ranks, tokens in FP8; experts and the global batch grow."""
    return {
        "expert_model_parallel_size": n,
        "num_experts": 4 * n,
        "moe_ffn_hidden_size": 128,
        "moe_router_force_load_balancing": True,
        "moe_fp8_dispatch": n > 1,
        "global_batch_size": 2 * n,
    }


def mixed(n: int) -> dict[str, Any]:
    """Two stages of two tensor-parallel ranks, then replicas, with experts over all ranks of a stage."""
    tp, pp = min(n, 2), min(max(n // 2, 1), 2)
    replicas = n // (tp * pp)
    return {
        "tensor_model_parallel_size": tp,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": pp,
        "num_layers": 2 * pp,
        "expert_model_parallel_size": tp * replicas,
        "expert_tensor_parallel_size": 1,
        "num_experts": 4 * tp * replicas,
        "moe_ffn_hidden_size": 128,
        "moe_router_force_load_balancing": True,
        "use_distributed_optimizer": True,
        "global_batch_size": 2 * replicas,
    }


LAYOUTS = {f.__name__: f for f in (data, tensor, pipeline, context, experts, mixed)}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N", help="(default: 1 2 4 8 16)")
    add("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS, help="(default: all)")
    add("--output", type=Path, metavar="PREFIX", help="of the files to write: PREFIX.json, PREFIX.png")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="of one job (default: 600)")
    args = parser.parse_args(argv)
    if min(args.ranks) < 1 or any(n & (n - 1) for n in args.ranks):
        parser.error(f"--ranks {' '.join(map(str, args.ranks))}: give powers of two")
    if not args.timeout > 0:
        parser.error(f"--timeout {args.timeout:g}: give seconds above 0")
    if args.output is not None and not writable_directory(args.output.parent):
        parser.error(f"--output {args.output}: can't write there; give another prefix")
    return args


def one_process(rank: int, world: int, flags: dict[str, Any], store: str, pipe: Any) -> None:
    """One rank's two steps. Sends {"sent": ..., "planned": ..., "seconds": ...}, or the error."""
    import torch
    import torch.distributed as dist

    from megafp8.config import build_config, with_vocab_size
    from megafp8.meter import Meter
    from megafp8.parallel import build_parallel
    from megafp8.plan.communication import by_kind, step_traffic
    from megafp8.training.bare_job import BareJob

    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
        config = with_vocab_size(build_config(**BASE | flags), VOCABULARY)
        if world > 1:
            dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        meter = Meter()
        parallel = build_parallel(config, "cpu", meter=meter)
        job = BareJob(config, parallel, torch.device("cpu"))
        job.step(1)
        before, begin = meter.copy(), time.perf_counter()
        job.step(2)
        seconds, sent = time.perf_counter() - begin, meter.since(before)
        place = rank % (world // config.parallel.pipeline_model_parallel_size)
        planned = by_kind(step_traffic(config, parallel.pp.rank, place))
        wire = sum(t.wire_bytes for t in planned.values())
        numbers = {key: (t.bytes, t.messages) for key, t in planned.items()}
        pipe.send({"sent": sent, "planned": numbers, "wire": wire, "seconds": seconds})
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        pipe.send({"error": traceback.format_exc()})
        raise


def run(world: int, flags: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """What each rank found. Raises RuntimeError with the first error, TimeoutError after `timeout` seconds."""
    fork = multiprocessing.get_context("fork")  # torch is imported once, before
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=one_process, args=(rank, world, flags, f"{folder}/store", theirs))
            process.start()
            ranks.append((process, ours))
        deadline, found = time.monotonic() + timeout, []
        try:
            for rank, (_, pipe) in enumerate(ranks):
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"rank {rank} of {world} took longer than {timeout:g} s (--timeout)")
                found.append(pipe.recv())
                if "error" in found[-1]:
                    raise RuntimeError(f"rank {rank} of {world}:\n{found[-1]['error']}")
        except BaseException:
            for process, _ in ranks:
                process.kill()
            raise
        finally:
            for process, _ in ranks:
                process.join()
    return found


def row_of(layout: str, world: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table: means over the ranks; what each kind sends, of the rank that sends most."""

    def total(which: str, number: int) -> list[int]:
        return [sum(value[number] for value in rank[which].values()) for rank in found]

    most = max(found, key=lambda rank: sum(size for size, _ in rank["sent"].values()))
    return {
        "layout": layout,
        "ranks": world,
        "bytes_counted": statistics.mean(total("sent", 0)),
        "bytes_planned": statistics.mean(total("planned", 0)),
        "messages_counted": statistics.mean(total("sent", 1)),
        "messages_planned": statistics.mean(total("planned", 1)),
        "wire_bytes_planned": statistics.mean(rank["wire"] for rank in found),
        "equal_on_all_ranks": all(rank["sent"] == rank["planned"] for rank in found),
        "by_kind": {f"{kind} over {group}": list(value) for (kind, group), value in most["sent"].items()},
        "step_seconds": max(rank["seconds"] for rank in found),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    head = ["layout", "ranks", "KiB counted", "KiB planned", "messages counted", "planned", "ring, KiB", "equal"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 2) + "---|"]
    for row in rows:
        sizes = (row["bytes_counted"] / 1024, row["bytes_planned"] / 1024)
        counts = (row["messages_counted"], row["messages_planned"])
        cells = [row["layout"], str(row["ranks"]), *(f"{x:,.1f}" for x in sizes), *(f"{x:,.1f}" for x in counts)]
        cells += [f"{row['wire_bytes_planned'] / 1024:,.1f}", "yes" if row["equal_on_all_ranks"] else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bytes and messages a rank over the number of ranks: lines are planned, dots counted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5))
    for panel, what, scale, label in (
        (panels[0], "bytes", 1024, "KiB handed to collectives, a rank and step"),
        (panels[1], "messages", 1, "messages, a rank and step"),
    ):
        for number, layout in enumerate(dict.fromkeys(row["layout"] for row in rows)):
            own = [row for row in rows if row["layout"] == layout and row["ranks"] > 1]
            ranks = [row["ranks"] for row in own]
            panel.plot(ranks, [row[f"{what}_planned"] / scale for row in own], color=f"C{number}", label=layout)
            panel.plot(ranks, [row[f"{what}_counted"] / scale for row in own], "o", color=f"C{number}")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        every = sorted({row["ranks"] for row in rows if row["ranks"] > 1})
        panel.set_xticks(every, [str(n) for n in every])
        panel.set(xlabel="ranks", ylabel=label)
        panel.grid(alpha=0.3, which="both")
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, title="lines: planned; dots: counted", loc="upper center", ncols=len(names), fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.88))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def machine() -> dict[str, str]:
    import torch

    return {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPUs ({platform.processor() or platform.machine()})",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    import megafp8.training.bare_job  # noqa: F401 -- before ranks fork

    rows = []
    for layout in args.layouts:
        for world in args.ranks:
            rows.append(row_of(layout, world, run(world, LAYOUTS[layout](world), args.timeout)))
            print(table(rows[-1:])[-1], flush=True)
    report = {**machine(), "rows": rows}
    print("\n".join(["", *table(rows), "", ", ".join(f"{k} {v}" for k, v in report.items() if k != "rows")]))
    if args.output is not None:
        publish(f"{args.output}.json", json.dumps(report, indent=1) + "\n")
        if max(args.ranks) > 1:  # one alone sends nothing
            draw(rows, Path(f"{args.output}.png"))
    return 0 if all(row["equal_on_all_ranks"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
