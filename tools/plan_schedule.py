"""`plan.py schedule`: what every pipeline rank does and when, in text and as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from megafp8.core.pipeline.schedules import (
    SCHEDULES,
    Costs,
    Kind,
    Schedule,
    Timeline,
    build_schedule,
    peak_deferred,
    peak_microbatches,
    simulate,
)

COLORS = {Kind.FORWARD: "#9ecae1", Kind.BACKWARD: "#a1d99b", Kind.INPUT: "#a1d99b", Kind.WEIGHT: "#fdae6b"}
LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward (input)",
    Kind.WEIGHT: "backward (weights)",
}


def add_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--schedule", default="1f1b", choices=SCHEDULES, help="as --pipeline-schedule (default: 1f1b)")
    add("--pipeline-model-parallel-size", type=int, required=True, metavar="N", help="pipeline ranks")
    add("--num-virtual-stages-per-pipeline-rank", type=int, default=1, metavar="N", help="(default: 1)")
    add("--microbatches", type=int, required=True, metavar="N", help="of a step, on each data-parallel rank")
    add("--microbatch-group-size-per-virtual-pipeline-stage", type=int, metavar="N", help="as the training flag")
    for name, what in (("forward", "a stage's forward"), ("input", "its backward without weight gradients"),
                       ("weight", "its weight gradients")):  # fmt: skip
        add(f"--{name}-time", type=float, default=1.0, metavar="X", help=f"time of {what}, any unit (default: 1)")
    add("--message-time", type=float, default=0.0, metavar="X", help="time of a message (default: 0)")
    add("--activation-mib", type=float, metavar="X", help="what a microbatch holds on one (virtual) stage")
    add("--deferred-mib", type=float, metavar="X", help="what its deferred weight gradients hold (zero-bubble)")
    add("--output", type=Path, metavar="FILE.png", help="picture to write (needs matplotlib)")


def run(args: argparse.Namespace) -> list[str]:
    """Lines of text; the picture is written. Raises ValueError naming the flag that is out of range."""
    costs = Costs(args.forward_time, args.input_time, args.weight_time, args.message_time)
    timeline = simulate(checked_schedule(args), costs)
    lines = report(timeline, args.activation_mib, args.deferred_mib)
    if args.output is None:
        return lines
    draw(timeline, args.output)
    return [*lines, f"wrote {args.output}"]


def checked_schedule(args: argparse.Namespace) -> Schedule:
    """The schedule that the flags ask for. Raises ValueError naming the flag that is out of range."""
    ranks, group = args.pipeline_model_parallel_size, args.microbatch_group_size_per_virtual_pipeline_stage
    for name in ("pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank", "microbatches"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: give 1 or more")
    if group is not None and group < ranks:
        raise ValueError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is less than --pipeline-model-parallel-size "
            f"{ranks}; raise it"
        )
    for name in ("forward_time", "input_time", "weight_time", "message_time"):
        if not 0 <= getattr(args, name) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: give 0 or more")
    chunks = args.num_virtual_stages_per_pipeline_rank
    return build_schedule(args.schedule, ranks, chunks, args.microbatches, group=group)


def report(timeline: Timeline, activation_mib: float | None, deferred_mib: float | None) -> list[str]:
    """Lines of text: a row of actions a rank, then a table of what each holds and how long it idles."""
    schedule = timeline.schedule
    lines = [
        f"{schedule.name}: {schedule.ranks} ranks x {schedule.chunks} virtual stage(s), {schedule.microbatches} "
        f"microbatches; bubble {timeline.bubble:.1%}, length {timeline.length:g}"
    ]
    lines += [f"rank {r}: {' '.join(map(str, actions))}" for r, actions in enumerate(schedule.actions)]
    head = f"{'rank':>4} {'idle':>7} {'activations held':>17} {'deferred held':>14}"
    lines.append(head + f" {'peak MiB':>10}" * (activation_mib is not None))
    for rank, actions in enumerate(schedule.actions):
        held, deferred = peak_microbatches(actions), peak_deferred(actions)
        row = f"{rank:>4} {timeline.idle(rank):>7.1%} {held:>17} {deferred:>14}"
        if activation_mib is not None:
            row += f" {peak_bytes(actions, activation_mib, deferred_mib or 0.0):>10.1f}"
        lines.append(row)
    lines.append("held: pairs of microbatch and virtual stage, at most at once")
    return lines


def peak_bytes(actions, activation: float, deferred: float) -> float:
    """Most that activations and deferred weight gradients take together."""
    changes = {
        Kind.FORWARD: activation,
        Kind.BACKWARD: -activation,
        Kind.INPUT: deferred - activation,
        Kind.WEIGHT: -deferred,
    }
    held = peak = 0.0
    for action in actions:
        held += changes[action.kind]
        peak = max(peak, held)
    return peak


def draw(timeline: Timeline, output: Path) -> None:
    """Writes a picture: a row a rank, time to the right; later virtual stages are darker."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    count = max(len(actions) for actions in schedule.actions)
    figure, axes = plt.subplots(figsize=(min(40, 2 + 0.32 * count), 1.2 + 0.5 * schedule.ranks))
    for rank, timed in enumerate(timeline.ranks):
        for t in timed:
            shade = 1 - 0.45 * t.action.chunk / schedule.chunks
            color = [shade * c for c in matplotlib.colors.to_rgb(COLORS[t.action.kind])]
            axes.barh(rank, t.stop - t.start, left=t.start, height=0.9, color=color, edgecolor="white")
            axes.text((t.start + t.stop) / 2, rank, t.action.microbatch, ha="center", va="center", fontsize=7)
    kinds = dict.fromkeys(a.kind for actions in schedule.actions for a in actions)
    axes.legend([Patch(color=COLORS[k]) for k in kinds], [LABELS[k] for k in kinds], ncols=len(kinds), fontsize=8,
                loc="upper left", bbox_to_anchor=(0, -0.18))  # fmt: skip
    axes.set(
        xlim=(0, timeline.length),
        xlabel="time",
        yticks=range(schedule.ranks),
        yticklabels=[f"rank {r}" for r in range(schedule.ranks)],
        title=f"{schedule.name}: bubble {timeline.bubble:.1%}, at most "
        f"{max(map(peak_microbatches, schedule.actions))} activations held",
    )
    axes.invert_yaxis()
    figure.savefig(output, dpi=110, bbox_inches="tight")
    plt.close(figure)
