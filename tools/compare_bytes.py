"""Bytes of runs for tools/compare_runs.py, from their configurations: what a rank holds, and what it sends.

The planner counts them (megafp8/plan), so the runs may have been made elsewhere. `layout` are flags on top of a run's
own, to see what its recipe would hold and send in a job of more GPUs than it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megafp8.config import Config, parse_args, read_args, with_vocab_size

MIB = 1 << 20
HEADS = ("static MiB", "held MiB", "wire MiB")


@dataclass(frozen=True)
class RunBytes:
    """Of the rank that holds most. static: weights and their FP8 copies, gradients, optimizer state, workspaces; held:
    what a microbatch keeps for backward; wire: what the rank sends in an optimizer step, in rings."""

    static: int
    held: int
    wire: float

    @property
    def cells(self) -> list[str]:
        return [f"{size / MIB:.1f}" for size in (self.static, self.held, self.wire)]


def arranged(run: Path, layout: Sequence[str], gpus: int | None) -> Config:
    """A run's configuration with other flags, for `gpus` ranks (None: as many as it had).

    Raises ValueError, in one line: no args.json, or flags that don't fit it.
    """
    path = run / "args.json"
    if not path.is_file():
        raise ValueError(f"{path}: not there; --bytes counts from the flags in it")
    saved = read_args(path)
    world = saved.parallel.world_size if gpus is None else gpus
    config = parse_args(["--config", str(path), *layout], env={"WORLD_SIZE": str(world)}, check_files=False)
    # What computes in FP8 is the run's, whatever is too small for it in that layout.
    config = config.replace(small_linears_in_bf16=saved.fp8.small_linears_in_bf16)
    return with_vocab_size(config, saved.model.unpadded_vocab_size)


def run_bytes(config: Config) -> RunBytes:
    from megafp8.plan.communication import step_traffic
    from megafp8.plan.memory import plan_stages

    plans = plan_stages(config)
    stage = max(range(len(plans)), key=lambda number: plans[number].total)
    wire = sum(traffic.wire_bytes for traffic in step_traffic(config, stage))
    return RunBytes(plans[stage].static, plans[stage].held, wire)
