"""What the probe found, for people and for pretrain_gpt.py: a ranked table, a heat map, and a file of flags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""linear, recipe, role ("all" or one), loss_change (relative), output_error, cosine."""

FLAGS = {
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
}
"""The flags that a recipe is probed with."""


def harm(row: Row) -> tuple[float, float]:
    """What rows are ranked by: the loss's change, either way, then the output's error."""
    return abs(row["loss_change"]), row["output_error"] or 0.0


def table(rows: Sequence[Row], count: int) -> str:
    """The `count` worst rows, the worst first."""
    width = max(len("linear"), *(len(row["linear"]) for row in rows))
    head = f"{'linear':{width}}  {'recipe':10}  {'role':11}  loss change  output error  gradient cosine"
    lines = [head, "-" * len(head)]
    for row in sorted(rows, key=harm, reverse=True)[:count]:
        error = "-" if row["output_error"] is None else f"{row['output_error']:.3e}"
        cosine = "-" if row["cosine"] is None else f"{row['cosine']:.6f}"
        lines.append(
            f"{row['linear']:{width}}  {row['recipe']:10}  {row['role']:11}  {row['loss_change']:+11.2e}  {error:>12}  "
            f"{cosine:>15}"
        )
    return "\n".join(lines)


def outlier_table(rows: Sequence[Row]) -> str:
    """A line a recipe: what an outlier costs it, and the flags that mend it."""
    width = max(len(row["linear"]) for row in rows)
    head = f"{'recipe':10}  {'linear':{width}}  error without  with outlier  times  the mend, and what is left"
    lines = [head, "-" * len(head)]
    for row in rows:
        mend = f"{row['mend']}: {row['mended']:.3e}" if row["mend"] else "none needed"
        times = row["outlier"] / row["plain"]
        place = f"{row['recipe']:10}  {row['linear']:{width}}"
        lines.append(f"{place}  {row['plain']:13.3e}  {row['outlier']:12.3e}  {times:5.2f}  {mend}")
    return "\n".join(lines)


def heat_map(rows: Sequence[Row], output: Path) -> None:
    """Linears by recipe and role, as a PNG: the output's error on the left, one minus the gradient's cosine right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    linears = list(dict.fromkeys(row["linear"] for row in rows))
    columns = list(dict.fromkeys((row["recipe"], row["role"]) for row in rows))
    at = {(row["linear"], row["recipe"], row["role"]): row for row in rows}
    figure, axes = plt.subplots(
        1, 2, figsize=(4 + 0.8 * len(columns), 2.2 + 0.28 * len(linears)), sharey=True, constrained_layout=True
    )
    values = {
        "output error": lambda row: row["output_error"],
        "1 - gradient cosine": lambda row: None if row["cosine"] is None else max(1 - row["cosine"], 1e-9),
    }
    for axis, (title, value) in zip(axes, values.items(), strict=True):
        grid = np.full((len(linears), len(columns)), np.nan)
        for i, linear in enumerate(linears):
            for j, column in enumerate(columns):
                row = at.get((linear, *column))
                found = value(row) if row is not None else None
                if found:
                    grid[i, j] = np.log10(found)
        image = axis.imshow(grid, aspect="auto", cmap="magma", interpolation="nearest")
        axis.set_title(f"log10({title})", fontsize="medium")
        axis.set_xticks(range(len(columns)), [f"{recipe}\n{role}" for recipe, role in columns], fontsize=7, rotation=90)
        axis.set_yticks(range(len(linears)), linears, fontsize=7)
        figure.colorbar(image, ax=axis, shrink=0.8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    plt.close(figure)


def flags_file(given: dict[str, Any], recipe: str, kept: Sequence[str], small: str = "bf16") -> str:
    """JSON for `pretrain_gpt.py --config`: the run's own flags, with this recipe and these linears in BF16.

    small: what becomes of those too small for FP8.
    """
    precision = ("fp8_", "keep_modules_in_bf16", "first_last_layers_bf16", "num_layers_at_")
    flags = {name: value for name, value in given.items() if not name.startswith(precision)}
    flags |= {"bf16": True, **FLAGS[recipe]} | ({"fp8_small_linears": small} if small != "bf16" else {})
    flags |= {"keep_modules_in_bf16": list(kept)} if kept else {}
    return json.dumps(flags, indent=2) + "\n"
