"""What one rank sends in one optimizer step, from the configuration alone.

The convention is that of `parallel.Meter`, which counts what runs send: bytes of the tensors that a rank hands to each
collective, its own shard for a gather and the whole tensor for the others, and one message a call. What that is on the
wire depends on the library's algorithm: `Traffic.wire_bytes` is a ring's.

A step is what every iteration does, from the second on: microbatches, reduction, update, gather, and the ranks' wishes
to stop. Left out is what comes at its own times: logs (--log-interval), evaluation, checkpoints, monitors, and the
names that stages tell each other once. Rows that go to experts are dealt to them evenly (`expert_traffic`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megafp8.config import Config
from megafp8.core.build import RecomputePlan
from megafp8.fp8 import policy
from megafp8.plan.layer_traffic import LayerTraffic, Microbatch, layers_passes
from megafp8.plan.linear_traffic import LinearTraffic
from megafp8.plan.optimizer_traffic import optimizer_traffic
from megafp8.plan.rank_parameters import held_layers, held_stages
from megafp8.plan.shapes import LayerShape
from megafp8.plan.traffic import Groups, Passes, Traffic, merged, times

FP64, INT64 = 8, 8


def step_traffic(config: Config, stage: int = 0, rank: int = 0) -> list[Traffic]:
    """Returns what one rank sends in an optimizer step, by kind, group and purpose.

    Args:
        config: resolved, with the vocabulary known (`with_vocab_size`); world size included.
        stage: the rank's place on the pipeline axis.
        rank: its number within the stage; it matters only where experts don't divide the choices evenly.
    """
    groups = Groups.of(config)
    micro = Microbatch(config, groups, policy.from_config(config), rank)
    count = config.train.global_batch_size // (config.train.micro_batch_size * groups["dp"].size)
    found = list(times((t for p in _microbatch(micro, stage) for t in p.all), count))
    for layer in held_layers(config, stage):
        found += [t for p in LayerTraffic(micro, layer).weight_passes() for t in p.all]
    found += _statistics(config, groups, stage)
    found += optimizer_traffic(config, groups, stage)
    return merged(found)


def _microbatch(micro: Microbatch, stage: int) -> Iterator[Passes]:
    """Of one microbatch, forward and backward, through the stages of a rank."""
    config = micro.config
    m, plan = config.model, RecomputePlan.of(config.train)

    def layer(shape: LayerShape) -> LayerTraffic:
        return LayerTraffic(micro, shape, plan.modules)

    for held in held_stages(config, stage):
        if held.embedding:
            yield _embedding(micro)
        layers = [LayerShape(f"layers.{number}", m.moe_layers[number]) for number in held.layers]
        yield from layers_passes(layers, plan, layer)
        yield _messages(micro, first=held.embedding, last=held.loss)
        if not held.loss:
            continue
        yield _head(micro)
        for k in range(m.mtp_num_layers or 0):
            yield _look_ahead(micro)
            yield _embedding(micro)
            depth = layer(LayerShape(f"mtp.{k}.layer", m.moe_layers[-1])).passes()
            yield depth.recomputed if plan.unit and plan.layers is None else depth
            yield _head(micro)


def _embedding(micro: Microbatch) -> Passes:
    found, tp = Passes(), micro.groups["tp"]
    if micro.sequence_parallel:
        found.add("forward", "scatter_sum", tp, "embedding output", micro.hidden)
        found.add("backward", "gather", tp, "embedding gradient", micro.own_hidden)
    else:
        found.add("forward", "sum", tp, "embedding output", micro.hidden)
    return found


def _head(micro: Microbatch) -> Passes:
    """LM head and loss, of all tokens or of some at a time; then backward computes them again."""
    chunks, local = micro.config.train.cross_entropy_chunks, micro.local
    if chunks == 1:
        return _head_of(micro, local)
    size = -(-local // chunks)
    sizes = [min(size, local - start) for start in range(0, local, size)]
    first, *rest = (_head_of(micro, part).recomputed for part in sizes)
    return first.then(*rest)


def _head_of(micro: Microbatch, local: int) -> Passes:
    """LM head and vocabulary-parallel cross entropy of `local` tokens on each rank."""
    m, tp = micro.config.model, micro.groups["tp"]
    tokens = local * (tp.size if micro.sequence_parallel else 1)
    head = LinearTraffic(
        "lm_head", "column", tp, tokens, m.hidden_size, m.padded_vocab_size, None, micro.element,
        sequence_parallel=micro.sequence_parallel, chunks=micro.chunks,
    )  # fmt: skip
    loss = Passes()
    loss.add("forward", "max", tp, "loss: largest logits", 4 * tokens)
    loss.add("forward", "sum", tp, "loss: sums and targets", 2 * 4 * tokens, 2)
    return head.passes().then(loss)


def _look_ahead(micro: Microbatch) -> Passes:
    """Multi-token prediction: ids, positions, labels (int64) and weights (FP32) of the tokens ahead."""
    found = Passes()
    found.add("forward", "gather", micro.groups["cp"], "tokens ahead", micro.tokens * (3 * INT64 + 4), 4)
    return found


def _messages(micro: Microbatch, *, first: bool, last: bool) -> Passes:
    """Hidden states to the next stage, and their gradients to the one before."""
    found, pp = Passes(), micro.groups["pp"]
    if not last:
        found.add("forward", "send", pp, "hidden states", micro.own_hidden)
    if not first:
        found.add("backward", "send", pp, "gradients of hidden states", micro.own_hidden)
    return found


def _statistics(config: Config, groups: Groups, stage: int) -> list[Traffic]:
    """Loss and valid tokens, what routers count, what goes into the log, and wishes to stop."""
    m, found = config.model, Passes()
    dp_cp, pp, world = groups["dp_cp"], groups["pp"], groups["world"]
    found.add("forward", "sum", dp_cp, "loss and valid tokens", 2 * FP64)
    found.add("forward", "sum", pp, "loss and valid tokens", 2 * FP64)
    experts = [layer.name for layer in held_layers(config, stage) if layer.experts]
    counts = len(experts) * m.num_experts * (2 if "global_aux_loss" in m.balancing_losses else 1) if experts else 0
    means = means_of_stage(config, stage, loads=False)
    size = (counts + 2 * len(means)) * FP64
    found.add("forward", "sum", dp_cp, "counts and means", size, int(size > 0))
    everywhere = {name for s in range(pp.size) for name in means_of_stage(config, s, loads=True)}
    found.add("forward", "sum", pp, "means", 2 * FP64 * len(everywhere), len(everywhere))
    if m.moe_per_layer_logging and m.num_experts:
        layers = sum(layer.experts for s in range(pp.size) for layer in held_layers(config, s))
        found.add("forward", "sum", pp, "loads of experts", layers * m.num_experts * FP64, layers)
    found.add("forward", "max", world, "wishes to stop", 2 * 4)
    return found.all


def means_of_stage(config: Config, stage: int, *, loads: bool) -> set[str]:
    """Names of the means that a stage reports; loads: also what it makes of its routers' counts."""
    m, names = config.model, set()
    for layer in held_layers(config, stage):
        if not layer.experts:
            continue
        kinds = list(m.balancing_losses)
        kinds = (["aux_loss"] if len(kinds) == 1 else kinds) + (["z_loss"] if m.moe_z_loss_coeff else [])
        kinds += ["expert_load_max", "expert_load_min"] if loads else []
        names |= set(kinds)
        names |= {f"{kind}/{layer.name}.mlp" for kind in kinds} if m.moe_per_layer_logging else set()
        names |= {"dropped_share"} if m.moe_expert_capacity_factor is not None else set()
    if any(held.loss for held in held_stages(config, stage)):
        names |= {f"mtp_{k + 1}_loss" for k in range(m.mtp_num_layers or 0)}
    return names


def by_kind(found: list[Traffic]) -> dict[tuple[str, str], Traffic]:
    """(kind, group) -> all of its traffic, for whatever purpose: what can be compared with what is counted."""
    return {(t.kind, t.group): t for t in merged(replace(t, purpose="") for t in found)}
