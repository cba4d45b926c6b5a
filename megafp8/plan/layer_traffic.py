"""What a transformer layer sends in one microbatch, with what backward computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megafp8.config import Config
from megafp8.core.build import OVERLAP_CHUNKS, RecomputePlan
from megafp8.core.moe.exchange import joined_bytes
from megafp8.fp8.grouped_linear import runs_grouped
from megafp8.fp8.policy import Policy
from megafp8.plan.expert_traffic import INDEX, WEIGHT, Dealt, WireBytes, exchanges_tokens
from megafp8.plan.linear_traffic import LinearTraffic, as_expert
from megafp8.plan.shapes import LayerShape, PartShape, layer_linears
from megafp8.plan.traffic import Groups, Passes


@dataclass(frozen=True)
class Microbatch:
    """tokens: of one microbatch on one rank, all tensor-parallel ranks' together. element: bytes of the compute dtype.

    rank: number of the rank within its stage, which tells what its experts get.
    """

    config: Config
    groups: Groups
    recipe_of: Policy
    rank: int = 0

    @property
    def element(self) -> int:
        return 2 if self.config.train.bf16 else 4

    @property
    def tokens(self) -> int:
        c = self.config
        return c.train.micro_batch_size * c.data.seq_length // c.parallel.context_parallel_size

    @property
    def sequence_parallel(self) -> bool:
        return self.config.parallel.sequence_parallel and self.groups["tp"].size > 1

    @property
    def local(self) -> int:
        """Tokens outside of the linears."""
        return self.tokens // self.groups["tp"].size if self.sequence_parallel else self.tokens

    @property
    def chunks(self) -> int:
        return OVERLAP_CHUNKS if self.config.parallel.tp_comm_overlap else 1

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return self.tokens * self.config.model.hidden_size * self.element

    @property
    def own_hidden(self) -> int:
        """Bytes of those that this rank has outside of the linears."""
        return self.local * self.config.model.hidden_size * self.element


@dataclass(frozen=True)
class LayerTraffic:
    """layer: one of the model's. recomputed: which of its parts backward computes again, by Megatron-LM's names."""

    micro: Microbatch
    layer: LayerShape
    recomputed: frozenset[str] = frozenset()

    def passes(self) -> Passes:
        attention = self._latent() if self.micro.config.model.multi_latent_attention else self._attention()
        if self.layer.experts:
            rest = self._experts()
            rest = rest.recomputed if "moe" in self.recomputed else rest
        else:
            rest = self._mlp("mlp")
            rest = rest.recomputed if "mlp" in self.recomputed else rest
        return attention.then(rest)

    def weight_passes(self) -> Iterator[Passes]:
        """Once a step: what ranks share of the weights' scales when FP8 copies are made."""
        for linear in self.linears():
            yield linear.weight_passes()

    def linears(self) -> Iterator[LinearTraffic]:
        """All that are cut over ranks, each of the rank's experts too."""
        yield from (self._linear(part) for part in self._parts if "*" not in part and not _whole(part))
        if self.layer.experts:
            yield from (linear for pair in self._expert_linears() for linear in pair)

    @cached_property
    def _parts(self) -> dict[str, PartShape]:
        found = layer_linears(self.micro.config.model, experts=self.layer.experts)
        return {shape.part: shape for shape in found}

    def _linear(self, part: str, **options) -> LinearTraffic:
        micro, shape, kind = self.micro, self._parts[part], part.rpartition(".")[2]
        m = micro.config.model
        shared = part.startswith("mlp.shared_experts") and not self._exchanges
        whole = kind in ("q_proj", "q_up", "kv_up") or shared  # these see all tokens on every rank
        remade = "layernorm" in self.recomputed
        requantizes = {
            "qkv": remade,
            "fc1": remade,
            "q_proj": remade and not micro.sequence_parallel,
            "proj": "core_attn" not in self.recomputed,
            "fc2": True,
        }
        return LinearTraffic(
            part,
            "row" if kind in ("proj", "fc2") else "column",
            micro.groups["tp"],
            micro.tokens,
            shape.in_features,
            shape.out_features,
            micro.recipe_of(f"{self.layer.name}.{part}"),
            micro.element,
            sequence_parallel=micro.sequence_parallel and not whole,
            chunks=1 if whole else micro.chunks,
            parts=2 if kind == "fc1" and m.swiglu else 1,
            requantizes=requantizes.get(kind, False),
        )

    def _attention(self) -> Passes:
        m = self.micro.config.model
        groups = m.num_query_groups // self.micro.groups["tp"].size
        core = self._core(groups * m.kv_channels, groups * m.kv_channels)
        return self._linear("attention.qkv").passes().then(core, self._linear("attention.proj").passes())

    def _latent(self) -> Passes:
        micro, m, tp = self.micro, self.micro.config.model, self.micro.groups["tp"]
        heads = m.num_attention_heads // tp.size
        tokens, ups = Passes(), ["attention.kv_up"]
        if micro.sequence_parallel:
            tokens.add("forward", "gather", tp, "attention input", micro.own_hidden)
        rotated = micro.tokens * m.qk_pos_emb_head_dim * micro.element
        tokens.add("backward", "sum", tp, "attention rotated key gradient", rotated)
        ups.insert(0, "attention.q_proj" if m.q_lora_rank is None else "attention.q_up")
        core = self._core(heads * m.query_channels, heads * m.v_head_dim)
        proj = self._linear("attention.proj").passes()
        return tokens.then(*(self._linear(part).passes() for part in ups), core, proj)

    def _core(self, keys: int, values: int) -> Passes:
        """keys, values: channels of a token's, of this rank's heads."""
        micro, cp, found = self.micro, self.micro.groups["cp"], Passes()
        size, n = micro.tokens * (keys + values) * micro.element, cp.size
        if (micro.config.parallel.cp_comm_type or ("all_gather",))[0] == "p2p":
            found.add("forward", "send", cp, "attention keys and values", (n - 1) * size, 2 * (n - 1))
            found.add("backward", "send", cp, "attention keys and values", (n - 1) * size, 2 * (n - 1))
            found.add("backward", "send", cp, "attention gradients of keys and values", n * size, 2 * n)
        else:
            found.add("forward", "gather", cp, "attention keys and values", size, 2)
            found.add("backward", "scatter_sum", cp, "attention gradients of keys and values", n * size, 2)
        return found.recomputed if "core_attn" in self.recomputed else found

    def _mlp(self, name: str) -> Passes:
        return self._linear(f"{name}.fc1").passes().then(self._linear(f"{name}.fc2").passes())

    @property
    def _exchanges(self) -> bool:
        return exchanges_tokens(self.micro.config)

    def _experts(self) -> Passes:
        """Router, tokens to experts, experts, tokens back; shared experts while tokens travel, or after that."""
        m, p = self.micro.config.model, self.micro.config.parallel
        before = self._router()
        there, back = self._exchange() if self._exchanges else self._in_place()
        experts = self._all_experts()
        if not m.moe_shared_expert_intermediate_size:
            return before.then(there, experts, back)
        shared = self._mlp("mlp.shared_experts")
        if "shared_experts" in self.recomputed and "moe" not in self.recomputed:
            shared = shared.recomputed
        parts = (shared, experts, back) if p.moe_shared_expert_overlap else (experts, back, shared)
        return before.then(there, *parts)

    def _router(self) -> Passes:
        micro, m, tp, found = self.micro, self.micro.config.model, self.micro.groups["tp"], Passes()
        number = 8 if m.moe_router_dtype == "fp64" else 4
        if micro.sequence_parallel and self._exchanges:
            size = micro.local * m.num_experts * number
            found.add("forward", "gather", tp, "router logits", size)
        for kind in m.balancing_losses:
            parts = {"seq_aux_loss": micro.config.train.micro_batch_size, "aux_loss": 1}.get(kind, 0)
            size = parts * m.num_experts * number
            found.add("forward", "sum", micro.groups["cp"], "balance of experts", size, int(parts > 0))
        return found

    def _in_place(self) -> tuple[Passes, Passes]:
        """Experts cut as the dense layers are: every tensor-parallel rank works on all tokens."""
        micro, tp, there, back = self.micro, self.micro.groups["tp"], Passes(), Passes(keeps=False)
        if micro.sequence_parallel:
            there.add("forward", "gather", tp, "experts input", micro.own_hidden)
            back.add("backward", "gather", tp, "experts gradient", micro.own_hidden)
        weights = micro.tokens * micro.config.model.moe_router_topk * WEIGHT
        there.add("backward", "sum", tp, "experts gradient of weights", weights)
        there.add("backward", "sum", tp, "experts gradient of inputs", micro.hidden)
        back.add("forward", "sum", tp, "experts output", micro.hidden)
        return there, back

    def _exchange(self) -> tuple[Passes, Passes]:
        dispatcher = self.micro.config.parallel.moe_token_dispatcher_type
        if dispatcher == "flex" and self.micro.groups["ep"].size > 1:
            return Passes(), Passes(keeps=False)  # the library's own
        return self._gathered() if dispatcher == "allgather" else self._dealt()

    def _dealt(self) -> tuple[Passes, Passes]:
        micro, m, group = self.micro, self.micro.config.model, self.micro.groups["ep_etp"]
        dealt, there, back = Dealt(micro.config, micro.rank, micro.local), Passes(), Passes(keeps=False)
        wire = WireBytes.of(micro.config, self.layer.name, micro.recipe_of, micro.element)
        row, counts = m.hidden_size * micro.element, group.size * (m.num_experts // micro.groups["ep"].size)
        there.add("forward", "deal", group, "experts counts", counts * INDEX)
        there.add("forward", "deal", group, "experts tokens and weights", dealt.sent * joined_bytes(wire.tokens))
        gradients = dealt.received * joined_bytes(row)
        there.add("backward", "deal", group, "experts gradient of tokens and weights", gradients)
        back.add("forward", "deal", group, "experts outputs", dealt.received * row)
        back.add("backward", "deal", group, "experts gradient of outputs", dealt.sent * wire.gradients)
        return there, back

    def _gathered(self) -> tuple[Passes, Passes]:
        micro, m, group = self.micro, self.micro.config.model, self.micro.groups["ep_etp"]
        there, back = Passes(), Passes(keeps=False)
        wire = WireBytes.of(micro.config, self.layer.name, micro.recipe_of, micro.element)
        choices = micro.local * m.moe_router_topk
        there.add("forward", "gather", group, "experts numbers", choices * INDEX)
        there.add("forward", "gather", group, "experts tokens", micro.local * wire.tokens)
        there.add("forward", "gather", group, "experts weights", choices * WEIGHT)
        there.add("backward", "scatter_sum", group, "experts gradient of tokens", group.size * micro.own_hidden)
        there.add("backward", "scatter_sum", group, "experts gradient of weights", group.size * choices * WEIGHT)
        back.add("forward", "scatter_sum", group, "experts outputs", group.size * micro.own_hidden)
        back.add("backward", "gather", group, "experts gradient of outputs", micro.own_hidden)
        return there, back

    def _expert_linears(self) -> Iterator[tuple[LinearTraffic, LinearTraffic]]:
        """fc1 and fc2 of each of the rank's experts."""
        micro = self.micro
        dealt = Dealt(micro.config, micro.rank, micro.local if self._exchanges else micro.tokens)
        rows = dealt.received_by_expert if self._exchanges else dealt.of(dealt.rank)
        for number, count in zip(dealt.here, rows, strict=True):
            yield tuple(self._expert_linear(f"mlp.experts.*.{kind}", number, count) for kind in ("fc1", "fc2"))

    def _expert_linear(self, part: str, number: int, rows: int) -> LinearTraffic:
        recipe = self.micro.recipe_of(f"{self.layer.name}.{part.replace('*', str(number))}")
        linear = replace(
            self._linear(part), group=self.micro.groups["etp"], recipe=recipe, requantizes=part.endswith("fc2")
        )
        return as_expert(linear, rows)

    def _all_experts(self) -> Passes:
        """Where experts run as one, nothing is shared; else each linear shares its scales."""
        pairs, found = list(self._expert_linears()), Passes()
        if self.micro.groups["etp"].size == 1 or all(_grouped(linears) for linears in zip(*pairs, strict=True)):
            return found
        return found.then(*(linear.passes() for pair in pairs for linear in pair))


def _grouped(linears: tuple[LinearTraffic, ...]) -> bool:
    recipes = {linear.recipe for linear in linears}
    return len(recipes) == 1 and linears[0].grid is None and runs_grouped(linears[0].recipe)


def _whole(part: str) -> bool:
    return part.rpartition(".")[2] in ("q_down", "kv_down", "gate")


def layers_passes(
    layers: list[LayerShape], plan: RecomputePlan, of: Callable[[LayerShape], LayerTraffic]
) -> list[Passes]:
    """Of the layers of one stage, without those of multi-token prediction, with those that are computed again."""
    unit, found = plan.unit, []
    count = min(len(layers), plan.layers or len(layers)) if unit else 0
    for start in range(0, count, unit or 1):
        parts = [of(layer).passes() for layer in layers[start : min(start + unit, count)]]
        found.append(parts[0].then(*parts[1:]).recomputed)
    return found + [of(layer).passes() for layer in layers[count:]]
