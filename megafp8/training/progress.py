"""How far a run has come, and its lines for the log."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from megafp8.optimizer import StepStats
from megafp8.training.step import StepOutput


@dataclass
class Progress:
    """Counters of the whole training, over all resumes: they follow the data, so skipped steps count too.

    schedule_start: consumed samples at which the schedule began; not 0 after a start with --no-load-optim.
    fallen: linears that run in BF16 for now, and since which iteration (fallback.py). suspect: an iteration that has to
    be computed again, and the bits of its loss (rerun.py).
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    schedule_start: int = 0
    fallen: dict[str, int] = field(default_factory=dict)
    suspect: tuple[int, int] | None = None

    def take_suspect(self) -> tuple[int, int] | None:
        """The suspect of the run before; from now on there is none."""
        suspect, self.suspect = self.suspect, None
        return suspect

    @property
    def schedule_samples(self) -> int:
        """What the schedule is a function of."""
        return self.consumed_samples - self.schedule_start

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> Progress:
        """Raises KeyError or TypeError for what `to_json` doesn't write; `fallen` and `suspect` may be missing."""
        counters = {name: saved[name] for name in COUNTERS}
        fallen, suspect = saved.get("fallen") or {}, saved.get("suspect")
        if any(
            type(value) is not int or value < 0 for value in (*counters.values(), *fallen.values(), *(suspect or ()))
        ):
            raise TypeError(f"counters {counters}, {fallen}, {suspect}")
        return Progress(**counters, fallen=dict(fallen), suspect=None if suspect is None else tuple(suspect))


COUNTERS = ("iteration", "consumed_samples", "consumed_tokens", "schedule_start")


@dataclass(frozen=True)
class IterationRecord:
    """What one iteration leaves for the log: numbers known on the host, and device scalars read later."""

    host: dict[str, Any]
    loss: Tensor
    stats: StepStats
    means: dict[str, Tensor] = field(default_factory=dict)
    expert_loads: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(progress: Progress, *, learning_rate: float, global_batch_size: int, output: StepOutput, stats: StepStats):
        host = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_tokens,
            "learning_rate": learning_rate,
            "global_batch_size": global_batch_size,
        }
        return IterationRecord(host, output.loss, stats, output.means, output.expert_loads)


def read_records(records: list[IterationRecord]) -> list[dict[str, Any]]:
    """The records as log lines without times; the device is waited for once."""
    columns = {"lm_loss": [r.loss for r in records]}
    if records:
        columns |= {name: [r.means[name] for r in records] for name in records[0].means}
    for name in ("grad_norm", "skipped", "nan", "num_zeros", "params_norm"):
        values = [getattr(r.stats, name) for r in records]
        if values and values[0] is not None:
            columns[name] = values
    numbers = torch.stack([torch.stack([v.to(torch.float64) for v in column]) for column in columns.values()]).cpu()
    lines = [dict(record.host) for record in records]
    for name, row in zip(columns, numbers.tolist(), strict=True):
        for line, value in zip(lines, row, strict=True):
            line[name] = int(value) if name in ("skipped", "nan", "num_zeros") else value
    for line, record in zip(lines, records, strict=True):
        if record.expert_loads:
            line["expert_load"] = {layer: load.long().tolist() for layer, load in record.expert_loads.items()}
    return lines
