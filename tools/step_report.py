"""What tools/bench_step.py measured, for people: kernels by class, a table, and a stacked bar chart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import host_profile
from bench_timing import Call
from kernel_names import ORDER, STANDALONE, kernel_class, short

STARVED_PERCENT = 3.0
"""Of a call's time without a kernel: above it, a host that takes as long as the kernels is named as the cause."""


def breakdown(calls: list[Call]) -> dict[str, dict[str, float]]:
    """Class -> {ms, launches} of a call, means over `calls`. Of kernels that run beside each other the time counts for
    the one that started first; idle is the time in which none runs: all add up to the span of a call."""
    table: dict[str, dict[str, float]] = {}
    for call in calls:
        for kernel, ms in call.shares():
            entry = table.setdefault(kernel_class(kernel.name), {"ms": 0.0, "launches": 0.0})
            entry["ms"] += ms / len(calls)
            entry["launches"] += 1 / len(calls)
    busy = sum(entry["ms"] for entry in table.values())
    table["idle"] = {"ms": max(0.0, _span(calls) - busy), "launches": 0.0}
    return {kind: table[kind] for kind in (*ORDER, "idle") if kind in table}


def where_time_goes(calls: list[Call]) -> dict[str, Any]:
    """The breakdown, its span, how much of it is idle, and how much goes to kernels that convert and do nothing else,
    in percent; the slowest kernels, and where the longest gaps are."""
    found, span = breakdown(calls), _span(calls)
    percent = {kind: 100 * entry["ms"] / span for kind, entry in found.items()}
    return {
        "span_ms": span,
        "idle_percent": percent["idle"],
        "standalone_percent": sum(percent.get(kind, 0.0) for kind in STANDALONE),
        "breakdown": found,
        "slowest": slowest(calls, 40),
        "gaps": gaps(calls, 8),
    }


def _span(calls: list[Call]) -> float:
    return sum(call.span for call in calls) / len(calls)


def slowest(calls: list[Call], count: int) -> list[tuple[str, float, float]]:
    """(short name, ms, launches) of a call, of the kernels that take most of it."""
    found: dict[str, list[float]] = {}
    for kernel in (kernel for call in calls for kernel in call.kernels):
        entry = found.setdefault(short(kernel.name), [0.0, 0.0])
        entry[0] += kernel.ms / len(calls)
        entry[1] += 1 / len(calls)
    return sorted(((name, *entry) for name, entry in found.items()), key=lambda row: -row[1])[:count]


def gaps(calls: list[Call], count: int) -> list[tuple[float, int, str, str]]:
    """(ms of a call, times, kernel before, kernel after) of the places where most time passes without a kernel."""
    found: dict[tuple[str, str], list[float]] = {}
    for ms, *between in (gap for call in calls for gap in call.gaps()):
        entry = found.setdefault(tuple(short(name) if name else "-" for name in between), [0.0, 0.0])
        entry[0] += ms / len(calls)
        entry[1] += 1 / len(calls)
    return sorted(((ms, times, *between) for between, (ms, times) in found.items()), reverse=True)[:count]


def starved(row: dict[str, Any]) -> bool:
    """Whether the device waited for the host: time without a kernel, and a host that takes as long as the kernels."""
    busy = row["span_ms"] * (1 - row["idle_percent"] / 100)
    return row["idle_percent"] > STARVED_PERCENT and row["host_ms"] >= busy


def table(results: dict[str, Any]) -> list[str]:
    """A block a scope: a line a recipe, then where its time goes."""
    lines = []
    for scope, rows in results["scopes"].items():
        tokens = next(iter(rows.values()))["tokens"]
        lines.append(f"{scope}: {results['preset']}, {tokens} tokens, gradients {results['gradients']}")
        lines.append(
            f"{'':28}{'ms':>9}{'tokens/s':>10}{'TFLOPS':>8}{'GiB':>7}{'of BF16':>9}{'idle %':>8}{'q+cast %':>10}"
            f"{'host ms':>9}{'syncs':>7}"
        )
        for name, row in rows.items():
            memory = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            syncs = "-" if row["syncs"] is None else str(len(row["syncs"]))
            percents = [f"{row[key]:.1f}" if key in row else "-" for key in ("idle_percent", "standalone_percent")]
            lines.append(
                f"{name:28}{row['ms']:9.2f}{row['tokens_per_second']:10.0f}{row['tflops']:8.1f}{memory:>7}{ratio:>9}"
                f"{percents[0]:>8}{percents[1]:>10}{row['host_ms']:9.2f}{syncs:>7}"
            )
        for name, row in rows.items():
            lines += [f"  {name}: {line}" for line in _details(row)]
        lines.append("")
    return lines


def _details(row: dict[str, Any]) -> list[str]:
    lines = []
    if "breakdown" in row:
        parts = (f"{kind} {e['ms']:.2f} ({e['launches']:.0f})" for kind, e in row["breakdown"].items())
        lines.append(f"{row['span_ms']:.2f} ms = " + ", ".join(parts))
        for ms, times, before, after in row["gaps"][:3]:
            if 100 * ms > 0.5 * row["span_ms"]:
                lines.append(f"no kernel for {ms:.2f} ms in {times:.0f} places between {before} and {after}")
        if starved(row):
            lines.append("the host is the limit: it queues no faster than the device works")
    if row.get("clocks"):
        c = row["clocks"]
        lines.append(f"SM clock {c['sm_mhz']:.0f} MHz, {c['watts']:.0f} W, medians of {c['samples']} looks")
    for place, count in _counted(row["syncs"] or ()):
        lines.append(f"waits for the device at {place}, {count} times a call")
    lines += host_profile.table(row.get("host_profile", []))
    found = row.get("unlisted")
    if found is not None:
        for name, (count, ms) in sorted(found["passes"].items(), key=lambda item: -item[1][1]):
            lines.append(f"not in the ledger: {name}, {count:.0f} launches, {ms:.2f} ms")
        lines.append(f"{found['small'][0]:.0f} other small launches, {found['small'][1]:.2f} ms")
    return lines


def _counted(places: Iterable[str]) -> list[tuple[str, int]]:
    places = list(places)
    return [(place, places.count(place)) for place in dict.fromkeys(places)]


def draw(results: dict[str, Any], path: Path) -> None:
    """A stacked bar a recipe, a panel a scope: milliseconds by class of kernel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = pyplot.colormaps["tab20"].colors  # there are more classes than the ten usual colors
    scopes = {scope: rows for scope, rows in results["scopes"].items() if any("breakdown" in r for r in rows.values())}
    figure, axes = pyplot.subplots(1, max(len(scopes), 1), figsize=(8 * max(len(scopes), 1), 5), squeeze=False)
    for axis, (scope, rows) in zip(axes[0], scopes.items(), strict=False):
        rows = {name: row for name, row in rows.items() if "breakdown" in row}
        bottom = dict.fromkeys(rows, 0.0)
        for number, kind in enumerate((*ORDER, "idle")):
            heights = [row["breakdown"].get(kind, {"ms": 0.0})["ms"] for row in rows.values()]
            if not any(heights):
                continue
            color = {"idle": "lightgray", "communication": "black"}.get(kind, colors[number])
            axis.bar(list(rows), heights, bottom=list(bottom.values()), label=kind, color=color)
            bottom = {name: low + height for (name, low), height in zip(bottom.items(), heights, strict=True)}
        axis.set(title=f"{results['preset']}, {scope}", ylabel="ms")
        axis.set_xticks(range(len(rows)), list(rows), rotation=30, ha="right")
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
