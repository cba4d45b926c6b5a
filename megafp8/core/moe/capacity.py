"""How many tokens an expert takes at most, and which choices it drops beyond (`--moe-expert-capacity-factor`).

As in Megatron-LM: the capacity is ceil(T k / E * factor) rows an expert, of the T tokens of a microbatch. Kept are the
choices of largest weight (`probs`), or the first ones (`position`); of equal weights, the first. The weights of kept
choices stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.config.model import ModelConfig


@dataclass(frozen=True)
class Capacity:
    """factor: of the even share. by_position: keeps the first choices, not those of largest weight. fill: every expert
    gets as many rows as it can take, zeros where there are no tokens."""

    factor: float
    by_position: bool = False
    fill: bool = False

    @staticmethod
    def of(model: ModelConfig) -> Capacity | None:
        """None: experts take whatever comes."""
        if model.moe_expert_capacity_factor is None:
            return None
        return Capacity(
            model.moe_expert_capacity_factor,
            by_position=model.moe_token_drop_policy == "position",
            fill=model.moe_pad_expert_input_to_capacity,
        )

    def rows(self, tokens: int, topk: int, num_experts: int) -> int:
        """What an expert takes of `tokens` tokens; never more than there are, since none chooses it twice."""
        return min(math.ceil(tokens * topk / num_experts * self.factor), tokens)


def drop(experts: Tensor, weights: Tensor, num_experts: int, capacity: int, *, by_position: bool) -> Tensor:
    """`experts`, int64 [T, k], with `num_experts` where a choice is dropped.

    weights: [T, k]. capacity: rows that an expert takes.
    """
    flat = experts.reshape(-1)
    order = torch.arange(flat.numel(), device=flat.device)
    if not by_position:
        order = weights.detach().reshape(-1).argsort(descending=True, stable=True)
    order = order[flat[order].argsort(stable=True)]  # by expert; within it, the ones to keep first
    sorted_experts = flat[order]
    first = torch.searchsorted(sorted_experts, torch.arange(num_experts, device=flat.device))
    place = torch.arange(flat.numel(), device=flat.device) - first[sorted_experts]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = place < capacity
    return torch.where(kept.view_as(experts), experts, num_experts)
