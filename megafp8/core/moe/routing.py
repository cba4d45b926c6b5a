"""Which experts a token goes to and with what weights, and the losses that balance them: pure functions.

With logits l over E experts, k chosen, T tokens (as in Megatron-LM):

    softmax, after top-k     weights = softmax over the chosen logits       (Mixtral; Qwen3-MoE)
    softmax, before top-k    weights = softmax(l) of the chosen             (Qwen2-MoE, DeepSeek-V2)
    sigmoid                  weights = sigmoid(l) of the chosen, divided by their sum  (DeepSeek-V3)

times a scaling factor. A bias on the scores is seen by selection only (Wang et al. 2024, auxiliary-loss-free
balancing). Group-limited: only experts of the best groups may be chosen; a group's worth is the sum of its best
k / (number of groups chosen) scores. Of equal scores the lowest expert number wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.config.model import ModelConfig

TINY = 1e-20
"""Keeps a sum of sigmoid scores off zero."""


@dataclass(frozen=True)
class RoutingRule:
    """topk: experts a token. sigmoid: scores; else softmax, before top-k or over the chosen. normalize: sigmoid scores
    of the chosen are divided by their sum. groups, group_topk: 0 for choice among all experts."""

    topk: int
    sigmoid: bool = False
    pre_softmax: bool = False
    normalize: bool = True
    scaling: float = 1.0
    groups: int = 0
    group_topk: int = 0

    @staticmethod
    def of(model: ModelConfig) -> RoutingRule:
        return RoutingRule(
            topk=model.moe_router_topk,
            sigmoid=model.moe_router_score_function == "sigmoid",
            pre_softmax=model.moe_router_pre_softmax,
            normalize=model.moe_router_norm_topk_prob,
            scaling=model.moe_router_topk_scaling_factor or 1.0,
            groups=model.moe_router_num_groups or 0,
            group_topk=model.moe_router_group_topk or 0,
        )


def choose(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(experts int64 [T, k], best first; weights [T, k], differentiable) of logits [T, E].

    bias: FP32 [E], added to the scores for selection.
    """
    if rule.sigmoid:
        scores = logits.sigmoid()
    else:
        scores = logits.softmax(-1) if rule.pre_softmax else logits
    wanted = scores.detach() if bias is None else scores.detach() + bias
    experts = _best(_within_groups(wanted, rule) if rule.groups else wanted, rule.topk)
    weights = scores.gather(1, experts)
    if not rule.sigmoid and not rule.pre_softmax:
        weights = weights.softmax(-1)
    elif rule.sigmoid and rule.normalize and rule.topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return experts, weights * rule.scaling if rule.scaling != 1 else weights


def _best(scores: Tensor, count: int) -> Tensor:
    """Numbers of the `count` largest of each row; `topk` leaves the order of equal ones open."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _within_groups(wanted: Tensor, rule: RoutingRule) -> Tensor:
    """`wanted` with minus infinity outside of each token's best groups."""
    tokens, experts = wanted.shape
    worth = wanted.view(tokens, rule.groups, -1).topk(rule.topk // rule.group_topk, -1).values.sum(-1)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, _best(worth, rule.group_topk), True)
    return wanted.masked_fill(~kept.repeat_interleave(experts // rule.groups, 1), -torch.inf)


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """How many tokens go to each expert, int64 [E]; the expert E, a dropped choice, counts nowhere.

    Nothing waits for the device, as `bincount` would for the largest number.
    """
    flat = experts.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:-1]


def balance_loss(logits: Tensor, rule: RoutingRule, sequences: int = 1) -> Tensor:
    """Load-balancing loss, 1 where all experts are alike: mean over `sequences` equal parts of the tokens of

        E * sum_e f_e P_e,   f_e = share of the choices that are e,   P_e = mean probability of e

    (Fedus et al. 2021, eq. 4). As in Megatron-LM, probabilities are softmax, or sigmoid scores divided by their sum,
    of all experts, and the choices that count are their top-k: no bias, no groups. One softmax only.
    """
    tokens, experts = logits.shape
    if rule.sigmoid:
        scores = logits.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + TINY)
    else:
        scores = logits.softmax(-1)
    chosen = _best(scores.detach(), rule.topk)
    load = torch.zeros_like(scores).scatter_(1, chosen, 1.0).view(sequences, -1, experts).sum(1)
    length = tokens // sequences
    probability = scores.view(sequences, length, experts).sum(1)
    return (load * probability).sum() * (experts / (rule.topk * length * length * sequences))


def z_loss(logits: Tensor) -> Tensor:
    """Mean of log(sum exp)^2, which keeps logits small (Zoph et al. 2022, eq. 5)."""
    return logits.logsumexp(-1).square().mean()
