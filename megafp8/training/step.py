"""One optimizer step over the microbatches of a global batch, and one evaluation.

The loss is the mean over all valid tokens of the global batch, whatever the microbatches: each microbatch's backward
is of the SUM of its token losses, and the optimizer divides by the number of valid tokens of them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.core.gpt import GPTModel
from megafp8.data import Batch
from megafp8.optimizer import Optimizer
from megafp8.step import Phase, ScalingHistory, StepContext


@dataclass(frozen=True)
class StepOutput:
    """Device scalars of a step, so that nothing waits for the device until they are read.

    loss: FP32 mean over the valid tokens (NaN when there are none); valid_tokens: FP32 count.
    """

    loss: Tensor
    valid_tokens: Tensor


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
    """Runs the microbatches and leaves the gradients of the summed loss in the optimizer's buffers."""
    loss = torch.zeros((), dtype=torch.float32, device=device)
    valid = torch.zeros((), dtype=torch.float32, device=device)
    for number, batch in enumerate(batches):
        batch = batch.to(device)
        step = StepContext(
            phase=Phase.TRAIN,
            iteration=iteration,
            microbatch=number,
            seed=seed,
            grads=optimizer.grads,
            scaling=scaling,
        )
        microbatch_loss = loss_of(model, batch, step)
        microbatch_loss.backward()
        loss += microbatch_loss.detach()
        valid += batch.loss_mask.sum()
    return StepOutput(loss / valid, valid)


@torch.no_grad()
def evaluate(
    model: GPTModel, batches: Iterator[Batch], *, count: int, scaling: ScalingHistory | None, device: torch.device
) -> float:
    """Mean loss over the valid tokens of the next `count` microbatches; nothing of the training state changes."""
    loss = torch.zeros((), dtype=torch.float64, device=device)
    valid = torch.zeros((), dtype=torch.float64, device=device)
    for _ in range(count):
        batch = next(batches).to(device)
        loss += loss_of(model, batch, StepContext(phase=Phase.EVAL, scaling=scaling))
        valid += batch.loss_mask.sum()
    return (loss / valid).item()
