"""One optimizer step over the microbatches of a global batch, and one evaluation.

The loss is the mean over all valid tokens of the global batch, whatever the microbatches: each microbatch's backward
is of the SUM of its token losses, and the optimizer divides by the number of valid tokens of them all. Losses, counts
and gradients are summed over the data-parallel ranks once a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megafp8.core.gpt import GPTModel
from megafp8.data import Batch
from megafp8.fp8 import DelayedScaling
from megafp8.optimizer import Optimizer
from megafp8.parallel import ParallelContext
from megafp8.step import Phase, ScalingHistory, Statistics, StepContext


@dataclass(frozen=True)
class StepOutput:
    """Device scalars of a step, so that nothing waits for the device until they are read.

    loss: FP64 mean over the global batch's valid tokens (NaN when there are none); valid_tokens: their count, FP64.
    means: what else modules report, such as auxiliary losses: means over the global batch, by name.
    """

    loss: Tensor
    valid_tokens: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)


def loss_of(model: GPTModel, batch: Batch, step: StepContext) -> Tensor:
    """FP32 scalar: the sum of the losses of the batch's valid tokens."""
    return model(
        batch.tokens,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        cu_seqlens=batch.cu_seqlens,
        step=step,
    )


def forward_backward(
    model: GPTModel,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    *,
    iteration: int,
    seed: int,
    scaling: ScalingHistory | None,
    device: torch.device,
) -> StepOutput:
    """Runs this rank's microbatches and leaves the global batch's gradients in the optimizer's buffers."""
    parallel = optimizer.parallel
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, valid tokens
    statistics = Statistics()
    for number, batch in enumerate(batches):
        batch = batch.to(device)
        step = StepContext(
            phase=Phase.TRAIN,
            iteration=iteration,
            microbatch=number,
            seed=seed,
            sample_group=parallel.dp.rank,
            grads=optimizer.grads,
            scaling=scaling,
            statistics=statistics,
        )
        microbatch_loss = loss_of(model, batch, step)
        microbatch_loss.backward()
        totals += torch.stack([microbatch_loss.detach(), batch.loss_mask.sum()])
    optimizer.reduce_gradients()
    parallel.dp_cp.sum_(totals)
    for value in (*statistics.sums.values(), *statistics.means.values()):
        parallel.dp_cp.sum_(value)
    model.update_expert_bias(statistics)
    means = {name: total / weight for name, (total, weight) in statistics.means.items()}
    return StepOutput(totals[0] / totals[1], totals[1], means)


def advance_scaling(scaling: DelayedScaling, parallel: ParallelContext) -> None:
    """Ends a step of delayed scaling: amaxes of all tensors over all ranks that hold them, then new scales."""
    for axis in (parallel.tp, parallel.dp_cp):
        axis.max_(scaling.pending())
    scaling.advance()


@torch.no_grad()
def evaluate(
    model: GPTModel,
    batches: Iterator[Batch],
    *,
    count: int,
    scaling: ScalingHistory | None,
    device: torch.device,
    parallel: ParallelContext | None = None,
) -> float:
    """Mean loss over the valid tokens of every rank's next `count` microbatches; no training state changes."""
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, valid tokens
    for _ in range(count):
        batch = next(batches).to(device)
        loss = loss_of(model, batch, StepContext(phase=Phase.EVAL, scaling=scaling))
        totals += torch.stack([loss, batch.loss_mask.sum()])
    if parallel is not None:
        parallel.dp_cp.sum_(totals)
    return (totals[0] / totals[1]).item()
