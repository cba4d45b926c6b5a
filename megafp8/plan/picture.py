"""Memory of every pipeline stage as a picture: a bar a stage, stacked by owner, beside what a GPU has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megafp8.plan.memory import GIB, MIB, MemoryPlan

COLORS = {
    "weights": "#1f4e79",
    "FP8 copies of weights": "#6baed6",
    "main gradients (fp32)": "#e6550d",
    "master weights": "#fdae6b",
    "Adam moments": "#fdd0a2",
    "activations": "#31a354",
    "temporaries": "#a1d99b",
    "messages between stages": "#9e9ac8",
    "workspaces and tables": "#bdbdbd",
}
"""By owner, as `MemoryPlan.owners` names them, from the bottom up."""


def draw_memory(plans: Mapping[str, Sequence[MemoryPlan]], output: Path, limit: int | None = None) -> None:
    """Writes a picture. plans: title -> of every stage, side by side; limit: bytes that a GPU's tensors may take."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stages = max(len(held) for held in plans.values())
    highest = max(limit or 0, *(plan.total for held in plans.values() for plan in held))
    unit, name = (GIB, "GiB") if highest >= GIB else (MIB, "MiB")
    shown = [owner for owner in COLORS if any(plan.owners[owner] for held in plans.values() for plan in held)]
    size = (max(5, 2.2 + 0.42 * stages) * len(plans), 4.8)
    figure, every = plt.subplots(1, len(plans), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, (title, held) in zip(every[0], plans.items(), strict=True):
        bottom = [0.0] * len(held)
        for owner in shown:
            sizes = [plan.owners[owner] / unit for plan in held]
            axes.bar(range(len(held)), sizes, bottom=bottom, color=COLORS[owner], label=owner, width=0.85)
            bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
        if limit is not None:
            axes.axhline(limit / unit, color="#a50f15", linestyle="--", linewidth=1.2)
            text = f"a GPU has {limit / unit:.1f} for tensors"
            axes.text(len(held) - 0.5, limit / unit, text, color="#a50f15", ha="right", va="bottom", fontsize=8)
        axes.set(title=f"{title}: peak {max(bottom):.1f} {name}", xlabel="pipeline stage", xlim=(-0.6, len(held) - 0.4))
        axes.set_xticks(range(0, len(held), max(1, len(held) // 16)))
    every[0][0].set_ylabel(f"{name} a rank")
    every[0][0].set_ylim(0, 1.08 * highest / unit)
    handles, labels = every[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(output, dpi=120)
    plt.close(figure)
