"""What the microbatches of a pipeline rank hold at once, from its real schedule.

A rank runs its list of actions (core/pipeline/schedules.py). A forward leaves what its stage keeps; backward frees it,
with temporaries on top of all that is held; a backward whose weight gradients wait (zero-bubble) leaves their operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megafp8.config import Config
from megafp8.config.pipeline import Stage
from megafp8.core.pipeline.schedules import Action, Kind, rank_actions
from megafp8.plan.activations import LayerKinds, Phase, peak_of
from megafp8.plan.layer_activations import Activation, quantized_bytes
from megafp8.plan.rank_parameters import held_stages
from megafp8.plan.shapes import LayerShape, layer_linears
from megafp8.plan.sizes import Sizes

BATCH_BYTES = 8 + 4 + 8
"""Labels, loss mask and positions of a token; its id is counted as the embedding's."""


@dataclass(frozen=True)
class ChunkBytes:
    """Of one stage and microbatch. kept: from forward to backward. extra: what its backward adds for a while, `what`
    in words. deferred: operands of weight gradients that wait."""

    kept: int
    extra: int
    what: str
    deferred: int = 0


@dataclass(frozen=True)
class InFlight:
    """A rank's moment of most bytes. held: by `pairs` of microbatch and stage, and weight gradients that wait.
    extra: comes and goes. microbatches: at most at once."""

    held: int
    pairs: int
    extra: Activation
    microbatches: int


def microbatches(config: Config) -> int:
    """Microbatches of a step on each data-parallel rank, at the largest global batch."""
    return max(
        1, config.train.global_batch_size // (config.train.micro_batch_size * config.parallel.data_parallel_size)
    )


def actions_of(config: Config, stage: int) -> tuple[Action, ...]:
    """The actions of pipeline rank `stage` in a step."""
    p, chunks = config.parallel, len(held_stages(config, stage))
    return rank_actions(
        p.pipeline_schedule,
        stage,
        p.pipeline_model_parallel_size,
        chunks,
        microbatches(config),
        group=p.microbatch_group_size_per_vp_stage,
    )


def in_flight(config: Config, stage: int, phases: Sequence[Sequence[Phase]]) -> InFlight:
    """Returns the moment of most bytes in a step of pipeline rank `stage`; phases: of each of its stages."""
    actions, held = actions_of(config, stage), held_stages(config, stage)
    waits = any(action.kind is Kind.WEIGHT for action in actions)
    chunks = [_chunk(p, operands_bytes(config, chunk) if waits else 0) for p, chunk in zip(phases, held, strict=True)]
    limit = config.parallel.wgrad_queue_mib
    found = most_held(actions, chunks, None if limit is None else limit << 20)
    data = Sizes.of(config).tokens * BATCH_BYTES
    return InFlight(found.held + found.microbatches * data, found.pairs, found.extra, found.microbatches)


def _chunk(phases: Sequence[Phase], deferred: int) -> ChunkBytes:
    kept = sum(phase.bytes for phase in phases)
    most, what = peak_of(phases)
    return ChunkBytes(kept, max(0, most - kept), what, deferred)


def most_held(actions: Sequence[Action], chunks: Sequence[ChunkBytes], wgrad_limit: int | None = None) -> InFlight:
    """The moment of most bytes among a rank's actions. wgrad_limit: bytes that waiting weight gradients may hold."""
    held = pairs = waiting = 0
    best, running, at_most = InFlight(0, 0, Activation("backward", "gradients", 0), 0), set(), 0
    for action in actions:
        chunk = chunks[action.chunk]
        if action.kind is Kind.FORWARD:
            held, pairs = held + chunk.kept, pairs + 1
            running.add(action.microbatch)
            at_most = max(at_most, len(running))
            continue
        if action.kind is Kind.WEIGHT:
            waiting -= chunk.deferred
        else:
            queued = waiting if wgrad_limit is None else min(waiting, wgrad_limit)
            if held + queued + chunk.extra >= best.held + best.extra.bytes:
                best = InFlight(held + queued, pairs, Activation("backward", chunk.what, chunk.extra), 0)
            held, pairs = held - chunk.kept, pairs - 1
            waiting += chunk.deferred if action.kind is Kind.INPUT else 0
            if action.chunk == 0:
                running.discard(action.microbatch)
    return InFlight(best.held, best.pairs, best.extra, at_most)


def operands_bytes(config: Config, chunk: Stage) -> int:
    """Both operands of the weight gradients of a stage's linears: dY and the input, of which a linear that gathers rows
    holds this rank's."""
    sizes, kinds, total = Sizes.of(config), LayerKinds(config), 0
    for number in chunk.layers:
        experts = config.model.moe_layers[number]
        plan = kinds(LayerShape(f"layers.{number}", experts)).plan()
        for whole in layer_linears(config.model, experts=experts):
            part, recipe = sizes.local(whole), plan.recipe(whole.part)
            rows = sizes.rows if "*" in part.part else sizes.tokens
            inputs = sizes.stream_tokens if plan.gathers(part.part) else rows
            for role, shape in (("grad_output", (rows, part.out_features)), ("input", (inputs, part.in_features))):
                in_fp8 = recipe is not None
                total += quantized_bytes(recipe, role, shape, "colwise") if in_fp8 else math.prod(shape) * sizes.element
    return total
