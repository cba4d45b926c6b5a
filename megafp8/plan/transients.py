"""What backward holds for a while on top of what forward kept, part of a layer by part, in bytes.

Counted at the moment when most is there, from the order of the code: a gradient is dropped when the operation that
takes it is over, and a part's own activations when all of its backward is; but what fc2 and the activation of an MLP
kept is gone when theirs is over. G is the residual stream's gradient, S h e bytes. q(x) are FP8 copies, a byte an
element and direction; scales are left out here.

    fc2       G, and dY gathered under sequence parallelism: in BF16 until dX [T f] is there, in FP8 until it is q(dY)
              in both directions; then dX, fc1's dY (FP8: both directions) and fc2's input, made anew
    fc1       its dY, dX [T h], and under sequence parallelism the input gathered again and dX scattered
    core      d(output), dq, dk, dv, and flash attention's FP32 sum of dq
    proj      G, dY as for fc2, dX [T a d], its input quantized again
    qkv       its dY, q(dY), dX [T h], and the sum of both gradients of the residual stream
    experts   the same as fc2 and fc1 of R rows; before, rows as they arrive and as they lie; BF16 weight gradients of
              all experts of a linear together, which `torch._grouped_mm` can't add in place; in MXFP8 where GPUs don't
              multiply it both operands of dgrad, decoded to BF16
    router    its input and gradient in FP32, and logits three times
    loss      the logits' gradient, in the logits' place; FP32 logits of a chunk of tokens (none in the kernels
              of GPUs), and after that the LM head's dX [T h], with what is gathered and scattered as for fc1

GELU and squared ReLU are PyTorch formulas: FP32 copies of input, gradient, value and result.
"""

from __future__ import annotations

from megafp8.core.tensor_parallel.cross_entropy import CHUNK_ELEMENTS
from megafp8.fp8 import Recipe, gemm
from megafp8.fp8.formats import Scale
from megafp8.fp8.grouped_linear import runs_grouped
from megafp8.plan.layer_activations import LayerPlan
from megafp8.plan.sizes import Sizes

PROJECTIONS, CORE, MLP = PARTS = ("projections", "core", "mlp")
"""The parts of a layer whose backward is counted as one."""


def part_of(module: str) -> str:
    """The part of a layer that one of its modules belongs to; `module` as `LayerPlan.items` names it."""
    if module.startswith(("attention.core", "attention.proj")):
        return CORE
    return PROJECTIONS if module.startswith(("input_norm", "attention.")) else MLP


def backward_bytes(plan: LayerPlan, part: str) -> int:
    """Returns the most that a part's backward holds on top of what forward kept."""
    if part == CORE:
        return max(_proj(plan), _core(plan))
    if part == PROJECTIONS:
        return _projections(plan)
    if not plan.layer.experts:
        return _mlp(plan, "mlp", plan.sizes.tokens)
    shared = _mlp(plan, "mlp.shared_experts", plan.sizes.tokens) if _has_shared(plan) else 0
    return max(_experts(plan), _router(plan), shared)


def loss_bytes(sizes: Sizes, tokens: int, *, fused: bool) -> int:
    """Returns what loss and LM head hold on top of the logits of `tokens` tokens, whose gradient takes their place.

    fused: by the kernels of GPUs.
    """
    columns = sizes.model.padded_vocab_size // sizes.tp
    in_fp32 = 0 if fused else 4 * min(tokens * columns, max(CHUNK_ELEMENTS, columns))
    hidden = tokens * sizes.model.hidden_size * sizes.element
    around = hidden + hidden // sizes.tp if sizes.sequence_parallel else 0  # the input gathered again, dX scattered
    return max(in_fp32, hidden + around)


def _has_shared(plan: LayerPlan) -> bool:
    return bool(plan.sizes.model.moe_shared_expert_intermediate_size)


def _proj(plan: LayerPlan) -> int:
    s, proj = plan.sizes, plan.shape("attention.proj")
    hidden, dx = s.tokens * proj.out_features, s.tokens * proj.in_features * s.element
    gathered = hidden * s.element if s.sequence_parallel else 0
    if plan.recipe("attention.proj") is None:
        return s.stream + gathered + dx
    return s.stream + 2 * hidden + max(gathered, dx + s.tokens * proj.in_features)


def _core(plan: LayerPlan) -> int:
    s, m = plan.sizes, plan.sizes.model
    heads = m.num_attention_heads // s.tp
    gradients = (heads * m.value_channels + plan.head_channels()) * s.element
    return s.stream + s.tokens * (gradients + 4 * heads * m.query_channels)


def _projections(plan: LayerPlan) -> int:
    """Of latent attention: while gradients of queries, keys and values become those of the up-projections."""
    s, m = plan.sizes, plan.sizes.model
    hidden = s.tokens * m.hidden_size
    if m.multi_latent_attention:
        out = [
            plan.shape(f"attention.{name}").out_features
            for name in ("kv_up", "q_proj" if not m.q_lora_rank else "q_up")
        ]
        copies = 2 if plan.recipe("attention.kv_up") is not None else 0
        up = s.tokens * (plan.head_channels() * s.element + out[0] * (s.element + copies))
        return s.stream + max(up, s.tokens * out[1] * (s.element + copies) + hidden * s.element)
    width, in_fp8 = plan.shape("attention.qkv").out_features, plan.recipe("attention.qkv") is not None
    own = s.tokens * width * (s.element + (2 if in_fp8 else 0))
    return own + hidden * s.element + _around_column(plan, in_fp8) + s.stream


def _around_column(plan: LayerPlan, in_fp8: bool) -> int:
    """Of a column-parallel linear under sequence parallelism: its input, gathered again, and dX, scattered."""
    s = plan.sizes
    return s.tokens * s.model.hidden_size * (1 if in_fp8 else s.element) + s.stream if s.sequence_parallel else 0


def _activation(plan: LayerPlan, name: str, rows: int) -> int:
    """While fc2's dX becomes fc1's dY: both, and in FP8 fc2's input made anew; in BF16 fc2 is over, and its input
    gone."""
    s, fc1, fc2 = plan.sizes, plan.shape(f"{name}.fc1"), plan.shape(f"{name}.fc2")
    first, second = plan.recipe(fc1.part), plan.recipe(fc2.part)
    again = rows * fc2.in_features if second is not None else -_kept(plan, name, "fc2")
    if not s.model.swiglu:
        return rows * fc2.in_features * (s.element + 4 * 4) + again
    of_fc1 = fc1.out_features * (2 if first is not None and not fc1.bias and second is not None else s.element)
    return rows * (fc2.in_features * s.element + of_fc1) + again


def _kept(plan: LayerPlan, name: str, *modules: str) -> int:
    """Bytes that some modules of an MLP keep of forward."""
    labels = {f"{name}.{module}".replace(".*", "") for module in modules}
    return sum(a.bytes for a in plan.items() if a.module in labels)


def _mlp(plan: LayerPlan, name: str, rows: int) -> int:
    s, fc1, fc2 = plan.sizes, plan.shape(f"{name}.fc1"), plan.shape(f"{name}.fc2")
    scattered = s.sequence_parallel and (not plan.layer.experts or s.exchanges)
    hidden, dx = rows * s.model.hidden_size, rows * fc2.in_features * s.element
    gathered, activation = hidden * s.element if scattered else 0, _activation(plan, name, rows)
    if plan.recipe(fc2.part) is None:
        at_fc2 = max(gathered + dx, activation)
    else:
        at_fc2 = 2 * hidden + max(gathered, activation)
    inner = 2 if plan.recipe(fc1.part) is not None else s.element
    at_fc1 = rows * fc1.out_features * inner + hidden * s.element + s.stream - _kept(plan, name, "activation", "fc2")
    at_fc1 += _around_column(plan, plan.recipe(fc1.part) is not None) if scattered else 0
    return s.stream + max(at_fc2, at_fc1)


def _experts(plan: LayerPlan) -> int:
    s, name = plan.sizes, "mlp.experts.*"
    fc1, fc2 = plan.shape(f"{name}.fc1"), plan.shape(f"{name}.fc2")
    rows, hidden = s.rows, s.rows * s.model.hidden_size
    first, second = plan.recipe(fc1.part), plan.recipe(fc2.part)
    arriving = 2 * hidden * s.element + (s.routed_tokens * s.model.moe_router_topk * s.model.hidden_size * s.element
                                         if s.exchanges else 0)  # fmt: skip
    weights = 0, 0  # gradients of all experts, before they are added
    each = tuple(fc.copies * fc.out_features * fc.in_features * s.element for fc in (fc1, fc2))
    if first is None and runs_grouped(first):
        weights = each
    activation, dy = _activation(plan, name, rows), hidden * s.element
    if second is None:
        at_fc2 = max(dy + rows * fc2.in_features * s.element + weights[1], activation)
    else:  # where experts run as one, dY is quantized as rows are spread, and never there in high precision
        spread = runs_grouped(second) or second.input_tile == "tensor"
        decoded = _decoded(plan, second, dy, each[1])
        at_fc2 = (0 if spread else dy) + 2 * hidden + max(activation, rows * fc2.in_features * s.element + decoded)
    at_fc1 = rows * fc1.out_features * (2 if first is not None else s.element) + dy + weights[0]
    at_fc1 += _decoded(plan, first, rows * fc1.out_features * s.element, each[0])
    at_fc1 -= _kept(plan, name, "activation", "fc2")
    return s.stream + max(arriving, at_fc2, at_fc1)


def _decoded(plan: LayerPlan, recipe: Recipe | None, dy: int, weights: int) -> int:
    """Of MXFP8 that is decoded before it is multiplied: dY and the weights, for dgrad. dy, weights: their bytes in
    BF16."""
    if recipe is None or recipe.quantizer("weight").spec.scale is not Scale.E8M0:
        return 0
    if gemm.capability(plan.device).native_mxfp8:
        return 0
    return dy + weights


def _router(plan: LayerPlan) -> int:
    s, m = plan.sizes, plan.sizes.model
    return 2 * s.stream + 2 * 4 * s.routed_tokens * m.hidden_size + 3 * 4 * s.tokens * m.num_experts
