"""The same stages under torch.distributed.pipelining's runtime: its losses and gradients, and ours."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from megafp8.config.pipeline import pipeline_stages
from megafp8.core.gpt import build_model
from megafp8.parallel import build_parallel
from megafp8.params import named_specs
from megafp8.step import StepContext
from tests.distributed.layouts import Layout, distance, make_config, micro_batches, run_layout
from tests.distributed.test_pipeline import DEEP

ORACLES = {
    "gpipe": (ScheduleGPipe, Layout(pp=2, schedule="gpipe")),
    "1f1b": (Schedule1F1B, Layout(pp=2)),
    "interleaved 1f1b": (ScheduleInterleaved1F1B, Layout(pp=2, chunks=2)),
    "zero-bubble": (ScheduleInterleavedZeroBubble, Layout(pp=2, schedule="zero-bubble")),
}


class StageModule(nn.Module):
    """A stage as torch wants it: tokens or hidden states in, hidden states or logits out; gradients in `.grad`.

    torch's zero-bubble computes weight gradients from the graph, not through our queue.
    """

    def __init__(self, model, shape):
        super().__init__()
        self.model, self.shape = model, shape

    def forward(self, x):
        hidden = None if self.model.stage.embedding else x.flatten(0, 1)
        tokens = x if self.model.stage.embedding else torch.zeros(self.shape, dtype=torch.int64)
        y = self.model(tokens, hidden=hidden, step=StepContext())
        return y.view(*self.shape, -1)


def torch_pipeline(name: str, values: dict, layout: Layout):
    """A step of torch's schedule on this rank's stages: (sum of losses, tokens, gradients by global name)."""
    config = make_config(values, layout)
    parallel = build_parallel(config, "cpu")
    model = build_model(config, parallel, "cpu")
    batches = list(micro_batches(config, parallel, 1))
    shape = tuple(batches[0].tokens.shape)
    total = len(pipeline_stages(config.model, config.parallel))
    stages = [
        PipelineStage(StageModule(chunk, shape), parallel.pp.rank + i * parallel.pp.size, total, torch.device("cpu"))
        for i, chunk in enumerate(model.chunks)
    ]

    def loss(logits, target):
        labels, mask = target[..., 0], target[..., 1]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).sum()

    kind, _ = ORACLES[name]
    several = issubclass(kind, ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble)
    schedule = kind(stages if several else stages[0], len(batches), loss_fn=loss, scale_grads=False)
    tokens, target = (
        torch.cat([batch.tokens for batch in batches]),
        torch.cat([torch.stack([batch.labels, batch.loss_mask.long()], -1) for batch in batches]),
    )
    losses: list = []
    schedule.step(
        *([tokens] if parallel.pp.rank == 0 else []),
        **({"target": target, "losses": losses} if parallel.pp.rank == parallel.pp.size - 1 else {}),
    )
    grads = {spec.name: param.grad for spec, param in named_specs(model)}
    return sum(x.item() for x in losses), sum(b.loss_mask.sum().item() for b in batches), grads


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("gpipe", "1f1b"))) for n in ORACLES]
)
def test_losses_and_gradients_are_those_of_torch(pool, name):
    _, layout = ORACLES[name]
    ranks = pool.run_on(2, torch_pipeline, name, DEEP, layout)
    ours = run_layout(pool, DEEP, layout, 1)
    assert ranks[1][0] / ranks[1][1] == pytest.approx(ours.losses[0], rel=1e-6)
    grads = ranks[0][2] | ranks[1][2]
    assert grads.keys() == ours.grads.keys()
    for key, grad in grads.items():
        expected = ours.grads[key]
        grad = grad[: expected.shape[0]] if grad.dim() == expected.dim() else grad.view(expected.shape)
        assert distance(grad, expected) < 1e-5, key
