"""The monitor's lines in TensorBoard: scalars, and the scales' distribution as a histogram."""

from __future__ import annotations

from typing import Any

from megafp8.fp8.operand_stats import BINS_AN_OCTAVE, LOWEST

SCALARS = ("amax", "scale_inv_median", "underflow", "saturated", "sqnr_db", "drift_octaves")


def add_to_tensorboard(writer: Any, line: dict[str, Any]) -> None:
    """writer: a `SummaryWriter`; line: one operand of one step. Tags: `fp8/<number>/<linear>/<role>`."""
    place, step = f"{line['linear']}/{line['role']}", line["iteration"]
    for name in SCALARS:
        if line[name] is not None:
            writer.add_scalar(f"fp8/{name}/{place}", line[name], step)
    counts = line["histogram"]
    if not counts:
        return
    first = LOWEST + line["histogram_start"] / BINS_AN_OCTAVE
    edges = [first + i / BINS_AN_OCTAVE for i in range(len(counts) + 1)]
    middles = [edge + 0.5 / BINS_AN_OCTAVE for edge in edges[:-1]]
    writer.add_histogram_raw(
        f"fp8/log2_scale_inv/{place}",
        min=edges[0],
        max=edges[-1],
        num=sum(counts),
        sum=sum(m * c for m, c in zip(middles, counts, strict=True)),
        sum_squares=sum(m * m * c for m, c in zip(middles, counts, strict=True)),
        bucket_limits=edges[1:],
        bucket_counts=counts,
        global_step=step,
    )
