"""The HTML page of tools/report.py: summary, curves, events, FP8 heat maps, arguments. Every text from a run goes
through `escape`; what a run lacks is left out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from report_charts import (
    WIDE,
    Curve,
    colour,
    heat_maps,
    horizontal,
    line_chart,
    number,
    timeline,
)
from report_data import Run, differing, drawable, grids

HERE = Path(__file__).resolve().parent
CURVES = {
    "grad_norm": ("Gradient norm", "L2 norm"),
    "learning_rate": ("Learning rate", "learning rate"),
    "tokens_per_second": ("Throughput", "tokens/s"),
    "tflops_per_gpu": ("Throughput a GPU", "TFLOP/s"),
    "mfu": ("Model FLOP utilization", "share of peak"),
    "max_memory_gib": ("Peak memory of a process", "GiB"),
    "elapsed_ms": ("Time of an iteration", "ms"),
    "data_ms": ("Waiting for data", "ms an iteration"),
    "aux_loss": ("Load-balancing loss", "loss"),
    "params_norm": ("Norm of all parameters", "L2 norm"),
    "num_zeros": ("Zeros in the gradient", "elements"),
}
"""Training number -> title and unit of its chart. Numbers that are 0 or missing throughout have none."""
FROM_ZERO = ("tokens_per_second", "tflops_per_gpu", "mfu", "max_memory_gib", "elapsed_ms", "data_ms")
HEAT_MAPS = {
    "sqnr_db": ("Signal-to-quantization-noise ratio", "dB", "viridis", 6.0),
    "scale_inv_median": ("Median scale_inv", "log2", "cividis", 2.0),
}
"""The monitor's number -> title, unit, colours, and the smallest range that the colours span."""
WORST = 5
EVENTS = 200
"""Of a run, in the table."""


def page(runs: Sequence[Run], window: int) -> str:
    """The whole page. window: iterations of smoothing."""
    title = f"{'Run' if len(runs) == 1 else 'Runs'}: {', '.join(run.label for run in runs)}"
    sections = [
        _notes(runs),
        _summary(runs),
        _curves(runs, window),
        _events(runs),
        _fp8(runs),
        _arguments(runs),
    ]
    style, script = ((HERE / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head><body><h1>{escape(title)}</h1>"
        f'<p class="soft">Made {datetime.now():%Y-%m-%d %H:%M} by megafp8\'s tools/report.py.</p>'
        f'{_boxes(runs)}{"".join(sections)}<div id="tip" hidden></div><script>\n{script}</script></body></html>\n'
    )


def _boxes(runs: Sequence[Run]) -> str:
    boxes = "".join(
        f'<label class="{colour(i)}"><input type="checkbox" checked data-run="{i}">'
        f'<span class="swatch {colour(i)}"></span>{escape(run.label)}</label>'
        for i, run in enumerate(runs)
    )
    return f'<div class="runs">{boxes}</div>'


def _section(title: str, *parts: str) -> str:
    """ "" where there is nothing to say."""
    content = "".join(parts)
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _notes(runs: Sequence[Run]) -> str:
    lines = [f"<li>{escape(run.label)}: {escape(note)}</li>" for run in runs for note in run.notes]
    return f'<div class="notes"><ul>{"".join(lines)}</ul></div>' if lines else ""


# --- summary ---


def _tail_loss(run: Run) -> str:
    """Mean over the last tenth, skipped steps left out."""
    losses = run.curve("lm_loss")[1]
    tail = losses[-max(1, len(losses) // 10) :]
    tail = tail[np.isfinite(tail)]
    return f"{tail.mean():.4f}" if len(tail) else ""


def _validation(run: Run) -> str:
    found = []
    for name, (x, y) in run.validation_curves().items():
        if len(y):
            found.append(f"{name + ' ' if name else ''}{y[-1]:.4f} at {number(x[-1])}")
    return "; ".join(found)


def _progress(run: Run) -> str:
    last, total = (run.training[-1]["iteration"] if run.training else 0), run.values().get("train_iters")
    return f"{last} of {total}" if total else str(last)


def _ended(run: Run) -> str:
    told = [e for e in run.events if e.get("event") in ("start", "end", "stop")]
    if not told:
        return ""
    last = max(enumerate(told), key=lambda pair: (str(pair[1].get("time", "")), pair[0]))[1]
    return "running, or killed" if last["event"] == "start" else str(last.get("message", ""))


def _median(run: Run, key: str, form: str = ",.0f") -> str:
    values = run.curve(key)[1]
    values = values[np.isfinite(values)]
    return format(float(np.median(values)), form) if len(values) and values.max() > 0 else ""


def _largest(run: Run, key: str, form: str) -> str:
    values = run.curve(key)[1]
    return format(float(np.nanmax(values)), form) if len(values) and np.nanmax(values) > 0 else ""


def _seconds(run: Run) -> str:
    times = run.curve("elapsed_ms")[1]
    total = float(times[np.isfinite(times)].sum()) / 1000
    hours, rest = divmod(int(total), 3600)
    if not run.training:
        return ""
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if total >= 60 else f"{total:.1f} s"


def _precision(run: Run) -> str:
    values = run.values()
    if values.get("fp8_format"):
        return f"{values.get('fp8_recipe')}, {values['fp8_format']}"
    return "" if not values else ("bf16" if values.get("bf16") else "fp32")


def _version(run: Run) -> str:
    told = run.provenance()
    versions = told.get("versions") if isinstance(told.get("versions"), dict) else {}
    parts = [f"{name} {versions[name]}" for name in ("megafp8", "torch") if versions.get(name)]
    commit = str(told.get("commit") or "")
    short = commit[:10] + ("-dirty" if commit.endswith("-dirty") else "")
    return ", ".join([*parts, *([f"commit {short}"] if commit else [])])


def _count(run: Run, key: str) -> str:
    return str(sum(bool(line.get(key)) for line in run.training)) if run.training else ""


SUMMARY: dict[str, Callable[[Run], str]] = {
    "precision": _precision,
    "iterations": _progress,
    "ended": _ended,
    "training loss": _tail_loss,
    "validation loss": _validation,
    "tokens": lambda run: f"{run.training[-1].get('consumed_tokens', 0):,}" if run.training else "",
    "time in steps": _seconds,
    "tokens/s": lambda run: _median(run, "tokens_per_second"),
    "TFLOP/s a GPU": lambda run: _median(run, "tflops_per_gpu", ".3g"),
    "MFU": lambda run: _median(run, "mfu", ".1%"),
    "peak memory (GiB)": lambda run: _largest(run, "max_memory_gib", ".2f"),
    "skipped": lambda run: _count(run, "skipped"),
    "processes": lambda run: str(run.values().get("world_size", "")),
    "version": _version,
}


def _summary(runs: Sequence[Run]) -> str:
    """A column a run: long texts wrap, and two runs stand beside each other."""
    cells = {title: [tell(run) for run in runs] for title, tell in SUMMARY.items()}
    head = "".join(_run_head(i, run) for i, run in enumerate(runs))
    rows = "".join(
        f"<tr><th>{title}</th>{''.join(_cell(i, title, text) for i, text in enumerate(row))}</tr>"
        for title, row in cells.items()
        if any(row)
    )
    note = (
        '<p class="soft">Training loss: mean over the last tenth of the iterations. tokens/s, TFLOP/s, MFU: medians. '
        "Time in steps: without evaluation, saving and restarts.</p>"
    )
    table = f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return _section("Summary", f'<div class="wide">{table}</div>', note if any(run.training for run in runs) else "")


def _run_head(i: int, run: Run) -> str:
    return f'<th data-run="{i}" class="{colour(i)}"><span class="swatch {colour(i)}"></span>{escape(run.label)}</th>'


def _cell(i: int, title: str, text: str) -> str:
    bad = ' class="bad"' if title == "skipped" and text not in ("", "0") else ""
    return f'<td data-run="{i}"{bad}>{escape(text) or "&ndash;"}</td>'


# --- curves and events ---


def _curves(runs: Sequence[Run], window: int) -> str:
    losses = [Curve(i, run.label, *run.curve("lm_loss")) for i, run in enumerate(runs)]
    valid = [
        Curve(i, f"{run.label}, {name or 'validation'}", x, y, dots=True)
        for i, run in enumerate(runs)
        for name, (x, y) in run.validation_curves().items()
        if len(x)
    ]
    noisy = f"lines: mean over {window} iterations, faint: each one, in long runs the range"
    told = [noisy if window > 1 else "lines: training", *(["dots: validation"] if valid else [])]
    loss = line_chart([*losses, *valid], title="Loss", unit="nats a token", window=window, width=WIDE, height=360)
    small = [_small(runs, key, window) for key in CURVES]
    if not loss and not any(small):
        return ""
    keys = f'<div class="keys">{"; ".join(told)}</div>'
    lanes = f'<div class="whole">{_lanes(runs)}</div>' if any(run.events for run in runs) else ""
    return _section("Curves", f'<div class="charts"><div class="whole">{loss}{keys}</div>{lanes}{"".join(small)}</div>')


def _small(runs: Sequence[Run], key: str, window: int) -> str:
    title, unit = CURVES[key]
    curves = [Curve(i, run.label, *run.curve(key)) for i, run in enumerate(runs)]
    if not any(np.any(c.y[np.isfinite(c.y)] != 0) for c in curves):
        return ""
    noisy = key == "grad_norm"
    window = window if noisy else 1
    return line_chart(curves, title=title, unit=unit, window=window, octaves=noisy, from_zero=key in FROM_ZERO)


def _lanes(runs: Sequence[Run]) -> str:
    xs = [np.array([line["iteration"] for line in (*run.training, *run.validation)]) for run in runs]
    axis = horizontal([x for x in xs if len(x)], WIDE)
    return timeline([(i, run.label, run.events) for i, run in enumerate(runs)], axis)


def _events(runs: Sequence[Run]) -> str:
    rows, left = [], []
    for i, run in enumerate(runs):
        left += [f"{len(run.events) - EVENTS} more of {run.label}"] if len(run.events) > EVENTS else []
        for event in run.events[:EVENTS]:
            kind = str(event.get("event", ""))
            calm = kind in ("start", "save", "end")
            rows.append(
                f'<tr data-run="{i}"><td class="{colour(i)} stays"><span class="swatch {colour(i)}"></span>'
                f'{escape(run.label)}</td><td class="number">{escape(str(event["iteration"]))}</td>'
                f'<td class="stays{"" if calm else " bad"}">{escape(kind)}</td>'
                f"<td>{escape(str(event.get('message', '')))}</td>"
                f'<td class="soft stays">{escape(str(event.get("time", "")).replace("T", " "))}</td></tr>'
            )
    if not rows:
        return ""
    head = '<tr><th>run</th><th class="number">iteration</th><th>event</th><th>what happened</th><th>when</th></tr>'
    more = f'<p class="soft">Not shown: {escape("; ".join(left))} (events.jsonl).</p>' if left else ""
    return _section(
        "Events", f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>', more
    )


# --- FP8 ---


def _fp8(runs: Sequence[Run]) -> str:
    watched = [(i, run) for i, run in enumerate(runs) if run.monitor]
    maps = {key: {i: grids(run, key) for i, run in watched} for key in HEAT_MAPS}
    ranges = {key: _ranges(maps[key].values(), HEAT_MAPS[key][3]) for key in HEAT_MAPS}
    parts = []
    for i, run in watched:
        drawn = [
            heat_maps(maps[key][i], ranges[key], title=title, unit=unit, colours=colours)
            for key, (title, unit, colours, _) in HEAT_MAPS.items()
            if maps[key][i]
        ]
        head = f'<h3 class="{colour(i)}"><span class="swatch {colour(i)}"></span>{escape(run.label)}</h3>'
        parts.append(f'<div data-run="{i}">{head}{"".join(drawn)}{_worst(run)}</div>')
    lead = (
        '<p class="soft">Statistics of quantized operands (--fp8-monitor-interval): dark is low, grey is where '
        "nothing was quantized. All runs share the colours of a role.</p>"
    )
    return _section("FP8", lead if parts else "", *parts)


def _ranges(found: Iterable[list], least: float) -> dict[str, tuple[float, float]]:
    """Role -> lowest and highest value over all runs, at least `least` apart."""
    values: dict[str, list[np.ndarray]] = {}
    for grid in (grid for of_run in found for grid in of_run):
        values.setdefault(grid.role, []).append(grid.values[np.isfinite(grid.values)])
    ranges = {}
    for role, pieces in values.items():
        low, high = float(min(p.min() for p in pieces)), float(max(p.max() for p in pieces))
        spare = max(0.0, least - (high - low)) / 2
        ranges[role] = low - spare, high + spare
    return ranges


def _worst(run: Run) -> str:
    """The operands with the lowest SQNR in the last look."""
    last = max(iteration for iteration, _, _ in run.monitor)
    lines = [line for (iteration, _, _), line in run.monitor.items() if iteration == last]
    lines = [line for line in lines if _is_finite(line.get("sqnr_db"))]
    if not lines:
        return ""
    rows = []
    for line in sorted(lines, key=lambda line: line["sqnr_db"])[:WORST]:
        shares = "".join(f'<td class="number">{_share(line.get(key))}</td>' for key in ("underflow", "saturated"))
        rows.append(
            f"<tr><td>{escape(str(line['linear']))}</td><td>{escape(str(line['role']))}</td>"
            f'<td class="number">{line["sqnr_db"]:.2f}</td>{shares}</tr>'
        )
    head = '<th>linear</th><th>role</th><th class="number">SQNR (dB)</th>'
    head += '<th class="number">became 0</th><th class="number">saturated</th>'
    return (
        f'<p>Lowest in iteration {last}:</p><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _share(value: Any) -> str:
    return f"{value:.3%}" if _is_finite(value) else "&ndash;"


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(drawable(value))


# --- arguments ---


def _arguments(runs: Sequence[Run]) -> str:
    return _section("Arguments", _differences(runs), *(_all_arguments(run) for run in runs if run.args))


def _differences(runs: Sequence[Run]) -> str:
    if sum(bool(run.values()) for run in runs) < 2:
        return ""
    rows = differing(list(runs))
    if not rows:
        return "<p>All runs have the same arguments, places aside.</p>"
    head = "".join(_run_head(i, run) for i, run in enumerate(runs))
    body = "".join(
        f"<tr><th>{escape(name)}</th>"
        + "".join(f'<td data-run="{i}">{_plain(value)}</td>' for i, value in enumerate(values))
        + "</tr>"
        for name, values in rows
    )
    table = f"<table><thead><tr><th>differs</th>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _plain(value: Any) -> str:
    return "&ndash;" if value is None else escape(value if isinstance(value, str) else json.dumps(value))


def _all_arguments(run: Run) -> str:
    told = run.provenance()
    command = told.get("command")
    command = " ".join(map(str, command)) if isinstance(command, list) else ""
    rest = {key: value for key, value in told.items() if key != "command"}
    notes = run.args.get("notes")
    parts = [
        ("command", command),
        ("flags given", json.dumps(run.given(), indent=2)),
        ("notes", "\n".join(map(str, notes)) if isinstance(notes, list) else ""),
        ("all values", json.dumps(run.args.get("config"), indent=2)),
        ("versions", json.dumps(rest, indent=2)),
    ]
    content = "".join(f"<h3>{name}</h3><pre>{escape(text)}</pre>" for name, text in parts if text and text != "{}")
    return f"<details><summary>All of {escape(run.label)}</summary>{content}</details>"
