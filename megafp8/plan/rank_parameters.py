"""The parameters that one rank holds, in the order in which the model uses them: what its optimizer lays out.

A pipeline rank holds its stages' layers and ends; tensor parallelism cuts linears and the vocabulary; expert
parallelism deals experts out. Shapes are the local ones, vocabulary padding included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from megafp8.config import Config
from megafp8.config.parallel import layout_sizes
from megafp8.config.pipeline import Stage, pipeline_stages, stages_of_rank
from megafp8.fp8 import Recipe, policy
from megafp8.optimizer.groups import precision_of
from megafp8.optimizer.layout import BUCKET_ELEMENTS, BufferLayout, Entry, Group, plan_layouts
from megafp8.plan.shapes import LayerShape, PartShape, attention_norms, layer_linears

COLUMN = ("qkv", "q_proj", "q_up", "kv_up", "fc1")
"""Last name components of linears whose output features are cut over tensor-parallel ranks."""
ROW = ("proj", "fc2")
"""Of those whose input features are cut. The others are whole on every rank."""


@dataclass(frozen=True)
class RankParameter:
    """name: global; shape: local, as stored. decay: weight decay applies. expert: belongs to an expert.

    partial: each tensor-parallel rank's gradient is a part, and they are summed. shared: another pipeline stage holds
    it too. recipe: of a linear's weight in FP8. stack, number: of weights that are multiplied together.
    """

    name: str
    shape: tuple[int, ...]
    expert: bool = False
    partial: bool = False
    shared: bool = False
    recipe: Recipe | None = None
    stack: str = ""
    number: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        return len(self.shape) > 1


def held_stages(config: Config, stage: int) -> tuple[Stage, ...]:
    """The stages of pipeline rank `stage`, in the model's order."""
    size = config.parallel.pipeline_model_parallel_size
    return stages_of_rank(pipeline_stages(config.model, config.parallel), size, stage)


def held_layers(config: Config, stage: int) -> list[LayerShape]:
    """The layers of pipeline rank `stage`, those of multi-token prediction last."""
    m, found = config.model, []
    for held in held_stages(config, stage):
        found += [LayerShape(f"layers.{number}", m.moe_layers[number]) for number in held.layers]
        if held.loss:
            found += [LayerShape(f"mtp.{k}.layer", m.moe_layers[-1]) for k in range(m.mtp_num_layers or 0)]
    return found


def rank_parameters(config: Config, stage: int = 0) -> list[RankParameter]:
    """Returns the parameters of a rank of pipeline rank `stage`, the first of its tensor- and expert-parallel groups.

    Args:
        config: resolved, with the vocabulary known (`with_vocab_size`).
    """
    return list(_Rank(config, stage).parameters())


def rank_layouts(config: Config, stage: int = 0) -> tuple[BufferLayout, ...]:
    """Returns the layouts of that rank's flat buffers, buckets included, as its optimizer plans them."""
    sizes, p = layout_sizes(config.parallel), config.parallel
    shards = (sizes["dp"] * sizes["cp"], sizes["edp"]) if config.optimizer.use_distributed_optimizer else (1, 1)
    buckets = BUCKET_ELEMENTS if p.overlap_grad_reduce or p.overlap_param_gather else None
    entries = _entries(config, rank_parameters(config, stage))
    return plan_layouts(entries, shards=shards[0], expert_shards=shards[1], bucket_elements=buckets)


def _entries(config: Config, held: Iterable[RankParameter]) -> Iterator[Entry]:
    """Gradients get ready in the opposite order of use."""
    dtype = torch.bfloat16 if config.train.bf16 else torch.float32
    for order, p in enumerate(reversed(list(held))):
        primary = config.fp8.fp8_param_gather and p.recipe is not None
        yield Entry(
            p.name,
            p.numel,
            p.recipe.quantizer("weight").spec.format.dtype if primary else dtype,
            p.expert,
            Group(p.decay),
            p.partial or p.shared,
            order,
            precision_of(p.name, p.shape, config),
            p.stack,
            p.number,
        )


class _Rank:
    def __init__(self, config: Config, stage: int) -> None:
        self.config, self.m, self.stage = config, config.model, stage
        self.sizes = layout_sizes(config.parallel)
        self.tp = self.sizes["tp"]
        self.sequence_parallel = config.parallel.sequence_parallel and self.tp > 1
        self.exchanges = self.sizes["ep"] > 1 or self.sizes["etp"] != self.tp
        self.recipe_of = policy.from_config(config)

    def parameters(self) -> Iterator[RankParameter]:
        for held in held_stages(self.config, self.stage):
            yield from self._chunk(held)

    def _chunk(self, held: Stage) -> Iterator[RankParameter]:
        m, h = self.m, self.m.hidden_size
        tied, depths = not m.untie_embeddings_and_output_weights, m.mtp_num_layers or 0
        several = self.sizes["pp"] > 1 and (tied or depths)
        word = RankParameter(
            "embedding.word_embeddings.weight", (m.padded_vocab_size // self.tp, h), shared=bool(several)
        )
        embedding = held.embedding or (held.loss and depths)
        if embedding:
            yield word
            if m.position_embedding_type == "learned_absolute":
                name, shape = "embedding.position_embeddings.weight", (m.max_position_embeddings, h)
                yield RankParameter(name, shape, partial=self.sequence_parallel, shared=bool(several and depths))
        for number in held.layers:
            yield from self._layer(LayerShape(f"layers.{number}", m.moe_layers[number]))
        if not held.loss:
            return
        yield from self._hidden_norm("final_norm")
        if not tied:
            yield replace(word, name="lm_head.weight", shared=False)
        elif not embedding:
            yield word
        for k in range(depths):
            yield from self._hidden_norm(f"mtp.{k}.embedding_norm")
            yield from self._hidden_norm(f"mtp.{k}.hidden_norm")
            yield RankParameter(f"mtp.{k}.eh_proj.weight", (h, 2 * h), partial=self.sequence_parallel)
            yield from self._layer(LayerShape(f"mtp.{k}.layer", m.moe_layers[-1]))
            yield from self._hidden_norm(f"mtp.{k}.final_norm")

    def _layer(self, layer: LayerShape) -> Iterator[RankParameter]:
        parts = {shape.part: shape for shape in layer_linears(self.m, experts=layer.experts)}
        norms = attention_norms(self.m)
        yield from self._hidden_norm(f"{layer.name}.input_norm")
        for part, shape in parts.items():
            if not part.startswith("attention."):
                continue
            if part == "attention.proj" and not self.m.multi_latent_attention:
                yield from self._head_norms(layer, norms)
            yield from self._linear(layer, part, shape)
            if self.m.multi_latent_attention:
                yield from self._latent_norms(layer, part, norms)
        yield from self._hidden_norm(f"{layer.name}.mlp_norm")
        if layer.experts:
            shape, part = (self.m.num_experts, self.m.hidden_size), self.exchanges and self.sequence_parallel
            yield RankParameter(f"{layer.name}.mlp.router.weight", shape, partial=part)
            yield from self._experts(layer, [shape for part, shape in parts.items() if "*" in part])
        for part, shape in parts.items():
            if part.startswith("mlp.") and "*" not in part:
                yield from self._linear(layer, part, shape)

    def _experts(self, layer: LayerShape, shapes: list[PartShape]) -> Iterator[RankParameter]:
        for number in range(self.m.num_experts // self.sizes["ep"]):
            for shape in shapes:
                stack = f"{layer.name}.{shape.part.replace('.*', '')}"
                for p in self._linear(layer, shape.part.replace("*", str(number)), shape, self.sizes["etp"]):
                    yield replace(p, expert=True, stack=stack, number=number)

    def _linear(self, layer: LayerShape, part: str, shape: PartShape, ranks: int = 0) -> Iterator[RankParameter]:
        """ranks: that the weight is cut over, if not the tensor-parallel ones."""
        name, kind, ranks = f"{layer.name}.{part}", part.rpartition(".")[2], ranks or self.tp
        out, inside = shape.out_features, shape.in_features
        cut = out // ranks if kind in COLUMN else out, inside // ranks if kind in ROW else inside
        partial = kind == "gate" and self.exchanges and self.sequence_parallel
        yield RankParameter(f"{name}.weight", cut, partial=partial, recipe=self.recipe_of(name))
        if shape.bias:
            yield RankParameter(f"{name}.bias", cut[:1], partial=kind in ROW and self.sequence_parallel)

    def _norm(self, name: str, size: int, partial: bool) -> Iterator[RankParameter]:
        yield RankParameter(f"{name}.weight", (size,), partial=partial)
        if self.m.normalization == "LayerNorm":
            yield RankParameter(f"{name}.bias", (size,), partial=partial)

    def _hidden_norm(self, name: str) -> Iterator[RankParameter]:
        yield from self._norm(name, self.m.hidden_size, self.sequence_parallel)

    def _head_norms(self, layer: LayerShape, norms: dict[str, int]) -> Iterator[RankParameter]:
        for norm, size in norms.items():
            yield from self._norm(f"{layer.name}.attention.{norm}", size, self.tp > 1)

    def _latent_norms(self, layer: LayerShape, part: str, norms: dict[str, int]) -> Iterator[RankParameter]:
        norm = {"attention.q_down": "q_norm", "attention.kv_down": "kv_norm"}.get(part)
        if norm in norms:
            yield from self._norm(f"{layer.name}.attention.{norm}", norms[norm], False)
