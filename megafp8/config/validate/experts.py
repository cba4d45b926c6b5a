"""Checks of the flags of mixture of experts and of multi-token prediction."""

from megafp8.config.config import Config, flag_of
from megafp8.config.fp8 import RECIPES
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
    m, p = c.model, c.parallel
    tp, ep, etp = p.tensor_model_parallel_size, p.expert_model_parallel_size, p.expert_tensor_parallel_size
    if m.num_experts is None:
        return f"--expert-model-parallel-size {ep} needs --num-experts; add it" if ep > 1 else None
    if m.num_experts % ep:
        return (
            f"--num-experts {m.num_experts} is not divisible by --expert-model-parallel-size {ep}; change one of them"
        )
    if tp > 1 and (ep > 1 or etp != tp) and not p.sequence_parallel:
        return (
            f"--expert-model-parallel-size {ep} and --expert-tensor-parallel-size {etp} with "
            f"--tensor-model-parallel-size {tp}: each rank sends tokens of its own; add --sequence-parallel"
        )
    for name, size, by in (
        ("moe_ffn_hidden_size", etp, "expert_tensor_parallel_size"),
        ("moe_shared_expert_intermediate_size", tp, "tensor_model_parallel_size"),
    ):
        if (c.value(name) or size) % size:
            return f"{flag_of(name)} {c.value(name)} is not divisible by {flag_of(by)} {size}; change one of them"
    return None


def dispatch(c: Config) -> str | None:
    """How tokens travel; flags of ours that nothing would come of are errors."""
    p = c.parallel
    if p.moe_token_dispatcher_type == "flex" and (message := _library(c)):
        return message
    if not p.moe_fp8_dispatch:
        return "--moe-fp8-combine-grad needs --moe-fp8-dispatch; add it" if p.moe_fp8_combine_grad else None
    if p.expert_model_parallel_size == 1 and p.expert_tensor_parallel_size == p.tensor_model_parallel_size:
        return "--moe-fp8-dispatch: no token travels with --expert-model-parallel-size 1; raise it, or leave this out"
    if not c.fp8.enabled:
        return "--moe-fp8-dispatch needs --fp8-format; add --fp8-format e4m3"
    shown = f"--moe-fp8-dispatch with --fp8-recipe {c.fp8.fp8_recipe}"
    if not RECIPES[c.fp8.fp8_recipe].tiled:
        return f"{shown}: a tensor's one scale is known only when all its tokens are there; use blockwise or mxfp8"
    if c.fp8.fp8_power_of_two_scales is False:
        return (
            "--moe-fp8-dispatch with --no-fp8-power-of-two-scales: a receiver's copy by column would round every value "
            "a second time; use power-of-two scales"
        )
    if c.fp8.fp8_input_tile == "2d":
        return "--moe-fp8-dispatch with --fp8-input-tile 2d: tokens travel by row, each with its scales; use 1d"
    if p.moe_fp8_combine_grad and p.moe_token_dispatcher_type == "allgather":
        return "--moe-fp8-combine-grad with --moe-token-dispatcher-type allgather: gathers in BF16; use alltoall"
    if p.moe_fp8_combine_grad and c.fp8.fp8_grad_tile == "2d":
        return "--moe-fp8-combine-grad with --fp8-grad-tile 2d: gradients travel by row; use 1d"
    return None


def _library(c: Config) -> str | None:
    p, flex = c.parallel, "--moe-token-dispatcher-type flex"
    if p.expert_model_parallel_size > 1 and p.expert_tensor_parallel_size > 1:
        return (
            f"{flex} with --expert-tensor-parallel-size {p.expert_tensor_parallel_size}: the library sends tokens to "
            "one rank an expert; use 1, or alltoall"
        )
    if not c.train.bf16:
        return f"{flex}: the library sends BF16; add --bf16, or use alltoall"
    for name in ("moe_shared_expert_overlap", "moe_fp8_combine_grad"):
        if c.value(name):
            return f"{flex} goes without {flag_of(name)}; drop one of them, or use alltoall"
    traits = RECIPES.get(c.fp8.fp8_recipe)
    if p.moe_fp8_dispatch and (traits is None or traits.block != 128 or c.model.hidden_size % 128):
        return f"{flex} with --moe-fp8-dispatch: the library's scales are of 128 values; use --fp8-recipe blockwise"
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
    if m.num_experts is None:
        return None
    if groups is None and chosen is None:
        if m.moe_router_group_scores is not None:
            return f"--moe-router-group-scores {m.moe_router_group_scores} needs --moe-router-num-groups; add it"
        return None
    if groups is None or chosen is None:
        return "--moe-router-num-groups and --moe-router-group-topk need each other; give both"
    if m.num_experts % groups:
        return f"--num-experts {m.num_experts} is not divisible by --moe-router-num-groups {groups}; change one"
    size, scores = m.num_experts // groups, m.moe_router_group_scores
    if scores is not None and scores > size:
        return f"--moe-router-group-scores {scores} is more than the {size} experts of a group; lower it"
    uneven = scores is None and m.moe_router_topk % chosen
    if chosen > groups or uneven or m.moe_router_topk > chosen * size:
        return (
            f"--moe-router-group-topk {chosen} of --moe-router-num-groups {groups} can't give --moe-router-topk "
            f"{m.moe_router_topk} experts evenly; make it a divisor of the latter whose groups hold as many, or say by "
            "--moe-router-group-scores how groups are judged"
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
            return f"{shown}: no such type; use {', '.join(BALANCING[:-1])} or none"
    if len(kinds) > 1 and ("sinkhorn" in kinds or "none" in kinds):
        return f"{shown}: sinkhorn and none stand alone; drop one of them"
    if len(set(kinds)) < len(kinds):
        return f"{shown}: names one type twice; drop one"
    if len(kinds) != len(weights) and c.is_given("moe_aux_loss_coeff"):
        return f"{shown} and --moe-aux-loss-coeff {plain(weights)} differ in number; give one coefficient for each"
    return _sinkhorn(c) if "sinkhorn" in kinds else None


def _sinkhorn(c: Config) -> str | None:
    """What Sinkhorn's choice, over all the tokens at hand, leaves no room for."""
    m = c.model
    for name, on in (
        ("moe_aux_loss_coeff", any(m.moe_aux_loss_coeff)),
        ("moe_router_enable_expert_bias", m.moe_router_enable_expert_bias),
        ("moe_router_num_groups", m.moe_router_num_groups is not None),
        ("moe_expert_capacity_factor", m.moe_expert_capacity_factor is not None),
    ):
        if on:
            return f"--moe-router-load-balancing-type sinkhorn goes without {flag_of(name)}; drop one of them"
    return None


def capacity(c: Config) -> str | None:
    m = c.model
    if m.num_experts is None:
        return None
    if m.moe_expert_capacity_factor is None and m.moe_pad_expert_input_to_capacity:
        return "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor; add it"
    return None


def experts_and_contexts(c: Config) -> str | None:
    """What is decided over all tokens of a microbatch, of which context-parallel ranks have parts."""
    m, cp = c.model, c.parallel.context_parallel_size
    if m.num_experts is None or cp == 1:
        return None
    for shown, on in (
        ("--moe-router-load-balancing-type sinkhorn", "sinkhorn" in m.moe_router_load_balancing_type),
        (f"--moe-expert-capacity-factor {m.moe_expert_capacity_factor}", m.moe_expert_capacity_factor is not None),
    ):
        if on:
            return (
                f"{shown} with --context-parallel-size {cp}: the tokens of a sequence are chosen among together; use "
                "--context-parallel-size 1"
            )
    return None
