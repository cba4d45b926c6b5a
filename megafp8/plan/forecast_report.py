"""A forecast as text."""

from __future__ import annotations

from megafp8.plan.forecast import Forecast
from megafp8.plan.in_flight import microbatches
from megafp8.plan.memory import GIB, MIB, MemoryPlan
from megafp8.plan.traffic import Traffic


def forecast_lines(forecast: Forecast, plans: list[MemoryPlan], traffic: list[Traffic]) -> list[str]:
    """plans: of every pipeline stage; traffic: of one step of a rank of the stage that needs most."""
    config, cluster = forecast.config, forecast.cluster
    gpus, usable = config.parallel.world_size, cluster.usable_bytes / GIB
    peak = max(plan.total for plan in plans) / GIB
    verdict = "fits" if peak <= usable else "DOES NOT FIT"
    lines = [f"{gpus:,} GPUs: {cluster.name}", "", f"== step: {forecast.step:.3f} s, the busiest rank's"]
    for what, seconds in forecast.parts.items():
        if seconds:
            lines.append(f"{what:<40}{seconds:>10.3f} s{seconds / forecast.step:>8.1%}")
    lines += [
        "",
        f"{forecast.tokens_per_second:,.0f} tokens/s, {forecast.per_gpu:,.0f} a GPU; {forecast.tflops:,.0f} model "
        f"TFLOPS a GPU; MFU {forecast.utilization:.1%} (each product at the peak of its dtype)",
        f"{microbatches(config)} microbatches a step; memory {peak:.1f} of {usable:.1f} GiB: {verdict}",
    ]
    if traffic:
        lines += ["", "== messages of one rank in a step", *traffic_lines(traffic)]
    return lines


def traffic_lines(traffic: list[Traffic]) -> list[str]:
    """Returns a line for each kind, group and purpose, the largest first."""
    lines = [f"{'MiB sent':>12}{'messages':>10}  {'kind':<12}{'group':<8}{'ranks':>6}  purpose"]
    for t in sorted(traffic, key=lambda t: -t.wire_bytes):
        lines.append(f"{t.wire_bytes / MIB:>12,.1f}{t.messages:>10,}  {t.kind:<12}{t.group:<8}{t.size:>6}  {t.purpose}")
    return lines
