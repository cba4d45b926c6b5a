"""Checks of the flags of mixture of experts and of multi-token prediction."""

from megafp8.config.config import Config, flag_of
from megafp8.config.model import BALANCING
from megafp8.config.validate.limits import plain


def patterns(c: Config) -> str | None:
    """Flags that are small expressions."""
    try:
        _ = c.model.moe_layers, c.model.window
    except ValueError as error:
        return str(error)
    return None


def experts(c: Config) -> str | None:
    m = c.model
    if m.num_experts is None:
        if not m.moe_router_norm_topk_prob:
            return "--moe-router-no-norm-topk-prob needs --num-experts; add it, or leave it out"
        return None
    if m.add_bias_linear:
        return f"--num-experts {m.num_experts}: experts have no biases; add --disable-bias-linear"
    if m.moe_shared_expert_gate and m.moe_shared_expert_intermediate_size is None:
        return "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size; add it"
    return None


def expert_layout(c: Config) -> str | None:
    m, tp, etp = c.model, c.parallel.tensor_model_parallel_size, c.parallel.expert_tensor_parallel_size
    if m.num_experts is None:
        return None
    if etp != tp:
        return (
            f"--expert-tensor-parallel-size {etp} other than --tensor-model-parallel-size {tp}: not yet in megafp8; "
            "leave the former out"
        )
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if (c.value(name) or tp) % tp:
            return (
                f"{flag_of(name)} {c.value(name)} is not divisible by --tensor-model-parallel-size {tp}; change one of "
                "them"
            )
    return None


def router(c: Config) -> str | None:
    m = c.model
    if m.num_experts is None:
        return None
    topk, score = f"--moe-router-topk {m.moe_router_topk}", m.moe_router_score_function
    if m.moe_router_topk > m.num_experts:
        return f"{topk} is more than --num-experts {m.num_experts}; lower it"
    if m.moe_router_topk == 1 and score == "softmax" and not m.moe_router_pre_softmax:
        return f"{topk}: a softmax over one chosen expert is always 1; add --moe-router-pre-softmax"
    for name, on in (
        ("moe_router_enable_expert_bias", m.moe_router_enable_expert_bias),
        ("moe_router_norm_topk_prob", not m.moe_router_norm_topk_prob),
    ):
        if on and score != "sigmoid":
            return f"{flag_of(name)} needs --moe-router-score-function sigmoid, not {score}; change one of them"
    return None


def router_groups(c: Config) -> str | None:
    m = c.model
    groups, chosen = m.moe_router_num_groups, m.moe_router_group_topk
    if m.num_experts is None or groups is None and chosen is None:
        return None
    if groups is None or chosen is None:
        return "--moe-router-num-groups and --moe-router-group-topk need each other; give both"
    if m.num_experts % groups:
        return f"--num-experts {m.num_experts} is not divisible by --moe-router-num-groups {groups}; change one"
    if chosen > groups or m.moe_router_topk % chosen or m.moe_router_topk > chosen * (m.num_experts // groups):
        return (
            f"--moe-router-group-topk {chosen} of --moe-router-num-groups {groups} can't give --moe-router-topk "
            f"{m.moe_router_topk} experts evenly; make it a divisor of the latter whose groups hold as many"
        )
    return None


def balancing(c: Config) -> str | None:
    m = c.model
    if m.num_experts is None:
        return None
    kinds, weights = m.moe_router_load_balancing_type, m.moe_aux_loss_coeff
    shown = f"{flag_of('moe_router_load_balancing_type')} {plain(kinds)}"
    for kind in kinds:
        if kind not in BALANCING:
            return f"{shown}: no such type; use aux_loss, seq_aux_loss or none"
        if kind in ("sinkhorn", "global_aux_loss"):
            return f"{shown}: {kind} is not yet in megafp8; use aux_loss or seq_aux_loss"
    if len(kinds) != len(weights) and c.is_given("moe_aux_loss_coeff"):
        return f"{shown} and --moe-aux-loss-coeff {plain(weights)} differ in number; give one coefficient for each"
    return None
