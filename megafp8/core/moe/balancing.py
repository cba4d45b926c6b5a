"""The losses that keep the load of experts even: pure functions of the router's scores.

With f_e the share of choices that are e, and P_e the mean probability of e (Fedus et al. 2021, eq. 4), each is

    E * sum_e f_e P_e,   1 where all experts are alike,

and they differ in whose choices f counts: those of a microbatch (`aux_loss`), of each sequence alone (`seq_aux_loss`),
or of the whole global batch (`global_aux_loss`: Qiu et al. 2025). The last one takes the counts of the step before, so
that no microbatch waits for the others; the first step, which has none, takes even ones, whose gradient is zero.

As in Megatron-LM, probabilities are softmax, or sigmoid scores divided by their sum, of all experts, and the choices
that count are their top-k: no bias, no groups, nothing dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.core.moe.routing import TINY, RoutingRule, best
from megafp8.parallel import Axis

ALONE = Axis()


def balance_scores(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """(probabilities [T, E], differentiable; the choices that count, int64 [T, k]) of logits [T, E]."""
    if rule.sigmoid:
        scores = logits.sigmoid()
        scores = scores / (scores.sum(-1, keepdim=True) + TINY)
    else:
        scores = logits.softmax(-1)
    return scores, best(scores.detach(), rule.topk)


def balance_loss(scores: Tensor, chosen: Tensor, sequences: int = 1, ranks: Axis = ALONE) -> Tensor:
    """Mean of the loss over `sequences` equal parts of the tokens; each rank's part of it where `ranks` share them.

    ranks: they hold equal parts of each sequence; the sum over them is the whole tokens' loss, and its gradient.
    """
    tokens, experts = scores.shape
    parts = (sequences, tokens // sequences, experts)
    load = ranks.sum_(torch.zeros_like(scores).scatter_(1, chosen, 1.0).view(parts).sum(1))
    probability = scores.view(parts).sum(1)
    length = parts[1] * ranks.size
    return (load * probability).sum() * (experts / (chosen.shape[1] * length * length * sequences))


def global_balance_loss(scores: Tensor, shares: Tensor) -> Tensor:
    """shares: FP32 [E], which part of the last global batch's choices each expert was; they sum to 1."""
    return (scores.mean(0) * shares).sum() * scores.shape[1]


def z_loss(logits: Tensor) -> Tensor:
    """Mean of log(sum exp)^2, which keeps logits small (Zoph et al. 2022, eq. 5)."""
    return logits.logsumexp(-1).square().mean()
