"""What tools/bench_step.py measured, for people: kernels by class, a table, and a stacked bar chart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench_timing import Kernel, busy

CLASSES = {
    "communication": ("nccl",),
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated", "attention"),
    "optimizer": ("adamw", "squares_kernel", "grids_kernel", "scales_kernel"),
    "loss": ("loss_rows", "loss_grad"),
    "norm": ("norm_rows", "norm_tiles", "norm_both", "norm_grad", "sum_rows", "layer_norm", "rms_norm", "gammabeta"),
    "activation": ("swiglu", "silu", "gelu"),
    "quantize": ("quantize", "cast_kernel", "amax_kernel", "transpose_kernel", "grouped_kernel", "blockwise_to"),
    "gemm": ("gemm", "cutlass", "nvjet", "xmma", "matmul", "splitk", "::mm", "addmm", "bmm", "grouped_mm"),
    "copies": ("memcpy", "memset", "copy", "fill", "zero"),
}
"""Words in the names of kernels, by class; the first class that has one. With quantization fused, RMSNorm is `norm` and
SwiGLU is `activation`: `quantize` is what runs for nothing else."""
ORDER = (
    *("gemm", "attention", "quantize", "norm", "activation", "loss", "elementwise", "copies", "optimizer"),
    "communication",
)


def kernel_class(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in CLASSES.items() if any(word in lower for word in words)), "elementwise")


def breakdown(kernels: Iterable[Kernel], steps: int, step_ms: float) -> dict[str, dict[str, float]]:
    """Class -> {ms, launches} of one of `steps` steps. idle: what is left of `step_ms`, the time without a profiler, in
    which no kernel runs."""
    found = list(kernels)
    table: dict[str, dict[str, float]] = {}
    for kernel in found:
        entry = table.setdefault(kernel_class(kernel.name), {"ms": 0.0, "launches": 0.0})
        entry["ms"] += kernel.ms / steps
        entry["launches"] += 1 / steps
    table["idle"] = {"ms": max(0.0, step_ms - busy(found)[1] / steps), "launches": 0.0}
    return {kind: table[kind] for kind in (*ORDER, "idle") if kind in table}


def slowest(kernels: Iterable[Kernel], steps: int, count: int) -> list[tuple[str, float, float]]:
    """(name, ms, launches) of a step, of the kernels that take most of it."""
    found: dict[str, list[float]] = {}
    for kernel in kernels:
        entry = found.setdefault(kernel.name, [0.0, 0.0])
        entry[0] += kernel.ms / steps
        entry[1] += 1 / steps
    return sorted(((name, *entry) for name, entry in found.items()), key=lambda row: -row[1])[:count]


def table(results: dict[str, Any]) -> list[str]:
    """A block a scope: a line a recipe, then where its time goes."""
    lines = []
    for scope, rows in results["scopes"].items():
        lines.append(f"{scope}: {results['preset']}, {results['tokens']} tokens, gradients {results['gradients']}")
        lines.append(f"{'':28}{'ms':>9}{'tokens/s':>10}{'TFLOPS':>8}{'GiB':>8}{'of BF16':>9}{'host ms':>9}{'syncs':>7}")
        for name, row in rows.items():
            memory = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
            ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
            syncs = "-" if row["syncs"] is None else str(row["syncs"])
            lines.append(
                f"{name:28}{row['ms']:9.2f}{row['tokens_per_second']:10.0f}{row['tflops']:8.1f}{memory:>8}{ratio:>9}"
                f"{row['host_ms']:9.2f}{syncs:>7}"
            )
        for name, row in rows.items():
            parts = (f"{kind} {e['ms']:.2f} ({e['launches']:.0f})" for kind, e in row.get("breakdown", {}).items())
            lines.append(f"  {name}: " + ", ".join(parts))
            for kernel in row.get("unknown", ()):
                lines.append(f"  {name}: not in the ledger of conversions: {kernel}")
        lines.append("")
    return lines


def draw(results: dict[str, Any], path: Path) -> None:
    """A stacked bar a recipe, a panel a scope: milliseconds by class of kernel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scopes = {scope: rows for scope, rows in results["scopes"].items() if any("breakdown" in r for r in rows.values())}
    figure, axes = pyplot.subplots(1, max(len(scopes), 1), figsize=(6 * max(len(scopes), 1), 5), squeeze=False)
    for axis, (scope, rows) in zip(axes[0], scopes.items(), strict=False):
        rows = {name: row for name, row in rows.items() if "breakdown" in row}
        bottom = dict.fromkeys(rows, 0.0)
        for number, kind in enumerate((*ORDER, "idle")):
            heights = [row["breakdown"].get(kind, {"ms": 0.0})["ms"] for row in rows.values()]
            if not any(heights):
                continue
            color = "lightgray" if kind == "idle" else f"C{number}"
            axis.bar(list(rows), heights, bottom=list(bottom.values()), label=kind, color=color)
            bottom = {name: low + height for (name, low), height in zip(bottom.items(), heights, strict=True)}
        axis.set(title=f"{results['preset']}, {scope}", ylabel="ms")
        axis.tick_params(axis="x", rotation=30)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
