"""One optimizer step over the microbatches of a global batch, and one evaluation, in a pipeline or without one.

The loss is the mean over all valid tokens of the global batch, whatever the microbatches: each microbatch's backward
is of the SUM of its token losses, and the optimizer divides by the number of valid tokens of them all. Losses, counts
and gradients are summed over the data-parallel ranks once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.config import Config
from megafp8.config.pipeline import chunks_per_rank
from megafp8.core.context_parallel import own_tokens
from megafp8.core.gpt import GPTModel, ModelChunks
from megafp8.core.pipeline.executor import Executor, HiddenStates
from megafp8.core.pipeline.p2p import Links, message_groups
from megafp8.core.pipeline.receives import once_sent, one_ahead
from megafp8.core.pipeline.schedules import Schedule, build_schedule, forward_only
from megafp8.core.pipeline.wgrad_queue import WgradQueue
from megafp8.data import Batch
from megafp8.fp8 import DelayedScaling
from megafp8.optimizer import Optimizer
from megafp8.parallel import Axis, ParallelContext
from megafp8.params import GradSink
from megafp8.step import LayerRunner, OperandObserver, Phase, ScalingHistory, Spans, Statistics, StepContext, no_spans
from megafp8.training.expert_load import add_load_means, loads_of_layers, sum_over


@dataclass(frozen=True)
class StepOutput:
    """Device scalars of a step, so that nothing waits for the device until they are read.

    loss: FP64 mean over the global batch's valid tokens (NaN when there are none); valid_tokens: their count, FP64.
    means: what else modules report, such as auxiliary losses: means over the global batch, by name.
    expert_loads: tokens of each expert, by layer, where `--moe-per-layer-logging` asks for them.
    """

    loss: Tensor
    valid_tokens: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)
    expert_loads: dict[str, Tensor] = field(default_factory=dict)


def run_stage(model: GPTModel, batch: Batch, step: StepContext, hidden: Tensor | None = None) -> Tensor:
    """FP32 scalar: the sum of the losses of the batch's valid tokens; hidden states where the model is a stage."""
    return model(
        batch.tokens,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        step=step,
        hidden=hidden,
    )


def own_part(batch: Batch, cp: Axis) -> Batch:
    """A context-parallel rank's tokens of whole sequences; document bounds stay those of the whole."""
    tokens = {name: own_tokens(getattr(batch, name), cp) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    return replace(batch, **tokens)


class _Microbatches:
    """The microbatches that stages are still at work on: fetched when first asked for, in order."""

    def __init__(self, batches: Iterable[Batch], device: torch.device, cp: Axis) -> None:
        self._batches, self._device, self._cp = iter(batches), device, cp
        self._held: dict[int, Batch] = {}
        self._fetched = 0

    def __getitem__(self, number: int) -> Batch:
        while self._fetched <= number:
            # Not blocking: else the device would have to run out of work before the host queues the next step's.
            batch = next(self._batches).to(self._device, non_blocking=True)
            self._held[self._fetched] = own_part(batch, self._cp)
            self._fetched += 1
        return self._held[number]

    def release(self, number: int) -> None:
        del self._held[number]


@dataclass(frozen=True)
class PipelinePlan:
    """How microbatches go through the stages, from the flags.

    groups: of messages, see `Links`. means: names of the means that this stage reports -> those of all stages, the same
    in every step, so that they are asked for once.
    """

    name: str = "1f1b"
    group: int | None = None
    wgrad_limit_bytes: int | None = None
    groups: Mapping[tuple[bool, bool], ProcessGroup] = field(default_factory=dict)
    means: dict[tuple[str, ...], list[str]] = field(default_factory=dict)

    @staticmethod
    def of(config: Config, parallel: ParallelContext) -> PipelinePlan:
        p = config.parallel
        limit = None if p.wgrad_queue_mib is None else p.wgrad_queue_mib << 20
        timeout = timedelta(minutes=p.distributed_timeout_minutes)
        groups = message_groups(parallel.pp, chunks_per_rank(config.model, p), timeout)
        return PipelinePlan(p.pipeline_schedule, p.microbatch_group_size_per_vp_stage, limit, groups)


def executor_of(
    schedule: Schedule,
    model: GPTModel | ModelChunks,
    plan: PipelinePlan,
    parallel: ParallelContext,
    micro: _Microbatches,
    spans: Spans = no_spans,
) -> Executor:
    """The executor of this rank's part of a schedule."""
    chunk, pp = model.chunks[0], parallel.pp
    states = HiddenStates(lambda m: chunk.hidden_shape(micro[m].tokens), chunk.dtype, chunk.device)
    links = Links(pp, schedule.microbatches, dict(plan.groups))
    receives = once_sent if plan.groups else one_ahead
    return Executor(schedule, pp.rank, links, states, WgradQueue(plan.wgrad_limit_bytes), spans, receives)


def forward_backward(
    model: GPTModel | ModelChunks,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    *,
    iteration: int,
    seed: int,
    scaling: ScalingHistory | None,
    device: torch.device,
    count: int | None = None,
    plan: PipelinePlan = PipelinePlan(),
    observe: Callable[[Executor], object] = lambda executor: None,
    observer: OperandObserver | None = None,
    sink: GradSink | None = None,
    spans: Spans = no_spans,
    layers: LayerRunner | None = None,
) -> StepOutput:
    """Runs this rank's microbatches and leaves the global batch's gradients in the optimizer's buffers.

    count: of the microbatches; None counts them first. observe: called with the executor when it is done, before
    gradients are reduced. observer: sees the operands that are quantized. sink: stands before the optimizer's buffers.
    spans: told of the parts of the step. layers: runs the transformer layers.
    """
    parallel = optimizer.parallel
    if count is None:
        batches = list(batches)
        count = len(batches)
    schedule = build_schedule(plan.name, parallel.pp.size, len(model.chunks), count, group=plan.group)
    micro, statistics = _Microbatches(batches, device, parallel.cp), Statistics()
    executor = executor_of(schedule, model, plan, parallel, micro, spans)
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, valid tokens; where the last stage is

    def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
        step = StepContext(
            phase=Phase.TRAIN,
            iteration=iteration,
            microbatch=number,
            seed=seed,
            sample_group=parallel.dp.rank,
            grads=sink or optimizer.grads,
            scaling=scaling,
            statistics=statistics,
            observer=observer,
            layers=layers,
            wgrads=executor.wgrads.slot(chunk, number) if schedule.defers else None,
        )
        part, batch = model.chunks[chunk], micro[number]
        with spans("forward-compute", f"microbatch {number} stage {schedule.stage(parallel.pp.rank, chunk)}"):
            output = run_stage(part, batch, step, hidden)
        if part.stage.loss:
            totals.add_(torch.stack([output.detach(), batch.loss_mask.sum()]))
        return output

    executor.run(forward, release=micro.release)
    observe(executor)
    with spans("all-grads-sync"):
        optimizer.reduce_gradients()
    parallel.pp.sum_(parallel.dp_cp.sum_(totals))
    means = _reduced_means(model, statistics, parallel, plan)
    loads = loads_of_layers(model, statistics, parallel.pp, plan.means)
    # A global batch whose tokens are all masked has the loss 0, not NaN: nothing is wrong with it.
    return StepOutput(totals[0] / totals[1].clamp(min=1), totals[1], means, loads)


def _reduced_means(
    model: GPTModel | ModelChunks, statistics: Statistics, parallel: ParallelContext, plan: PipelinePlan
) -> dict[str, Tensor]:
    """The step's means over the global batch and all stages; the routers take what was counted."""
    sum_over(statistics, parallel.dp_cp)
    model.end_step(statistics)
    add_load_means(model, statistics)
    means = statistics.means
    if parallel.pp.size > 1:  # a stage has some of the names only
        like = torch.zeros(2, dtype=torch.float64, device=model.chunks[0].device)
        own = tuple(sorted(means))
        if own not in plan.means:
            plan.means[own] = sorted({name for names in parallel.pp.exchange(own) for name in names})
        means = {name: parallel.pp.sum_(means.get(name, like).clone()) for name in plan.means[own]}
    return {name: total / weight for name, (total, weight) in means.items()}


def advance_scaling(scaling: DelayedScaling, parallel: ParallelContext) -> None:
    """Ends a step of delayed scaling: amaxes of all tensors over all ranks that hold them, then new scales."""
    scaling.share((parallel.tp, parallel.dp_cp), (parallel.etp, parallel.edp))
    scaling.advance()


@torch.no_grad()
def evaluate(
    model: GPTModel | ModelChunks,
    batches: Iterator[Batch],
    *,
    count: int,
    scaling: ScalingHistory | None,
    device: torch.device,
    parallel: ParallelContext | None = None,
    plan: PipelinePlan = PipelinePlan(),
) -> float:
    """Mean loss over the valid tokens of every rank's next `count` microbatches; no training state changes."""
    loss, tokens = evaluation_totals(
        model, batches, count=count, scaling=scaling, device=device, parallel=parallel, plan=plan
    )
    return (loss / tokens).item()


@torch.no_grad()
def evaluation_totals(
    model: GPTModel | ModelChunks,
    batches: Iterator[Batch],
    *,
    count: int,
    scaling: ScalingHistory | None,
    device: torch.device,
    parallel: ParallelContext | None = None,
    plan: PipelinePlan = PipelinePlan(),
) -> Tensor:
    """FP64 [2]: the sum of the losses of every rank's next `count` microbatches, and their valid tokens."""
    parallel = parallel or ParallelContext()
    micro = _Microbatches(batches, device, parallel.cp)
    schedule = forward_only(parallel.pp.size, len(model.chunks), count)
    step = StepContext(phase=Phase.EVAL, scaling=scaling)
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, valid tokens

    def forward(chunk: int, number: int, hidden: Tensor | None) -> Tensor:
        output = run_stage(model.chunks[chunk], micro[number], step, hidden)
        if model.chunks[chunk].stage.loss:
            totals.add_(torch.stack([output, micro[number].loss_mask.sum()]))
        return output

    executor_of(schedule, model, plan, parallel, micro).run(forward, release=micro.release)
    return parallel.pp.sum_(parallel.dp_cp.sum_(totals))
