"""The fastest layouts of a job that fit a cluster: every combination goes through the real checks, then the forecast.

What the flags leave open is tried: tensor parallelism within a node, pipeline ranks and virtual stages, expert
parallelism, context parallelism of long sequences, micro-batches, and recomputation, the lightest that fits. Flags that
are given stay. FP8 weights are primary where the layout allows it.

Combinations are tried in the order of a time that none of them can beat (computation, and the messages of its layers,
on the busiest rank); once that is longer than the worst of the best so far, the rest is left out: what is found is what
trying all would find, the best of each set of sizes. Those whose weights and gradients alone are too large are left out
as well.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megafp8.config import Config, build_config, build_parser, parse_args, with_vocab_size
from megafp8.config.config import from_plain
from megafp8.config.fp8 import FP8Config
from megafp8.config.parallel import layout_sizes
from megafp8.config.parse import read_values
from megafp8.config.pipeline import pipeline_stages
from megafp8.data import build_tokenizer
from megafp8.plan.cluster import Cluster
from megafp8.plan.forecast import EXPERTS, Forecast, forecast, layer_waits
from megafp8.plan.in_flight import microbatches
from megafp8.plan.memory import MemoryPlan, cuts_primary_tiles, plan_memory
from megafp8.plan.shapes import parameters
from megafp8.plan.stage_time import StageClock

SELECTIVE, FULL = "recompute_granularity", "full"
FP8_FLAGS = {field.name for field in dataclasses.fields(FP8Config)} | {"moe_fp8_dispatch", "moe_fp8_combine_grad"}
RECOMPUTE_FLAGS = {"recompute_activations", SELECTIVE, "recompute_method", "recompute_num_layers", "recompute_modules"}
PIPELINE_FLAGS = {
    *("pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank"),
    *("num_layers_per_virtual_pipeline_stage", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
}
ALWAYS = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
        "context_parallel_size")  # fmt: skip
MICRO_BATCHES, VIRTUAL, LONG = (1, 2, 4), (1, 2, 4, 8), 32768
"""Tried sizes, and the sequence length in tokens from which context parallelism is tried."""


PRECISIONS = ("BF16", "FP8")


def given_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list]:
    """Returns the values of a command line's flags, `--config` included, and those without a field of ours.

    Nothing is checked against each other: what is open is not known yet. Raises ValueError for unknown flags.
    """
    namespace, rest = build_parser().parse_known_args(list(argv))
    if rest:
        parse_args(list(argv), env={}, check_files=False)  # says what is wrong
    values = vars(namespace)
    foreign, file = values.pop("foreign", []), values.pop("config", None)
    given = {} if file is None else read_values(file)
    return given | {name: from_plain(name, value) for name, value in values.items()}, foreign


def precisions(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of BF16's flags and of FP8's: those given, or blockwise with primary weights."""
    fp8 = {name: value for name, value in given.items() if name in FP8_FLAGS}
    if not fp8.get("fp8_format"):
        fp8 = {"fp8_format": "e4m3", "fp8_param_gather": True}
        fp8 |= {"moe_fp8_dispatch": True} if given.get("num_experts") else {}
    return dict(zip(PRECISIONS, ({"bf16": True}, {"bf16": True} | fp8), strict=True))


@dataclass(frozen=True)
class Found:
    """A layout that fits. memory: of every pipeline stage; recompute: in words."""

    forecast: Forecast
    memory: tuple[MemoryPlan, ...]
    recompute: str

    @property
    def config(self) -> Config:
        return self.forecast.config

    @cached_property
    def peak(self) -> int:
        """Bytes of the stage that needs most."""
        return max(plan.total for plan in self.memory)


@dataclass
class Search:
    """given: values of flags; foreign: flags of others' scripts (`config.build_config`); vocabulary: tokens.

    tried, refused, too_large: combinations that were looked at, against the rules, and that no recomputation makes fit.
    reasons: in words -> how many were refused for it, one text for all whose reasons name the same flags.
    least: bytes of the smallest that was found too large, as far as it was counted: it has no less.
    """

    given: Mapping[str, Any]
    cluster: Cluster
    gpus: int
    vocabulary: int
    foreign: Sequence = ()
    keep: int = 5
    tried: int = 0
    refused: int = 0
    too_large: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    least: float = math.inf
    _texts: dict[tuple[str, ...], str] = field(default_factory=dict)

    @staticmethod
    def of(given: Mapping[str, Any], cluster: Cluster, gpus: int, *, foreign: Sequence = (), keep: int = 5) -> Search:
        """A search whose vocabulary is the tokenizer's. Raises ValueError for what is wrong with the model's flags."""
        job = Search(given, cluster, gpus, 0, foreign, keep)
        job.vocabulary = build_tokenizer(job.config_of_model.data).vocab_size
        if "global_batch_size" not in given:
            raise ValueError("search compares layouts of one batch: give --global-batch-size")
        return job

    def run(self, precision: Mapping[str, Any], step: Callable[[int, int], object] = lambda a, b: None) -> list[Found]:
        """Returns the fastest layouts in one precision, best first, of the same sizes of all axes the best one only.

        step: told (number, of) of the tried.
        """
        best: dict[tuple, Found] = {}
        order = sorted(self._bounded(precision), key=lambda pair: pair[0])
        for number, (bound, values) in enumerate(order):
            if len(best) == self.keep and bound >= max(f.forecast.step for f in best.values()):
                break
            axes = tuple(values.get(name, 1) for name in AXES)
            if axes not in best or bound < best[axes].forecast.step:
                found = self._lightest(values)
                if found is not None and (axes not in best or found.forecast.step < best[axes].forecast.step):
                    best[axes] = found
                    best = dict(sorted(best.items(), key=lambda pair: pair[1].forecast.step)[: self.keep])
            step(number + 1, len(order))
        whole = [dataclasses.replace(f, forecast=forecast(f.config, self.cluster)) for f in best.values()]
        return sorted(whole, key=lambda f: f.forecast.step)

    def _bounded(self, precision: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """(seconds that a step takes at least, values) of every combination that the rules allow."""
        waits: dict[tuple, dict[bool, float]] = {}
        for values in self.structures():
            self.tried += 1
            config = self._checked(values | dict(precision))
            if config is None:
                continue
            smallest = self._smallest(config)
            if smallest > self.cluster.usable_bytes:
                self.too_large, self.least = self.too_large + 1, min(self.least, smallest)
                continue
            axes = layout_sizes(config.parallel)
            key = (*(axes[name] for name in ("tp", "cp", "ep", "etp")), config.train.micro_batch_size)
            if key not in waits:
                hides = {EXPERTS} if config.parallel.moe_shared_expert_overlap else ()
                found = layer_waits(config, self.cluster).items()
                waits[key] = {e: sum(s for what, s in w.items() if what not in hides) for e, w in found}
            fp8 = {"fp8_param_gather": config.fp8.fp8_param_gather} if config.fp8.enabled else {}
            yield self._shortest(config, waits[key]), values | dict(precision) | fp8

    def _smallest(self, config: Config) -> float:
        """Bytes of weights and FP32 gradients of the mean stage: no rank of the largest one has less."""
        axes = layout_sizes(config.parallel)
        cut = {True: axes["ep"] * axes["etp"], False: axes["tp"]}
        held = sum(count / cut[expert] for expert, count in self._parameters.items()) / axes["pp"]
        return held * (4 + (1 if config.fp8.fp8_param_gather else 2))

    @cached_property
    def _parameters(self) -> dict[bool, int]:
        """Whether of experts -> how many there are."""
        found = parameters(with_vocab_size(self.config_of_model, self.vocabulary))
        return {expert: sum(p.unpadded_numel for p in found if p.expert == expert) for expert in (False, True)}

    def _shortest(self, config: Config, waits: dict[bool, float]) -> float:
        clock, size, moe = (
            StageClock(config, self.cluster),
            config.parallel.pipeline_model_parallel_size,
            config.model.moe_layers,
        )
        times = [
            clock.chunk(chunk).total + sum(waits[moe[number]] for number in chunk.layers)
            for chunk in pipeline_stages(config.model, config.parallel)
        ]
        return microbatches(config) * max(sum(times[rank::size]) for rank in range(size))

    def config(self, values: Mapping[str, Any]) -> Config:
        """Raises ValueError as `build_config` does."""
        plain = {name: value for name, value in self.given.items() if name not in FP8_FLAGS}
        env = {"WORLD_SIZE": str(self.gpus)}
        config = build_config(env=env, check_files=False, foreign=self.foreign, **plain | dict(values))
        return with_vocab_size(config, self.vocabulary)

    def structures(self) -> Iterator[dict[str, Any]]:
        """Sizes of all axes and stages, micro-batches: what recomputation and precision leave open."""
        m = self.config_of_model.model
        for pp in self._open("pipeline_model_parallel_size", _divisors(self.gpus, min(64, m.num_layers))):
            for tp in self._open("tensor_model_parallel_size", _powers(self.cluster.gpus_per_node)):
                for ep in self._open("expert_model_parallel_size", _powers(m.num_experts) if m.num_experts else [1]):
                    yield from self._stages(pp, tp, ep)

    def _stages(self, pp: int, tp: int, ep: int) -> Iterator[dict[str, Any]]:
        seq = self.config_of_model.data.seq_length
        sizes = {"pipeline_model_parallel_size": pp, "tensor_model_parallel_size": tp}
        sizes |= (
            {"expert_model_parallel_size": ep, "sequence_parallel": True} if ep > 1 else {"sequence_parallel": True}
        )
        if ep > 1 and "expert_tensor_parallel_size" not in self.given:
            sizes["expert_tensor_parallel_size"] = 1
        for cp in self._open("context_parallel_size", [1, 2, 4, 8] if seq >= LONG else [1]):
            for stages in self._splits(pp):
                for size in self._open("micro_batch_size", MICRO_BATCHES):
                    yield ALWAYS | sizes | stages | {"context_parallel_size": cp, "micro_batch_size": size}

    @cached_property
    def config_of_model(self) -> Config:
        """The model alone, as one process would train it. Raises ValueError for what is wrong with its flags."""
        layout = {name for name in self.given if name.endswith("parallel_size") or name in PIPELINE_FLAGS}
        alone = {name: v for name, v in self.given.items() if name not in layout | FP8_FLAGS | {"global_batch_size"}}
        return build_config(env={}, check_files=False, foreign=self.foreign, **{"micro_batch_size": 1} | alone)

    def _open(self, name: str, choices: Sequence[int]) -> Sequence[int]:
        return [self.given[name]] if name in self.given else choices

    def _splits(self, pp: int) -> Iterator[dict[str, Any]]:
        """How the layers lie on the stages: evenly, and so that the last stage has fewer for the LM head's sake."""
        if pp == 1 or PIPELINE_FLAGS & set(self.given):
            yield {}
            return
        m = self.config_of_model.model
        for chunks in VIRTUAL:
            if pp * chunks > m.num_layers:
                return
            if m.num_layers % (pp * chunks) == 0:
                yield {"num_virtual_stages_per_pipeline_rank": chunks} if chunks > 1 else {}
            layouts = [balanced_layout(m.num_layers, pp * chunks, m.mtp_num_layers or 0, n) for n in self.head_layers]
            for layout in dict.fromkeys(filter(None, layouts)):
                yield {"pipeline_model_parallel_layout": layout}

    @cached_property
    def head_layers(self) -> tuple[int, int]:
        """As many layers as LM head, loss and multi-token prediction take the time of, rounded down and up: which is
        better depends on how the others come out on the stages."""
        config = with_vocab_size(self.config_of_model, self.vocabulary)
        clock, m = StageClock(config, self.cluster), config.model
        (whole,) = pipeline_stages(m, config.parallel)
        body = dataclasses.replace(whole, loss=False)
        layers = clock.chunk(body).total
        ratio = (clock.chunk(whole).total - layers) / (layers / m.num_layers)
        return math.floor(ratio), math.ceil(ratio)

    def _lightest(self, values: dict[str, Any]) -> Found | None:
        """With the first recomputation that makes it fit; None: not even the last does."""
        *lighter, last = self._recomputations()
        most = self._fitting(values, *last)
        if most is None:
            self.too_large += 1
            return None
        found = next(filter(None, (self._fitting(values, *choice) for choice in lighter)), most)
        config, memory, recompute = found
        return Found(forecast(config, self.cluster, quick=True), memory, recompute)

    def _fitting(
        self, values: dict[str, Any], recompute: str, flags: dict[str, Any]
    ) -> tuple[Config, tuple[MemoryPlan, ...], str] | None:
        config = self._checked(values | flags)
        memory = None if config is None else self._memory(config)
        return None if memory is None else (config, memory, recompute)

    def _checked(self, values: dict[str, Any]) -> Config | None:
        if values.get("expert_model_parallel_size", 1) == 1 and "moe_fp8_dispatch" not in self.given:
            values = {name: value for name, value in values.items() if name != "moe_fp8_dispatch"}  # nothing travels
        try:
            config = self.config(values)
        except ValueError as error:
            text = str(error)
            self.refused += 1
            self.reasons[self._texts.setdefault(tuple(re.findall(r"--[\w-]+", text)), text)] += 1
            return None
        if config.fp8.fp8_param_gather and cuts_primary_tiles(config):
            return self._checked(values | {"fp8_param_gather": False})
        return config

    def _recomputations(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(in words, flags), from the lightest on."""
        if RECOMPUTE_FLAGS & set(self.given):
            yield "as given", {}
            return
        m = self.config_of_model.model
        light = ["layernorm", *(["mla_up_proj"] if m.multi_latent_attention else [])]
        light += ["moe_act"] if m.num_experts else []
        heavy = [*light[:1], *light[1:2] * m.multi_latent_attention, "mlp", *(["moe"] if m.num_experts else [])]
        yield "none", {}
        for modules in (light, heavy):
            yield " ".join(modules), {SELECTIVE: "selective", "recompute_modules": tuple(modules)}
        yield FULL, {SELECTIVE: FULL, "recompute_method": "uniform", "recompute_num_layers": 1}

    def _memory(self, config: Config) -> tuple[MemoryPlan, ...] | None:
        """Of all stages; None as soon as one doesn't fit."""
        size, plans = config.parallel.pipeline_model_parallel_size, {}
        for stage in [0, size - 1, *range(1, size - 1)]:
            plans[stage] = plan_memory(config, stage=stage)
            if plans[stage].total > self.cluster.usable_bytes:
                self.least = min(self.least, plans[stage].total)
                return None
        return tuple(plans[stage] for stage in range(size))


def balanced_layout(layers: int, stages: int, depths: int, head: int) -> str | None:
    """A `--pipeline-model-parallel-layout` whose last stage has about `head` layers fewer; None where all are alike.

    What doesn't come out even goes to the stages in the middle.
    """
    last = max(0, round((layers + head) / stages) - head)
    each, over = divmod(layers - last, stages - 1)
    counts = [each] * (stages - 1) + [last]
    for extra in range(over):
        counts[(stages - 1 - over) // 2 + extra] += 1
    return None if len(set(counts)) == 1 or each == 0 else written_layout(counts, depths)


def written_layout(counts: Sequence[int], depths: int = 0) -> str:
    """The `--pipeline-model-parallel-layout` of stages with so many layers each, like ones together."""

    def layers(count: int) -> str:
        return "t" * count if count < 2 else f"t*{count}"

    text, rest = f"E{layers(counts[0])}|", list(counts[1:-1])
    while rest:
        run = next((n for n, count in enumerate(rest) if count != rest[0]), len(rest))
        text += f"({layers(rest[0])}|)*{run}" if run > 1 else f"{layers(rest[0])}|"
        rest = rest[run:]
    return text + layers(counts[-1]) + "m" * depths + "L"


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, most + 1) if number % n == 0]


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]
