"""What a mixture of experts sends in one microbatch, with tokens dealt to the experts in turn.

So many tokens go to each expert as under `--moe-router-force-load-balancing`; what a real router sends differs in the
rows that come from and go to each rank. The counterpart of `core.moe`: layer, router, dispatch, exchange, everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megafp8.config import Config
from megafp8.config.parallel import layout_sizes
from megafp8.core.moe.capacity import Capacity
from megafp8.fp8.grouped_linear import runs_grouped
from megafp8.fp8.grouped_rows import row_bytes, travels
from megafp8.fp8.policy import Policy
from megafp8.fp8.quantizer import Quantizer

INDEX, WEIGHT = 8, 4
"""Bytes of a count or an expert's number, and of a token's weight."""


@dataclass(frozen=True)
class Dealt:
    """Rows that one rank of a stage sends to experts and gets for its own, in one microbatch of one layer.

    rank: number within the stage. Each rank routes `tokens` tokens; under sequence parallelism, where tokens go to
    other ranks, its tensor-parallel peers' follow or precede them in one row.
    """

    config: Config
    rank: int
    tokens: int

    def of(self, rank: int) -> list[int]:
        """Rows that a rank has for each expert."""
        m, p = self.config.model, self.config.parallel
        tp = p.tensor_model_parallel_size if p.sequence_parallel and exchanges_tokens(self.config) else 1
        start, count = rank % tp * self.tokens * m.moe_router_topk, self.tokens * m.moe_router_topk
        rows = [_in_turn(start + count, m.num_experts, e) - _in_turn(start, m.num_experts, e) for e in self.experts]
        if (capacity := Capacity.of(m)) is None:
            return rows
        most = capacity.rows(self.tokens * tp, m.moe_router_topk, m.num_experts)
        return [most if capacity.fill else min(n, most) for n in rows]

    @property
    def experts(self) -> range:
        return range(self.config.model.num_experts)

    @property
    def here(self) -> range:
        """The experts of the rank."""
        sizes = layout_sizes(self.config.parallel)
        share = self.config.model.num_experts // sizes["ep"]
        first = self.rank // sizes["etp"] % sizes["ep"] * share
        return range(first, first + share)

    @property
    def sent(self) -> int:
        """Rows, copies for expert tensor parallelism included."""
        return sum(self.of(self.rank)) * layout_sizes(self.config.parallel)["etp"]

    @property
    def received(self) -> int:
        return sum(self.received_by_expert)

    @property
    def received_by_expert(self) -> list[int]:
        """Rows for each of the rank's experts, of all ranks that hold the layer's experts together."""
        return list(_received(self))


@lru_cache(maxsize=1 << 10)
def _received(dealt: Dealt) -> tuple[int, ...]:
    """`Dealt.received_by_expert`, the same for every layer."""
    sizes = layout_sizes(dealt.config.parallel)
    size = sizes["ep"] * sizes["etp"]
    first = dealt.rank // size * size
    rows = [dealt.of(rank) for rank in range(first, first + size)]
    return tuple(sum(of_rank[e] for of_rank in rows) for e in dealt.here)


def exchanges_tokens(config: Config) -> bool:
    """Whether tokens go to the ranks of their experts."""
    p = config.parallel
    return p.expert_model_parallel_size > 1 or p.expert_tensor_parallel_size != p.tensor_model_parallel_size


def _in_turn(choices: int, experts: int, expert: int) -> int:
    """How many of the first `choices` choices, dealt to experts in turn, are `expert`."""
    return (choices - expert + experts - 1) // experts


@dataclass(frozen=True)
class WireBytes:
    """Bytes of a row on its way to the experts, forward, and of its output's gradient, backward."""

    tokens: int
    gradients: int

    @staticmethod
    def of(config: Config, layer: str, recipe_of: Policy, element: int) -> WireBytes:
        p, hidden = config.parallel, config.model.hidden_size

        def size(linear: str, role: str, on: bool) -> int:
            quantizer = _quantizer(config, f"{layer}.mlp.experts", linear, role, recipe_of) if on else None
            return hidden * element if quantizer is None else row_bytes(quantizer, hidden)

        return WireBytes(size("fc1", "input", p.moe_fp8_dispatch), size("fc2", "grad_output", p.moe_fp8_combine_grad))


def _quantizer(config: Config, name: str, linear: str, role: str, recipe_of: Policy) -> Quantizer | None:
    """What rows travel in, where all experts of the layer run in one recipe."""
    recipes = {recipe_of(f"{name}.{number}.{linear}") for number in range(config.model.num_experts)}
    recipe = recipes.pop()
    if recipes or recipe is None or not runs_grouped(recipe):
        return None
    return recipe.quantizer(role) if travels(recipe.quantizer(role)) else None
