"""Which flags would save memory, and how much: each candidate is the run's own command line with that flag set, checked
as a command line is, and planned anew. What is not valid together with the other flags, or saves nothing, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.config import Config, build_config, with_vocab_size
from megafp8.config.config import flag_of
from megafp8.plan.memory import MemoryPlan, plan_memory

KEPT = ("rampup_batch_size", "step_batch_size_schedule")
"""Schedules of the batch, which a given --global-batch-size may not stand beside."""


@dataclass(frozen=True)
class Candidate:
    """changes: of fields. kind: of candidates of one kind only the best is named. price: what it costs."""

    kind: str
    changes: dict[str, Any]
    price: str

    @property
    def flags(self) -> str:
        """As it is typed."""
        return " ".join(_typed(name, value) for name, value in self.changes.items())


@dataclass(frozen=True)
class Saving:
    """flags: to add, or to change. saves, total: bytes at the peak."""

    flags: str
    saves: int
    total: int
    price: str


def savings(config: Config, device: torch.device, stage: int = 0, count: int = 3) -> list[Saving]:
    """The `count` flags that save most on pipeline rank `stage` and on the one that needs most after the change.

    config: resolved, with the vocabulary known.
    """
    now = plan_memory(config, device, stage).total
    best: dict[str, Saving] = {}
    for candidate in candidates(config):
        plan = _planned(config, candidate, device, stage)
        if plan is None or plan.total >= now:
            continue
        found = Saving(candidate.flags, now - plan.total, plan.total, candidate.price)
        if candidate.kind not in best or found.saves > best[candidate.kind].saves:
            best[candidate.kind] = found
    return sorted(best.values(), key=lambda saving: -saving.saves)[:count]


def candidates(config: Config) -> Iterator[Candidate]:
    """What could be set; not all of it is valid everywhere."""
    t, p, o = config.train, config.parallel, config.optimizer
    yield from _recompute(config)
    if t.micro_batch_size > 1:
        price = "smaller GEMMs, more microbatches"
        yield Candidate("batch", {"micro_batch_size": t.micro_batch_size // 2}, price)
    primary = {"fp8_param_gather": True} | ({} if o.use_distributed_optimizer else {"use_distributed_optimizer": True})
    yield Candidate("primary", primary, "weights live in FP8 and the masters alone")
    price = "activations' inputs are rounded to FP8"
    yield Candidate("activation", {"activation_func_fp8_input_store": True}, price)
    if not o.use_distributed_optimizer:
        yield Candidate("shards", {"use_distributed_optimizer": True}, "no more communication than without")
    for dtype, price in (("bf16", "moments rounded to BF16"), ("fp8", "moments rounded to FP8")):
        changes = {"use_precision_aware_optimizer": True, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
        yield Candidate("state", changes, price)
        yield Candidate("state", changes | {"store_param_remainders": True}, f"{price}, masters exact")
    tp = p.tensor_model_parallel_size
    if tp > 1 and not p.sequence_parallel:
        yield Candidate("tensor", {"sequence_parallel": True}, "the same communication, cut in two")
    split = {"tensor_model_parallel_size": 2 * tp, "sequence_parallel": True}
    yield Candidate("tensor", split, "more communication in every layer; keep it within a node")
    pp = {"pipeline_model_parallel_size": 2 * p.pipeline_model_parallel_size}
    yield Candidate("pipeline", pp, "a bubble; many microbatches hide it")
    yield Candidate("context", {"context_parallel_size": 2 * p.context_parallel_size}, "attention exchanges keys")
    if config.model.num_experts is not None:
        ep = {"expert_model_parallel_size": 2 * p.expert_model_parallel_size}
        yield Candidate("experts", ep, "tokens travel to more ranks")


def _recompute(config: Config) -> Iterator[Candidate]:
    if config.train.recompute_granularity == "full":
        return
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    yield Candidate("recompute", whole, "about a third more work")
    parts = ("core_attn", "moe" if config.model.num_experts is not None else "mlp")
    for modules in (("core_attn",), parts[1:], parts):
        changes = {"recompute_granularity": "selective", "recompute_modules": modules}
        yield Candidate("recompute", changes, "these parts run twice")


def _planned(config: Config, candidate: Candidate, device: torch.device, stage: int) -> MemoryPlan | None:
    """The plan of the rank that then needs most; None where the flags don't go together."""
    values = dict(config.given) | {"device": config.train.device}
    if candidate.kind == "recompute":
        values.pop("recompute_activations", None)  # the old form of the same
    if not any(name in values for name in KEPT):
        values["global_batch_size"] = config.train.global_batch_size
    try:
        changed = build_config(
            env={"WORLD_SIZE": str(config.parallel.world_size)}, check_files=False, **(values | candidate.changes)
        )
        changed = with_vocab_size(changed, config.model.unpadded_vocab_size - config.data.extra_vocab_size)
        if changed == config:
            return None
        stages = range(changed.parallel.pipeline_model_parallel_size)
        if len(stages) == config.parallel.pipeline_model_parallel_size:
            stages = (stage,)
        return max((plan_memory(changed, device, each) for each in stages), key=lambda plan: plan.total)
    except (ValueError, AssertionError):
        return None


def _typed(name: str, value: Any) -> str:
    if value is True:
        return flag_of(name)
    return f"{flag_of(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
