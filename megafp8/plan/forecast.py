"""Time of an optimizer step on a cluster, tokens a second and utilization, from the configuration alone.

    compute     stage_time.py: every microbatch in every stage
    exposed     messages of tensor, context and expert parallelism, half in forward, half in backward. (Some of tensor
                parallelism's travel behind GEMMs, and slow them down about as much.)
                --tp-comm-overlap leaves a piece of tensor parallelism's, --moe-shared-expert-overlap hides the shared
                experts' time
    bubble      the real schedule, run on paper with every stage's own times and its messages
    reduction, gather    of gradients and weights: with --overlap-grad-reduce and --overlap-param-gather only what does
                not fit behind the last backward and the first forward of a rank's stages
    update      the optimizer's, by bandwidth

Not counted: the host, data, logs, evaluation, checkpoints, other jobs on the network, uneven loads of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megafp8.config import Config, DataConfig, TrainConfig
from megafp8.config.pipeline import Stage, pipeline_stages
from megafp8.core.build import OVERLAP_CHUNKS, RecomputePlan
from megafp8.core.pipeline.schedules import Costs, build_schedule, simulate
from megafp8.fp8 import policy
from megafp8.plan.cluster import Cluster
from megafp8.plan.communication import step_traffic
from megafp8.plan.flops import training_flops_per_token
from megafp8.plan.in_flight import microbatches
from megafp8.plan.layer_traffic import LayerTraffic, Microbatch
from megafp8.plan.links import Links
from megafp8.plan.optimizer_traffic import optimizer_traffic
from megafp8.plan.rank_parameters import rank_layouts
from megafp8.plan.shapes import LayerShape
from megafp8.plan.stage_time import LayerTimes, StageClock, Times
from megafp8.plan.traffic import Groups, Traffic
from megafp8.training.throughput import Peaks, ideal_seconds_per_token

EXPERTS = "expert parallelism"
WITH_LAYERS = {"tp": "tensor parallelism", "etp": "expert tensor parallelism", "cp": "context parallelism",
               "ep": EXPERTS, "ep_etp": EXPERTS}  # fmt: skip
"""Groups whose messages belong to a microbatch."""


@dataclass(frozen=True)
class StageForecast:
    """Seconds of one microbatch through all of a rank's stages, and of its step. exposed: by purpose, of a microbatch.

    reduction, gather: of gradients and weights, hidden parts left out. message: of hidden states to the next stage.
    """

    chunks: tuple[Times, ...]
    exposed: dict[str, float]
    reduction: float
    gather: float
    update: float
    message: float

    @property
    def compute(self) -> float:
        return sum(times.total for times in self.chunks)

    @property
    def waiting(self) -> float:
        return sum(self.exposed.values())

    @property
    def costs(self) -> list[Costs]:
        """Of each of the rank's stages."""
        side = self.waiting / len(self.chunks) / 2
        return [Costs(t.forward + side, t.input + side, t.weight, self.message) for t in self.chunks]


@dataclass(frozen=True)
class Forecast:
    """A configuration on a cluster. stages: of each pipeline rank; step: seconds; slowest: the busiest rank."""

    config: Config
    cluster: Cluster
    stages: tuple[StageForecast, ...]
    schedule: float

    @property
    def slowest(self) -> StageForecast:
        return max(self.stages, key=lambda s: s.compute + s.waiting)

    @property
    def step(self) -> float:
        return self.schedule + max(s.reduction + s.gather + s.update for s in self.stages)

    @property
    def bubble(self) -> float:
        """Seconds that the busiest rank waits for others."""
        busy = self.slowest.compute + self.slowest.waiting
        return max(0.0, self.schedule - microbatches(self.config) * busy)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.config.train.global_batch_size * self.config.data.seq_length / self.step

    @property
    def per_gpu(self) -> float:
        return self.tokens_per_second / self.config.parallel.world_size

    @property
    def utilization(self) -> float:
        """MFU as training logs it: each product at the peak of its dtype."""
        c = self.cluster
        peaks = Peaks(c.fp32_tflops, c.bf16_tflops, c.fp8_tflops)
        return ideal_seconds_per_token(self.config, peaks, has_mxfp8=False) * self.per_gpu

    @property
    def tflops(self) -> float:
        """Model TFLOPS a GPU, of whatever dtype."""
        return training_flops_per_token(self.config) * self.per_gpu / 1e12

    @property
    def parts(self) -> dict[str, float]:
        """What adds up to the step, seconds of the busiest rank."""
        count, slow = microbatches(self.config), self.slowest
        ends = max(self.stages, key=lambda s: s.reduction + s.gather + s.update)
        return {
            "compute": count * slow.compute,
            **{f"exposed: {what}": count * seconds for what, seconds in slow.exposed.items()},
            "pipeline bubble": self.bubble,
            "gradient reduction": ends.reduction,
            "weight gather": ends.gather,
            "optimizer": ends.update,
        }


def forecast(config: Config, cluster: Cluster, *, quick: bool = False) -> Forecast:
    """Returns the forecast of a resolved configuration whose vocabulary is known.

    quick: messages of the layers alone are counted; the schedule is run with a few microbatches, and the rest added at
    the busiest rank's pace.
    """
    clock, links = StageClock(config, cluster), Links.of(config, cluster)
    size = config.parallel.pipeline_model_parallel_size
    stages, like, moe = [], {}, config.model.moe_layers
    kinds = [clock.kinds(LayerShape(f"layers.{number}", experts)) for number, experts in enumerate(moe)]
    for stage in range(size):
        held = pipeline_stages(config.model, config.parallel)[stage::size]
        key = tuple((chunk.embedding, chunk.loss, *(kinds[number] for number in chunk.layers)) for chunk in held)
        if key not in like:
            like[key] = _stage(config, clock, links, stage, quick)
        stages.append(like[key])
    return Forecast(config, cluster, tuple(stages), _length(config, stages, quick))


def layer_waits(config: Config, cluster: Cluster, *, again: bool = False) -> dict[bool, dict[str, float]]:
    """Returns the seconds that a layer, with experts or without, waits for its messages in a microbatch, by purpose.

    again: also for those of what backward computes again.
    """
    links, m, plan = Links.of(config, cluster), config.model, RecomputePlan.of(config.train)
    micro = Microbatch(config, Groups.of(config), policy.from_config(config))
    waits: dict[bool, dict[str, float]] = {}
    for experts in set(m.moe_layers):
        layer = LayerShape(f"layers.{m.moe_layers.index(experts)}", experts)
        passes = LayerTraffic(micro, layer, plan.modules if again else frozenset()).passes()
        waits[experts] = _by_purpose(config, links, (passes.recomputed if again and plan.unit else passes).all)
    return waits


def _by_purpose(config: Config, links: Links, found: Iterable[Traffic], count: int = 1) -> dict[str, float]:
    """Seconds of the messages that belong to a microbatch, of which there are `count`."""
    waits: dict[str, float] = {}
    for t in found:
        if t.group in WITH_LAYERS and t.messages >= count and t.kind != "send":
            pieces = OVERLAP_CHUNKS if t.group == "tp" and config.parallel.tp_comm_overlap else 1
            what = WITH_LAYERS[t.group]
            waits[what] = waits.get(what, 0.0) + links.seconds(t) / count / pieces
    return waits


def _stage(config: Config, clock: StageClock, links: Links, stage: int, quick: bool) -> StageForecast:
    size, p = config.parallel.pipeline_model_parallel_size, config.parallel
    held = pipeline_stages(config.model, p)[stage::size]
    chunks = tuple(clock.chunk(chunk) for chunk in held)
    ends = _ends(config, links.cluster, stage)
    exposed: dict[str, float] = {}
    if quick:
        waits, moe = layer_waits(config, links.cluster, again=True), config.model.moe_layers
        for number in (number for chunk in held for number in chunk.layers):
            for what, seconds in waits[moe[number]].items():
                exposed[what] = exposed.get(what, 0.0) + seconds
    else:
        once = {(t.kind, t.group, t.purpose) for t in optimizer_traffic(config, Groups.of(config), stage)}
        found = (t for t in step_traffic(config, stage) if (t.kind, t.group, t.purpose) not in once)
        exposed = _by_purpose(config, links, found, microbatches(config))
    if p.moe_shared_expert_overlap and EXPERTS in exposed:
        exposed[EXPERTS] = max(0.0, exposed[EXPERTS] - _shared_experts(config, clock, held))
    update = clock.update(ends.elements, ends.shard) + ends.rest
    backward, forward = sum(t.input + t.weight for t in chunks), sum(t.forward for t in chunks)
    return StageForecast(
        chunks,
        exposed,
        _hidden(ends.reduction, backward, p.overlap_grad_reduce, ends.buckets),
        _hidden(ends.gather, forward, p.overlap_param_gather, ends.buckets),
        update,
        links.seconds(Traffic("send", "pp", "hidden states", clock.sizes.stream, 1, size)) if size > 1 else 0.0,
    )


def _shared_experts(config: Config, clock: StageClock, held: Iterable[Stage]) -> float:
    """Seconds of the shared experts in a rank's stages, which run while tokens travel."""
    m, total = config.model, 0.0
    for number in (number for chunk in held for number in chunk.layers if m.moe_layers[number]):
        kind = clock.kinds(LayerShape(f"layers.{number}", True))
        total += LayerTimes(clock.cluster, kind, config.data.seq_length).parts().get("shared", Times()).total
    return total


@dataclass(frozen=True)
class _Ends:
    """Seconds of what happens once a step: gradients reduced, weights gathered, the rest. elements: of the buffers and
    of this rank's shards. buckets: pieces that they are in."""

    reduction: float
    gather: float
    rest: float
    elements: int
    shard: int
    buckets: int


def _ends(config: Config, cluster: Cluster, stage: int) -> _Ends:
    train = TrainConfig(bf16=config.train.bf16, micro_batch_size=1, global_batch_size=1)
    return _ends_of(dataclasses.replace(config, train=train, data=DataConfig(), notes=(), given={}), cluster, stage)


@lru_cache(maxsize=1 << 12)
def _ends_of(config: Config, cluster: Cluster, stage: int) -> _Ends:
    links, layouts = Links.of(config, cluster), rank_layouts(config, stage)
    once = optimizer_traffic(config, Groups.of(config), stage)
    reduction = sum(links.seconds(t) for t in once if t.purpose.startswith("gradients") and t.kind != "gather")
    gather = sum(links.seconds(t) for t in once if t.purpose.startswith("weights"))
    return _Ends(
        reduction,
        gather,
        sum(links.seconds(t) for t in once) - reduction - gather,
        sum(layout.numel for layout in layouts),
        sum(layout.numel // layout.shards for layout in layouts),
        max(1, sum(len(layout.buckets) for layout in layouts)),
    )


def _hidden(seconds: float, behind: float, overlaps: bool, buckets: int) -> float:
    """What shows of a communication in `buckets` pieces behind other work: the last piece never hides."""
    return max(seconds - behind, seconds / buckets) if overlaps else seconds


def _length(config: Config, stages: list[StageForecast], quick: bool) -> float:
    """Seconds from the first forward to the last backward."""
    p, count = config.parallel, microbatches(config)
    size, chunks = p.pipeline_model_parallel_size, len(stages[0].chunks)
    busiest = max(s.compute + s.waiting for s in stages)
    if size == 1:
        return count * busiest
    shown = min(count, 2 * max(size, p.microbatch_group_size_per_vp_stage or 0)) if quick else count
    schedule = build_schedule(p.pipeline_schedule, size, chunks, shown, group=p.microbatch_group_size_per_vp_stage)
    costs = [stages[number % size].costs[number // size] for number in range(size * chunks)]
    return simulate(schedule, costs).length + (count - shown) * busiest
