"""Layouts that a search found, as tables: BF16 and FP8 side by side, and what BF16 costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megafp8.config import Config
from megafp8.config.config import field_table, flag_of
from megafp8.config.pipeline import chunks_per_rank
from megafp8.plan.cluster import Cluster
from megafp8.plan.memory import GIB, plan_stages
from megafp8.plan.search import ALWAYS, FP8_FLAGS, PIPELINE_FLAGS, RECOMPUTE_FLAGS, Found, Search

SHOWN = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel",
         "expert_model_parallel_size", "expert_tensor_parallel_size", "micro_batch_size"}  # fmt: skip

ONE = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"}
"""Sizes that are 1 unless they are given."""


def search_lines(found: Mapping[str, tuple[Search, Sequence[Found]]], cluster: Cluster, gpus: int) -> list[str]:
    """found: precision in words -> its search and the layouts, best first."""
    usable = cluster.usable_bytes / GIB
    lines = [f"{gpus:,} GPUs: {cluster.name}; {usable:.1f} GiB of each for tensors"]
    for precision, (search, layouts) in found.items():
        lines += ["", f"{precision}: {search.tried:,} combinations, {search.refused:,} against the rules, "
                      f"{search.too_large:,} found too large"]  # fmt: skip
        lines += layout_lines(layouts) if layouts else nothing_lines(search)
    return lines


def nothing_lines(search: Search) -> list[str]:
    """Returns why no layout fits: by how much, and what the rules refused most often."""
    lines = ["nothing fits"]
    if search.too_large:
        lines[0] += f"; of those found too large the smallest needs {search.least / GIB:.1f} GiB or more"
    return lines + [f"  {count:,} refused, such as: {text}" for text, count in search.reasons.most_common(3)]


def layout_lines(layouts: Sequence[Found]) -> list[str]:
    """Returns a line a layout. VP: virtual stages; layers: of each stage, in the order of the model."""
    axes = "".join(f"{name:>4}" for name in ("TP", "PP", "VP", "EP", "CP"))
    lines = [
        f"{'tok/s/GPU':>9}{'step s':>8}{'MFU':>7}{'TFLOPS':>8}{'GiB':>7}{axes}{'DP':>6}{'MBS':>5}  recomputed; stages"
    ]
    for found in layouts:
        f, p = found.forecast, found.config.parallel
        sizes = (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, chunks_per_rank(found.config.model, p),
                 p.expert_model_parallel_size, p.context_parallel_size)  # fmt: skip
        row = f"{f.per_gpu:>9,.0f}{f.step:>8.2f}{f.utilization:>7.1%}{f.tflops:>8.0f}{found.peak / GIB:>7.1f}"
        row += (
            "".join(f"{size:>4}" for size in sizes)
            + f"{p.data_parallel_size:>6}{found.config.train.micro_batch_size:>5}"
        )
        lines.append(f"{row}  {found.recompute}; {p.pipeline_model_parallel_layout or 'even'}")
    return lines


def contrast_lines(search: Search, bf16: Sequence[Found], fp8: Sequence[Found]) -> list[str]:
    """Returns what FP8's layouts need in BF16, and how much slower the best that BF16 allows is."""
    if not fp8:
        return []
    lines, usable = [], search.cluster.usable_bytes
    for number, found in enumerate(fp8):
        twin = search.config({name: found.config.given[name] for name in found.config.given if name not in FP8_FLAGS})
        need = max(plan.total for plan in plan_stages(twin))
        if need > usable:
            lines.append(f"FP8's layout {number + 1} needs {found.peak / GIB:.1f} GiB; in BF16 it would need "
                         f"{need / GIB:.1f}, more than the {usable / GIB:.1f} there are.")  # fmt: skip
            break
    else:
        lines.append("All of FP8's layouts fit in BF16 as well.")
    if not bf16:
        return [*lines, "No layout fits in BF16."]
    ours, theirs = fp8[0].forecast, bf16[0].forecast
    return [*lines, f"BF16 at its best takes {theirs.step:.2f} s a step, FP8 {ours.step:.2f}: "
                    f"{theirs.step / ours.step:.2f} times as long."]  # fmt: skip


def layout_flags(config: Config) -> list[str]:
    """Returns the flags that a search chose, for a launch script."""
    words = []
    names = SHOWN | PIPELINE_FLAGS | RECOMPUTE_FLAGS | FP8_FLAGS | set(ALWAYS)
    alone = config.parallel.tensor_model_parallel_size == 1
    for name in (name for name in field_table() if name in names and name in config.given):
        value = config.given[name]
        if name in ONE and value == 1 or (name == "sequence_parallel" and alone):
            continue
        if value is True:
            words.append(flag_of(name))
        elif value not in (False, None):
            words += [flag_of(name), *(map(str, value) if isinstance(value, tuple) else (_quoted(value),))]
    return words


def _quoted(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) and not value.replace("-", "").isalnum() else str(value)
