"""Which experts a token goes to and with what weights: pure functions. The losses that balance them: balancing.py.

With logits l over E experts, k chosen, T tokens (as in Megatron-LM):

    softmax, after top-k     weights = softmax over the chosen logits       (Mixtral; Qwen3-MoE)
    softmax, before top-k    weights = softmax(l) of the chosen             (Qwen2-MoE, DeepSeek-V2)
    sigmoid                  weights = sigmoid(l) of the chosen, divided by their sum  (DeepSeek-V3)

times a scaling factor. A bias on the scores is seen by selection only (Wang et al. 2024, auxiliary-loss-free
balancing). Group-limited: only experts of the best groups may be chosen; a group's worth is the sum of its best
scores, k / (number of groups chosen) of them as in Megatron-LM, or as many as `--moe-router-group-scores` says
(DeepSeek's code: always two). Of equal scores the lowest expert number wins.

Sinkhorn (S-BASE, Clark et al. 2022) chooses, in training alone, by logits that are scaled until every token and every
expert has the same share; weights are those of softmax over all experts, or sigmoid where one is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.config.model import ModelConfig
from megafp8.fp8 import backend

TINY = 1e-20
"""Keeps a sum of sigmoid scores off zero."""


@dataclass(frozen=True)
class RoutingRule:
    """topk: experts a token. sigmoid: scores; else softmax, before top-k or over the chosen. normalize: sigmoid scores
    of the chosen are divided by their sum. groups, group_topk: 0 for choice among all experts; group_scores: best
    scores of a group that make its worth."""

    topk: int
    sigmoid: bool = False
    pre_softmax: bool = False
    normalize: bool = True
    scaling: float = 1.0
    groups: int = 0
    group_topk: int = 0
    group_scores: int = 0

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
            group_scores=model.group_scores,
        )


def choose(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, experts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(experts int64 [T, k], best first; weights [T, k], differentiable) of logits [T, E].

    bias: FP32 [E], added to the scores for selection. experts: chosen already; only their weights are asked for.
    """
    if rule.sigmoid:
        scores = logits.sigmoid()
    else:
        scores = logits.softmax(-1) if rule.pre_softmax else logits
    if experts is None:
        wanted = scores.detach() if bias is None else scores.detach() + bias
        experts = best(_within_groups(wanted, rule) if rule.groups else wanted, rule.topk)
    weights = scores.gather(1, experts)
    if not rule.sigmoid and not rule.pre_softmax:
        weights = weights.softmax(-1)
    elif rule.sigmoid and rule.normalize and rule.topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return experts, weights * rule.scaling if rule.scaling != 1 else weights


def best(scores: Tensor, count: int) -> Tensor:
    """Numbers of the `count` largest of each row; `topk` leaves the order of equal ones open."""
    kernels = backend.kernels("best_experts") if scores.is_cuda else None
    if kernels is not None and kernels.supports(scores):
        return kernels.best(scores, count)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _within_groups(wanted: Tensor, rule: RoutingRule) -> Tensor:
    """`wanted` with minus infinity outside of each token's best groups."""
    tokens, experts = wanted.shape
    worth = wanted.view(tokens, rule.groups, experts // rule.groups).topk(rule.group_scores, -1).values.sum(-1)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best(worth, rule.group_topk), True)
    return wanted.masked_fill(~kept.repeat_interleave(experts // rule.groups, 1), -torch.inf)


def count_tokens(experts: Tensor, num_experts: int) -> Tensor:
    """How many tokens go to each expert, int64 [E]; the expert E, a dropped choice, counts nowhere.

    Nothing waits for the device, as `bincount` would for the largest number.
    """
    flat = experts.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:-1]


def dealt_out(tokens: int, topk: int, num_experts: int, device: torch.device) -> Tensor:
    """Experts in turn, int64 [T, k], as even as can be: for benchmarks (`--moe-router-force-load-balancing`)."""
    return (torch.arange(tokens * topk, device=device) % num_experts).view(tokens, topk)


def choose_sinkhorn(logits: Tensor, topk: int, *, training: bool) -> tuple[Tensor, Tensor]:
    """`choose` by Sinkhorn's scaling in training, by the scores alone outside."""
    scores = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    experts = best(sinkhorn(logits.detach()) if training else scores.detach(), topk)
    return experts, scores.gather(1, experts)


SINKHORN_TOLERANCE, SINKHORN_EPS = 1e-4, 1e-8


def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) [T, E] times one factor a row and one a column, so that each row sums to 1/T and each column to 1/E.

    Iterates until the columns' factors move by less than 1e-4 in the mean, as in Megatron-LM; the host waits for each
    iteration. Rows are shifted by their maximum first, which their factors take up.
    """
    tokens, experts = logits.shape
    cost = (logits - logits.amax(1, keepdim=True)).exp()
    columns = cost.new_ones(experts)
    while tokens:
        rows = 1 / (tokens * ((cost * columns).sum(1) + SINKHORN_EPS))
        before, columns = columns, 1 / (experts * ((rows[:, None] * cost).sum(0) + SINKHORN_EPS))
        if not bool((before - columns).abs().mean() > SINKHORN_TOLERANCE):
            return columns * cost * rows[:, None]
    return cost
