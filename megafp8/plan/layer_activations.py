"""What a layer holds for backward on one rank, by module, in bytes: the formulas of activations.py, and those of

latent attention (rq, rk widths of the latents, c and v channels of a head's queries and values):
    q_norm, kv_norm        T rq e, T rk e and FP32 statistics
    q_up, kv_up            T rq e, T rk e, or q8
    core attention         T a (2c + v) e (q, k, v; or what "mla_up_proj" makes them from), T a v e (its output), 4 T a

a mixture of experts (R routed rows, T k on one rank, taken as spread evenly over E experts):
    router                 T h e (its input), 4 T E (scores), indices and weights of R rows
    experts.fc1            R h e, or E of q8(R/E x h)           fc2   as in the MLP
    activation             R i e, or in FP8 R i and scales
    shared_experts         as the MLP, but in high precision fc1's input is the router's; T (h + 2) e for a gate
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megafp8.fp8 import Recipe, gemm, policy
from megafp8.fp8.formats import Scale
from megafp8.fp8.grouped_linear import rows_filled_to, runs_grouped
from megafp8.fp8.shards import travels_in_fp8
from megafp8.plan.shapes import LayerShape, PartShape, attention_norms, layer_linears
from megafp8.plan.sizes import Sizes

ROW_BYTES = 3 * 8 + 2 * 4
"""A routed row's expert, token and place (int64), its weight, and what the weight was made of (FP32)."""
ARRIVED_BYTES = 2 * 8 + 4
"""A row that came from another rank: its place before and after sorting (int64), its weight (FP32)."""


@dataclass(frozen=True)
class Activation:
    """Bytes that `module` holds. what: which tensors, in words."""

    module: str
    what: str
    bytes: int


@dataclass(frozen=True)
class LayerPlan:
    """One layer: `recomputed` names the parts that backward computes again ("core_attn", "layernorm", "mlp", "moe")."""

    layer: LayerShape
    sizes: Sizes
    recipe_of: policy.Policy
    device: torch.device
    recomputed: tuple[str, ...] = ()
    fp8_input_store: bool | None = None

    def items(self) -> Iterator[Activation]:
        """What the layer holds when its forward ends, in the order of the forward pass."""
        s = self.sizes
        yield self._norm("input_norm", None if s.model.multi_latent_attention else "attention.qkv")
        yield from self._latent_attention() if s.model.multi_latent_attention else self._attention()
        yield from self._core()
        yield self._norm("mlp_norm", None if self.layer.experts else "mlp.fc1")
        if ("moe" if self.layer.experts else "mlp") not in self.recomputed:
            yield from self._experts() if self.layer.experts else self._mlp("mlp", self._keeps_norms)

    def _norm(self, name: str, consumer: str | None, width: int | None = None) -> Activation:
        """consumer: the linear that alone reads the norm's output."""
        s = self.sizes
        produces = consumer is not None and s.model.normalization == "RMSNorm" and self._quantizes_shard(consumer)
        rows = s.tokens if width else s.stream_tokens  # a latent is whole on every rank
        return Activation(name, "input", s.norm(rows, width or s.model.hidden_size, produces=produces))

    def _quantizes_shard(self, part: str) -> bool:
        """Whether a linear quantizes its input where it is made, before any gather."""
        recipe = self.recipe(part)
        return recipe is not None and (not self.gathers(part) or travels_in_fp8(recipe.quantizer("input")))

    def gathers(self, part: str) -> bool:
        """Whether a linear gathers its input's rows over tensor-parallel ranks, so that it keeps its own ones."""
        s = self.sizes
        shard = part.rpartition(".")[2] in ("qkv", "fc1") and "*" not in part
        return s.sequence_parallel and shard and ("shared_experts" not in part or s.exchanges)

    @property
    def _keeps_norms(self) -> bool:
        return "layernorm" not in self.recomputed

    def _attention(self) -> Iterator[Activation]:
        s, m = self.sizes, self.sizes.model
        if self._keeps_norms:
            yield self._input("attention.qkv")
        if m.qk_layernorm:
            groups = m.num_query_groups // s.tp
            heads = m.num_attention_heads // s.tp + groups
            rows = s.tokens * (heads + groups) * m.kv_channels * s.element
            yield Activation("attention.q_norm, k_norm", "output of qkv", rows + 4 * s.statistics * s.tokens * heads)

    def _latent_attention(self) -> Iterator[Activation]:
        s = self.sizes
        first = ("attention.q_proj",) if s.model.q_lora_rank is None else ("attention.q_down",)
        if self._keeps_norms or s.sequence_parallel:  # gathered tokens are no norm's output
            kept = []  # recipes whose copy is there: linears that want the same share it, as those in BF16 share one
            shared = s.model.normalization == "RMSNorm" and not s.sequence_parallel
            for part in (*first, "attention.kv_down"):
                recipe = self.recipe(part)
                own = recipe is not None and (recipe.uses_history or not shared)
                if own or recipe not in kept:
                    yield self._input(part)
                kept.append(recipe)
        for norm, width in attention_norms(s.model).items():
            yield self._norm(f"attention.{norm}", f"attention.{norm.removesuffix('norm')}up", width)
        if {"mla_up_proj", "core_attn"} <= set(self.recomputed):
            return
        if s.model.q_lora_rank is not None:
            yield self._input("attention.q_up")
        yield self._input("attention.kv_up")

    def _core(self) -> Iterator[Activation]:
        s, m = self.sizes, self.sizes.model
        heads, channels, what = m.num_attention_heads // s.tp, self.head_channels(), "q, k, v"
        if "mla_up_proj" in self.recomputed:  # q_proj's queries stay: it is no projection from a latent
            channels = m.qk_pos_emb_head_dim + (heads * m.query_channels if m.q_lora_rank is None else 0)
            what = "rotated key" if m.q_lora_rank is not None else "q, rotated key"
        yield Activation("attention.core", what, s.tokens * channels * s.element)
        if "core_attn" in self.recomputed and self.recipe("attention.proj") is not None:
            yield self._input("attention.proj")
        else:
            yield Activation("attention.core", "output", s.tokens * heads * m.value_channels * s.element)
        if "core_attn" not in self.recomputed:
            yield Activation("attention.core", "log-sum-exp", 4 * s.tokens * heads)
            if s.cp > 1 and not s.ring:  # the early and the late part run one by one, and are joined for proj
                parts = s.tokens * heads * m.value_channels * s.element
                yield Activation("attention.core", "outputs of the parts", parts)

    def head_channels(self) -> int:
        """Channels of queries, keys and values that attention keeps a token of this rank."""
        s, m = self.sizes, self.sizes.model
        heads = m.num_attention_heads // s.tp
        groups = heads if m.multi_latent_attention else m.num_query_groups // s.tp
        gathers = s.cp > 1 and not s.ring and "core_attn" not in self.recomputed
        values = m.query_channels if gathers else m.value_channels  # packed attention wants all equally wide
        return heads * m.query_channels + groups * (m.query_channels + values) * (s.cp if gathers else 1)

    def _mlp(self, name: str, keeps_input: bool, rows: int | None = None) -> Iterator[Activation]:
        """rows: of all copies' inputs together, if not the tokens times their share."""
        s, fc1, fc2 = self.sizes, self.shape(f"{name}.fc1"), self.shape(f"{name}.fc2")
        rows = (s.rows if "*" in name else s.tokens) if rows is None else rows
        if keeps_input:
            yield self._input(fc1.part, rows if "*" in name else None)
        label = f"{name}.activation".replace(".*", "")
        if self._stores_in_fp8(fc1.part):
            yield Activation(label, "FP8 output of fc1", rows * (fc1.out_features + 4 * -(-fc1.out_features // 128)))
        else:
            yield Activation(label, "output of fc1", rows * fc1.out_features * s.element)
        remade = "*" in name and "moe_act" in self.recomputed
        if self.recipe(fc2.part) is None and not remade:
            yield self._input(fc2.part, rows)

    def _experts(self) -> Iterator[Activation]:
        s, m = self.sizes, self.sizes.model
        gathered = s.sequence_parallel and not s.exchanges  # no norm's output, then
        if self._keeps_norms or gathered:
            yield Activation("mlp.router", "input", s.routed_tokens * m.hidden_size * s.element)
        order = s.routed_tokens * m.moe_router_topk * ROW_BYTES + (s.rows * ARRIVED_BYTES if s.exchanges else 0)
        yield Activation("mlp.router", "scores, order", 4 * s.tokens * m.num_experts + order)
        yield from self._mlp("mlp.experts.*", True)
        yield from self._filling()
        if m.moe_shared_expert_intermediate_size and "shared_experts" not in self.recomputed:
            own_input = (self._keeps_norms or gathered) and self.recipe("mlp.shared_experts.fc1") is not None
            yield from self._mlp("mlp.shared_experts", own_input)
            if m.moe_shared_expert_gate:
                tokens = s.routed_tokens
                yield Activation("mlp.shared_experts", "gated output", tokens * (m.hidden_size + 2) * s.element)

    def _stores_in_fp8(self, fc1: str) -> bool:
        if self.fp8_input_store is None:
            return "*" in fc1 and self.recipe(fc1) is not None
        return self.fp8_input_store

    def shape(self, part: str) -> PartShape:
        shapes = layer_linears(self.sizes.model, experts=self.layer.experts)
        return self.sizes.local(next(p for p in shapes if p.part == part))

    def _filling(self) -> Iterator[Activation]:
        """Rows of zeros: experts that run as one begin at whole tiles, in a buffer as long as that can get where their
        numbers of rows stay on the device, else as long as it is when the load is even."""
        shape, recipe, rows = self.shape("mlp.experts.*.fc1"), self.recipe("mlp.experts.*.fc1"), self.sizes.rows
        if recipe is None or not (runs_grouped(recipe) or self.sizes.etp == 1 and "2d" not in recipe.tiles.values()):
            return
        block = rows_filled_to(recipe)
        whole, what = (rows + min(shape.copies, rows) * (block - 1)) // block * block, ", at most"
        if self.sizes.exchanges:
            whole, what = math.ceil(rows / shape.copies / block) * block * shape.copies, ""
        more, less = (sum(item.bytes for item in self._mlp("mlp.experts.*", True, n)) for n in (whole, rows))
        yield Activation("mlp.filling", "rows of zeros between experts" + what, more - less)

    def recipe(self, part: str) -> Recipe | None:
        """The recipe of a linear; of experts, the first one's."""
        return self.recipe_of(f"{self.layer.name}.{part.replace('*', '0')}")

    def _input(self, part: str, rows: int | None = None) -> Activation:
        """A linear's input, of all copies together: `rows` rows, by default its tokens."""
        s, shape, recipe = self.sizes, self.shape(part), self.recipe(part)
        label = part.replace(".*", "")
        if rows is None:
            rows = s.stream_tokens if self.gathers(part) else s.tokens
        if recipe is None or not self._quantizes_shard(part):
            return Activation(label, "input", rows * shape.in_features * s.element)
        orientation = gemm.needs(recipe, "input", self.device)["wgrad"]
        if runs_grouped(recipe):
            whole = quantized_bytes(recipe, "input", (rows, shape.in_features), orientation)
            return Activation(label, f"FP8 input, {orientation}", whole)
        each = quantized_bytes(recipe, "input", (math.ceil(rows / shape.copies), shape.in_features), orientation)
        return Activation(label, f"FP8 input, {orientation}", each * rows // math.ceil(rows / shape.copies))


def quantized_bytes(recipe: Recipe, role: str, shape: tuple[int, int], orientation: str) -> int:
    """Returns the bytes of one orientation of a quantized `[M, K]` operand: elements and scales, unpadded."""
    rows, cols = shape if orientation == "rowwise" else shape[::-1]
    spec = recipe.quantizer(role).spec
    scale_bytes = 1 if spec.scale is Scale.E8M0 else 4
    return rows * cols + math.prod(spec.tile.scale_shape(rows, cols)) * scale_bytes
