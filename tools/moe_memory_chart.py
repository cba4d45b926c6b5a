"""The picture of tools/bench_moe_memory.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench_moe_memory import Result


def draw(results: list[Result], path: Path) -> None:
    """Bars of bytes a routed token, formula beside measured, and of the experts' time; a panel a shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(r.shape for r in results))
    timed_too = any(r.experts_ms for r in results)
    figure, axes = plt.subplots(
        len(names), 1 + timed_too, figsize=(7 * (1 + timed_too), 1 + 2.6 * len(names)), squeeze=False
    )
    for row, name in zip(axes, names, strict=True):
        own = [r for r in results if r.shape == name]
        labels, places = [r.variant for r in own], range(len(own))
        row[0].barh([p - 0.2 for p in places], [r.formula_bytes / 1e3 for r in own], 0.38, label="formula")
        bars = row[0].barh([p + 0.2 for p in places], [r.measured_bytes / 1e3 for r in own], 0.38, label="measured")
        row[0].bar_label(bars, [f"{r.measured_bytes / own[0].measured_bytes:.2f}x" for r in own], padding=2, fontsize=8)
        row[0].set_yticks(list(places), labels)
        row[0].set_xlabel("kB held for backward a routed token")
        row[0].set_title(f"{name}: EP {own[0].ep}, {own[0].routed} routed tokens", fontsize=10)
        row[0].legend(fontsize=8, loc="lower right")
        if timed_too:
            longest = 3 * (own[0].experts_ms or 1)  # emulated recipes are far off: their bars are cut, their labels not
            bars = row[1].barh(list(places), [min(r.experts_ms or 0, longest) for r in own], 0.6, color="tab:green")
            row[1].bar_label(bars, [f"{r.experts_ms or 0:.1f}" for r in own], padding=2, fontsize=8)
            row[1].set_yticks(list(places), [])
            row[1].set_xlabel("ms, forward and backward of the experts")
        for axis in row:
            axis.invert_yaxis()
            axis.margins(x=0.12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
