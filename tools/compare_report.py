"""Pictures and pages of tools/compare_runs.py: loss curves with their gaps, gradient norms, and scales."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]
"""(iterations, values)"""


def scale_curves(run: Path) -> dict[str, Curve]:
    """Role -> the median over all operands of the median log2(scale_inv), from the monitor's lines, if any."""
    path, found = run / "fp8_monitor.jsonl", {}
    if not path.is_file():
        return {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["scale_inv_median"]:
            found.setdefault(line["role"], {}).setdefault(line["iteration"], []).append(line["scale_inv_median"])
    return {
        role: (np.array(sorted(steps)), np.array([np.median(np.log2(steps[i])) for i in sorted(steps)]))
        for role, steps in sorted(found.items())
    }


def draw(
    runs: Sequence,
    window: int,
    output: Path | io.BytesIO,
    *,
    smooth: Callable[[np.ndarray, int], np.ndarray],
    gap_curve: Callable[..., Curve],
    paths: Sequence[Path] = (),
    noise: str | None = None,
) -> None:
    """Loss curves, gaps to the first run, and below them gradient norms and scales where the runs have them.

    Raw values are faint, smoothed ones strong. noise: label of the run with another seed: the gaps' panel is as high as
    the other runs need. Raises ValueError for a format that matplotlib doesn't know.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scales = [scale_curves(path) for path in paths]
    norms = any(np.isfinite(run.grad_norms).any() for run in runs)
    panels = [2.2, 1.0, *([0.8] if norms else []), *([0.8] if any(scales) else [])]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 2.2 * sum(panels)), sharex=True, height_ratios=panels, constrained_layout=True
    )
    top, bottom, *rest = axes
    heights, roles = [], {}
    for number, run in enumerate(runs):
        colour = f"C{number}" if len(runs) <= 10 else plt.get_cmap("tab20")(number % 20)
        top.plot(run.iterations, run.losses, color=colour, alpha=0.3, linewidth=0.8)
        top.plot(run.iterations, smooth(run.losses, window), color=colour, label=run.label)
        top.plot(run.valid_iterations, run.valid_losses, color=colour, marker="o", linestyle="none", markersize=5)
        if number:
            x, gap = gap_curve(run, runs[0], window)
            bottom.plot(x, 100 * gap, color=colour, label=run.label, linewidth=0.6 if run.label == noise else 1.5)
            heights += [] if run.label == noise else [100 * np.abs(gap[np.isfinite(gap)])]
        if norms:
            rest[0].plot(run.iterations, smooth(run.grad_norms, window), color=colour)
        for (role, (x, values)), style in zip(scales[number].items() if scales else (), ("-", "--", ":"), strict=False):
            rest[-1].plot(x, values, style, color=colour)
            roles[role] = style
    top.plot([], [], color="grey", marker="o", linestyle="none", label="validation")
    if window > 1:
        top.plot([], [], color="grey", label=f"training, mean over {window} iterations")
        top.plot([], [], color="grey", alpha=0.4, linewidth=0.8, label="training, each iteration")
    top.set_ylabel("loss (nats a token)")
    top.legend(fontsize="small", ncols=1 if len(runs) <= 10 else 2)
    bottom.axhline(0, color="C0", linewidth=1)
    title, heights = f"training loss relative to {runs[0].label} (above 0: worse)", np.concatenate([*heights, [0]])
    if noise is not None and (reach := 1.5 * np.quantile(heights, 0.9)) > 0:
        bottom.set_ylim(-reach, reach)
        title += "; peaks may leave the panel"
    bottom.set_title(title, fontsize="medium")
    bottom.set_ylabel("gap (%)")
    if norms:
        rest[0].set_ylabel("gradient norm")
        rest[0].set_yscale("log")
    if any(scales):
        rest[-1].set_ylabel("log2(scale_inv)")
        for role, style in roles.items():  # colours are the runs'
            rest[-1].plot([], [], style, color="grey", label=role)
        rest[-1].legend(fontsize="small")
    axes[-1].set_xlabel("iteration")
    for axis in axes:
        axis.grid(alpha=0.3)
    if isinstance(output, Path):
        output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def page(title: str, table: str, notes: Sequence[str], picture: bytes) -> str:
    """One HTML file with everything in it."""
    image = base64.b64encode(picture).decode()
    lines = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        "<style>body{font-family:sans-serif;margin:2em;max-width:70em}img{max-width:100%}</style>"
        f"<h1>{html.escape(title)}</h1><pre>{html.escape(table)}</pre><ul>{lines}</ul>"
        f'<img alt="loss curves, gaps, gradient norms and scales" src="data:image/png;base64,{image}"></html>\n'
    )
