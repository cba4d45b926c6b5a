"""SVG of tools/report.py: line charts, a timeline of events, heat maps. Colours are CSS classes, so that light and dark
pages and print share one drawing; each chart carries its numbers as JSON for the tooltip (report.js)."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from report_data import Grid, smooth, thin

WIDE, NARROW = 1120, 552
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 8, 36
"""Margins around the plot area of a line chart, in SVG units."""


@dataclass(frozen=True)
class Curve:
    """A run's line. run: its number, for the colour; name: in the tooltip; dots: markers joined by a thin line."""

    run: int
    name: str
    x: np.ndarray
    y: np.ndarray
    dots: bool = False


class Axis:
    """A linear or logarithmic map from values to SVG units, with its ticks."""

    def __init__(self, low: float, high: float, start: float, stop: float, *, log: bool = False, whole: bool = False):
        from matplotlib.ticker import LogLocator, MaxNLocator

        self.low, self.high, self.start, self.stop, self.log = low, high, start, stop, log
        count = max(3, int(abs(stop - start) / (75 if whole else 45)))
        ticks = MaxNLocator(count, integer=whole, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        if log:
            ticks = LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)).tick_values(low, high)
        self.ticks = [float(t) for t in ticks if low * (1 - 1e-9) - 1e-300 <= t <= high * (1 + 1e-9)]

    def __call__(self, value):
        """SVG units of a value or an array; NaN where a logarithm has none."""
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)


def line_chart(
    curves: Sequence[Curve],
    *,
    title: str,
    unit: str,
    window: int = 1,
    width: int = NARROW,
    height: int = 240,
    octaves: bool = False,
    from_zero: bool = False,
) -> str:
    """A figure of `curves` over iterations, smoothed over `window`. "" where there is nothing to draw.

    The vertical range is that of smoothed lines and dots; single values beyond it are cut off. octaves: it may be
    logarithmic, which it is for positive values that span more than a factor of 50. from_zero: it begins there.
    """
    curves = [c for c in curves if np.isfinite(c.y).any()]
    if not curves:
        return ""
    drawn = [(c, *thin(c.x, c.y), thin(c.x, c.y if c.dots else smooth(c.y, window))[1]) for c in curves]
    values = np.concatenate([line[np.isfinite(line)] for *_, line in drawn])
    low, high = float(values.min()), float(values.max())
    log = octaves and low > 0 and high > 50 * low
    if not log:
        flat = high - low <= 1e-9 * abs(high)  # means of equal numbers may differ in their last bits
        pad = 0.05 * ((abs(high) or 1.0) if flat else high - low)
        low = 0.0 if 0 <= low < 0.3 * high else low - pad
        if from_zero and low >= 0:
            low, pad = 0.0, 0.05 * high
        high += pad
    else:
        low, high = low / 1.2, high * 1.2
    x_axis = horizontal([c.x for c in curves], width)
    y_axis = Axis(low, high, height - BOTTOM, TOP, log=log)
    parts = [_frame(x_axis, y_axis, width, height, unit)]
    for curve, x, mean, lowest, highest, line in drawn:
        parts.append(_curve(curve, x_axis(x), y_axis, mean, lowest, highest, line, noisy=window > 1))
    box = (LEFT - 5, TOP, width - LEFT - RIGHT + 10, height - TOP - BOTTOM)
    clip = '<svg x="{0}" y="{1}" width="{2}" height="{3}" viewBox="{0} {1} {2} {3}">'.format(*box)
    parts = [parts[0], clip, *parts[1:], "</svg>"]
    data = {
        "kind": "lines",
        "x": [x_axis.low, x_axis.high, x_axis.start, x_axis.stop],
        "y": [y_axis.low, y_axis.high, y_axis.start, y_axis.stop, log],
        "curves": [
            {"run": c.run, "name": c.name, "x": _short(x, 9), "y": _short(line, 5)} for c, x, _, _, _, line in drawn
        ],
    }
    return figure(title, "logarithmic" if log else "", svg(width, height, f"{title} over iterations", parts), data)


def horizontal(xs: Iterable[np.ndarray], width: int) -> Axis:
    """The axis of iterations that all of `xs` fit on."""
    values = np.concatenate([np.asarray(x, dtype=float) for x in xs] or [np.zeros(1)])
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return Axis(min(low, high - 1), high, LEFT, width - RIGHT, whole=True)


def _frame(x_axis: Axis, y_axis: Axis, width: int, height: int, unit: str) -> str:
    bottom = height - BOTTOM
    parts = []
    for tick, text in zip(y_axis.ticks, numbers(y_axis.ticks), strict=True):
        y = y_axis(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    parts.append(_iterations(x_axis, TOP, bottom))
    parts.append(f'<text class="label" transform="translate(11 {(TOP + bottom) / 2:.0f}) rotate(-90)" ')
    parts.append(f'text-anchor="middle">{html.escape(unit)}</text>')
    return "".join(parts)


def _iterations(x_axis: Axis, top: float, bottom: float) -> str:
    parts = []
    for tick in x_axis.ticks:
        x = x_axis(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{number(tick)}</text>')
    middle = (x_axis.start + x_axis.stop) / 2
    parts.append(f'<text class="label" x="{middle:.0f}" y="{bottom + 29}" text-anchor="middle">iteration</text>')
    return "".join(parts)


def _curve(curve, x, y_axis, mean, lowest, highest, line, *, noisy) -> str:
    """Faint single values (of a thinned curve: their range), and the smoothed line or the dots."""
    parts = []
    if curve.dots:
        parts.append(f'<path class="thin" d="{_path(x, y_axis(line))}"/>')
        spots = zip(x, y_axis(line), strict=True)
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in spots if math.isfinite(b)]
    else:
        if lowest is not mean:
            keep = np.isfinite(lowest)
            edge = np.concatenate([x[keep], x[keep][::-1]]), np.concatenate([highest[keep], lowest[keep][::-1]])
            parts.append(f'<path class="range" d="{_path(edge[0], _clamped(y_axis, edge[1]))}Z"/>')
        elif noisy:
            parts.append(f'<path class="faint" d="{_path(x, _clamped(y_axis, mean))}"/>')
        parts.append(f'<path class="line" d="{_path(x, y_axis(line))}"/>')
    return f'<g class="run {colour(curve.run)}" data-run="{curve.run}">{"".join(parts)}</g>'


def _clamped(axis: Axis, values: np.ndarray) -> np.ndarray:
    """SVG units, at most a screen beyond the plot: renderers do badly with far larger ones."""
    return np.clip(axis(values), -1000, 2000)


def _path(x: np.ndarray, y: np.ndarray) -> str:
    """SVG path through the finite points; a gap where one is not."""
    parts, pen = [], "M"
    for a, b in zip(x, y, strict=True):
        if math.isfinite(b):
            parts.append(f"{pen}{a:.1f} {b:.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


SYMBOLS = {
    "start": "M-4-5L5 0L-4 5Z",
    "save": "M-4-4H4V4H-4Z",
    "end": "M-1.5-6H1.5V6H-1.5Z",
    "bad": "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
    "precision": "M0-6L6 0L0 6L-6 0Z",
}
"""Marks of the timeline, around (0, 0)."""
LEGEND = {
    "start": "start",
    "save": "save",
    "end": "end",
    "bad": "skip, fault, failed save",
    "precision": "fallback to BF16, and back",
}


def symbol(kind: str) -> str:
    """The mark of a kind of event."""
    if kind in ("start", "save", "end"):
        return kind
    return "precision" if kind.startswith("fp8-") else "bad"


def timeline(lanes: Sequence[tuple[int, str, list[dict]]], axis: Axis) -> str:
    """One lane a run with a mark an event, on the iterations of the chart above. lanes: (run, label, events)."""
    height = 22 * len(lanes) + 46
    parts = [_iterations(axis, 4, height - BOTTOM)]
    for row, (run, label, events) in enumerate(lanes):
        y = 16 + 22 * row
        parts.append(f'<g class="run {colour(run)}" data-run="{run}">')
        parts.append(f'<path class="lane" d="M{axis.start} {y}H{axis.stop}"/>')
        for event in events:
            kind, x = str(event.get("event")), axis(min(max(event["iteration"], axis.low), axis.high))
            told = html.escape(f"{label}, iteration {event['iteration']}, {kind}: {event.get('message', '')}")
            parts.append(
                f'<path class="mark {symbol(kind)}" transform="translate({x:.1f} {y})" d="{SYMBOLS[symbol(kind)]}">'
                f"<title>{told}</title></path>"
            )
        parts.append("</g>")
    keys = "".join(
        f'<span class="key"><svg width="14" height="14" viewBox="-7 -7 14 14"><path class="mark {name}" '
        f'd="{SYMBOLS[name]}"/></svg>{text}</span>'
        for name, text in LEGEND.items()
    )
    return figure("Events", "", svg(WIDE, height, "events over iterations", parts) + f'<div class="keys">{keys}</div>')


GUTTER, GAP = 190, 14


def heat_maps(
    found: Sequence[Grid], ranges: dict[str, tuple[float, float]], *, title: str, unit: str, colours: str
) -> str:
    """The roles side by side: linears down, looks of the monitor across. ranges: role -> values of the end colours."""
    rows = len(found[0].linears)
    cell = min(18.0, max(2.0, 560 / rows))
    height, wide = cell * rows, (WIDE - GUTTER - 3 * GAP) / 3
    parts, panels = [_row_labels(found[0].linears, cell)], []
    for place, grid in enumerate(found):
        x, (low, high) = GUTTER + place * (wide + GAP), ranges[grid.role]
        parts.append(f'<text class="label" x="{x + wide / 2:.0f}" y="12" text-anchor="middle">{grid.role}</text>')
        parts.append(f'<rect class="empty" x="{x:.1f}" y="20" width="{wide:.1f}" height="{height:.1f}"/>')
        parts.append(_picture(grid.values, low, high, colours, x, 20, wide, height))
        parts.append(_look_labels(grid.looks, x, wide, 20 + height))
        parts.append(_bar(low, high, colours, unit, x, 20 + height + 40, wide))
        box = [round(v, 1) for v in (x, 20, wide, height)]
        rows_of_values = [_short(row, 4) for row in grid.values]
        panels.append({"role": grid.role, "box": box, "looks": grid.looks, "values": rows_of_values})
    data = {"kind": "heat", "unit": unit, "rows": list(found[0].linears), "panels": panels}
    size = int(20 + height + 74)
    return figure(title, unit, svg(WIDE, size, f"{title} by linear, role and iteration", parts), data)


def _row_labels(names: Sequence[str], cell: float) -> str:
    """All names, or as many as have room."""
    parts, last = [], -math.inf
    for row, name in enumerate(names):
        y = 20 + (row + 0.5) * cell
        if y - last >= 10:
            shown = html.escape(name if len(name) < 30 else "..." + name[-27:])
            parts.append(f'<text class="tick" x="{GUTTER - 6}" y="{y + 3.5:.1f}" text-anchor="end">{shown}</text>')
            last = y
    return "".join(parts)


def _look_labels(looks: Sequence[int], x: float, wide: float, bottom: float) -> str:
    step = max(1, -(-len(looks) // max(1, int(wide / 48))))
    parts = [
        f'<text class="tick" x="{x + (i + 0.5) * wide / len(looks):.1f}" y="{bottom + 13:.1f}" text-anchor="middle">'
        f"{number(looks[i])}</text>"
        for i in range(0, len(looks), step)
    ]
    parts.append(
        f'<text class="label" x="{x + wide / 2:.0f}" y="{bottom + 27:.1f}" text-anchor="middle">iteration</text>'
    )
    return "".join(parts)


def _bar(low: float, high: float, colours: str, unit: str, x: float, y: float, wide: float) -> str:
    """The scale of colours, with the values at its ends."""
    inner = wide - 120
    picture = _picture(np.linspace(low, high, 64)[None], low, high, colours, x + 60, y, inner, 9)
    left = f'<text class="tick" x="{x + 54:.1f}" y="{y + 8.5:.1f}" text-anchor="end">{number(low)}</text>'
    right = f'<text class="tick" x="{x + 66 + inner:.1f}" y="{y + 8.5:.1f}">{number(high)}</text>'
    middle = x + wide / 2
    return (
        f'{picture}{left}{right}<text class="tick" x="{middle:.1f}" y="{y + 22:.1f}" text-anchor="middle">{unit}</text>'
    )


def _picture(values: np.ndarray, low: float, high: float, colours: str, x, y, wide, height) -> str:
    """A matrix as pixels, one a value; what is NaN is transparent."""
    from matplotlib import colormaps
    from matplotlib.image import imsave

    pixels = colormaps[colours](np.clip((values - low) / (high - low), 0, 1), bytes=True)
    pixels[~np.isfinite(values)] = 0
    buffer = io.BytesIO()
    imsave(buffer, pixels, format="png")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    return (
        f'<image x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{encoded}"/>'
    )


def svg(width: int, height: float, label: str, parts: Iterable[str]) -> str:
    """parts: elements; label: for those who can't see them."""
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def figure(title: str, unit: str, drawing: str, data: dict | None = None) -> str:
    """A chart with its caption, and the numbers for the tooltip."""
    beside = f' <span class="unit">({html.escape(unit)})</span>' if unit else ""
    numbers = "" if data is None else f'<script type="application/json">{as_json(data)}</script>'
    return f"<figure><figcaption>{html.escape(title)}{beside}</figcaption>{drawing}{numbers}</figure>"


def as_json(value) -> str:
    """JSON that can stand in a <script>."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def colour(run: int) -> str:
    """CSS classes of a run: eight colours, then the same ones dashed."""
    return f"c{run % 8}" + (" dashed" if run >= 8 else "")


def number(value: float, digits: int = 4) -> str:
    """Four digits, as people write them: 20000, 0.0025, 2e-5."""
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e")


def numbers(values: Sequence[float]) -> list[str]:
    """Each in as many digits as tell it from its neighbours."""
    for digits in range(4, 10):
        texts = [number(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _short(values: np.ndarray, digits: int) -> list[float | None]:
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values.tolist()]
