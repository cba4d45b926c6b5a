"""Memory formulas against what the built parts hold."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafp8.core.gpt import GPTModel, build_model
from megafp8.core.pipeline.schedules import rank_actions
from megafp8.fp8 import get_recipe
from megafp8.lone import fake_parallel
from megafp8.optimizer import build_optimizer
from megafp8.parallel import ParallelContext
from megafp8.params import named_specs
from megafp8.plan.activations import Activation, LayerKinds, Phase, by_module, peak_of, stage_phases
from megafp8.plan.in_flight import ChunkBytes, most_held
from megafp8.plan.layer_activations import quantized_bytes
from megafp8.plan.memory import plan_memory
from megafp8.plan.shapes import LayerShape
from megafp8.plan.sizes import Sizes
from megafp8.plan.transients import CORE, backward_bytes, loss_bytes
from megafp8.plan.transients import MLP as MLP_PART
from megafp8.step import StepContext
from tests.plan import variants

BF16 = {"bf16": True}
BLOCKWISE = BF16 | {"fp8_format": "e4m3"}
# Layers as in variants.py, with LayerNorm; heads of one width, or the CPU has no kernel that keeps no weights.
DENSE_NORM = {"normalization": "LayerNorm"}
MOE = variants.MOE | DENSE_NORM | {"moe_ffn_hidden_size": 256, "position_embedding_type": "learned_absolute"}
EVEN_HEADS = variants.LATENT | DENSE_NORM | {"v_head_dim": 64, "qk_head_dim": 48, "qk_pos_emb_head_dim": 16}
LARGER = {"hidden_size": 256, "seq_length": 128, "num_layers": 2}
# FP8 would slow down qkv and proj.
SMALL = {"hidden_size": 512, "ffn_hidden_size": 2048, "seq_length": 512, "num_layers": 1, "num_attention_heads": 8}
# RMSNorm is left to GPUs: on the CPU PyTorch takes it apart and keeps more than the fused kernel.
CASES = {
    "fp32": {},
    "bf16": BF16,
    "bf16 swiglu gqa rope": BF16
    | {"swiglu": True, "group_query_attention": True, "num_query_groups": 2, "position_embedding_type": "rope"},
    "bf16 untied, no bias": BF16 | {"untie_embeddings_and_output_weights": True, "add_bias_linear": False},
    "bf16 norm of heads": BF16 | {"qk_layernorm": True},
    "bf16 weights minus one": BF16 | {"apply_layernorm_1p": True},
    "blockwise": BLOCKWISE,
    "blockwise swiglu": BLOCKWISE | {"swiglu": True},
    "blockwise, some layers bf16": BLOCKWISE | {"first_last_layers_bf16": True, "num_layers": 4},
    "blockwise where it pays": BLOCKWISE | SMALL | {"swiglu": True},
    "tensorwise": BF16 | {"fp8_format": "hybrid"},
    "mxfp8": BLOCKWISE | {"fp8_recipe": "mxfp8"},
    "blockwise, fc1's output in fp8": BLOCKWISE | {"swiglu": True, "activation_func_fp8_input_store": True},
    "bf16, fc1's output in fp8": BF16 | {"activation_func_fp8_input_store": True},
    "experts keep fc1's output in bf16": BLOCKWISE | MOE | {"activation_func_fp8_input_store": False},
    "recompute all": BF16 | {"recompute_granularity": "full"},
    "recompute all, fp8, units of 2": BLOCKWISE
    | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2, "num_layers": 4},
    "recompute one layer": BF16
    | {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "recompute core": BF16 | {"recompute_activations": True},
    "recompute core, fp8": BLOCKWISE | {"recompute_activations": True},
    "bf16 experts": BF16 | MOE,
    "bf16 gated shared expert": BF16
    | MOE
    | {"moe_shared_expert_intermediate_size": 72, "moe_shared_expert_gate": True, "moe_layer_freq": "[0,1]"},
    "blockwise experts": BLOCKWISE | MOE | {"moe_shared_expert_intermediate_size": 128},
    "recompute experts": BLOCKWISE | MOE | {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    "recompute parts of experts": BF16
    | MOE
    | {
        "moe_shared_expert_intermediate_size": 128,
        "recompute_granularity": "selective",
        "recompute_modules": ("moe_act", "shared_experts"),
    },
    "bf16 latent attention": BF16 | EVEN_HEADS,
    "recompute up-projections": BF16
    | EVEN_HEADS
    | {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",)},
    "blockwise latent attention": BLOCKWISE | EVEN_HEADS | {"q_lora_rank": None},
    "bf16 prediction": BF16 | {"mtp_num_layers": 2},
    "blockwise prediction, recompute all": BLOCKWISE | {"mtp_num_layers": 1, "recompute_granularity": "full"},
    "recompute mlp": BF16 | {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
}


def held_for_backward(model: GPTModel, config) -> int:
    """Bytes of the distinct storages that autograd keeps after one forward, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}
    alive = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no address is used twice
        return tensor

    tokens = torch.randint(257, (config.train.micro_batch_size, config.data.seq_length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        loss = model(tokens, step=StepContext(), labels=tokens)
    assert loss.requires_grad
    return sum(held.values())


@pytest.mark.parametrize("case", CASES)
def test_activations_are_what_autograd_keeps(make, case):
    """Within 2%: rotary tables, FP32 losses and the like are not counted."""
    config = make("gpt2", **LARGER | CASES[case])
    model = build_model(config, ParallelContext(), "cpu")
    assert plan_memory(config).held == pytest.approx(held_for_backward(model, config), rel=0.02)


def weight_bytes(model: GPTModel) -> int:
    """Bytes of the distinct storages that the weights lie in, FP8 primary ones with their scales."""
    owners = [p.owner.primary for p in model.parameters() if getattr(getattr(p, "owner", None), "primary", None)]
    params = [p for p in model.parameters() if getattr(getattr(p, "owner", None), "primary", None) is None]
    stored = [t for owner in owners for t in (*owner.data.values(), *owner.scale_inv.values())]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in params + stored}.values())


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
@pytest.mark.parametrize("values", [{}, BLOCKWISE], ids=["fp32", "fp8"])
def test_static_memory_is_what_model_and_optimizer_hold(make, variant, values):
    config = make(variant, **values)
    model = build_model(config, ParallelContext(), "cpu")
    optimizer = build_optimizer(named_specs(model), config, ParallelContext())
    plan = plan_memory(config)
    assert plan.weights == weight_bytes(model)
    assert plan.main_grads == sum(flat.nbytes for flat in optimizer.grads.state.flats)
    assert plan.masters == sum(flat.nbytes for flat in optimizer.masters.flats)
    assert plan.moments == sum(f.nbytes for s in (optimizer.exp_avg, optimizer.exp_avg_sq) for f in s.flats)


@pytest.mark.parametrize("remainders", [False, True])
def test_static_memory_of_state_below_fp32(make, remainders):
    lower = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}
    config = make("llama", bf16=True, store_param_remainders=remainders, **lower)
    config = config.replace(keep_optimizer_state_in_fp32=("embedding.*",))
    optimizer = build_optimizer(named_specs(build_model(config, ParallelContext(), "cpu")), config, ParallelContext())
    plan = plan_memory(config)
    assert plan.masters == optimizer.masters.nbytes
    assert plan.moments == optimizer.exp_avg.nbytes + optimizer.exp_avg_sq.nbytes
    assert plan.moments < 8 * plan.main_grads // 4


PRIMARY = {"use_distributed_optimizer": True, "fp8_param_gather": True}


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "mxfp8 1d"])
def test_static_memory_of_fp8_primary_weights_in_shards(make, recipe, world):
    name, _, tile = recipe.partition(" ")
    values = {"fp8_recipe": name, "fp8_weight_tile": tile or None} if tile else {"fp8_recipe": name}
    config = make("llama", world_size=world, **BLOCKWISE | PRIMARY | values)
    with fake_parallel(config) as parallel:
        model = build_model(config, parallel, "cpu")
        optimizer = build_optimizer(named_specs(model), config, parallel)
        plan = plan_memory(config)
    owners = [p.owner for p in model.parameters() if getattr(getattr(p, "owner", None), "primary", None)]
    assert owners
    assert plan.weights == weight_bytes(model)
    assert plan.main_grads == sum(flat.nbytes for flat in optimizer.grads.state.flats)
    assert plan.masters == sum(flat.nbytes for flat in optimizer.masters.flats)
    assert plan.moments == sum(f.nbytes for s in (optimizer.exp_avg, optimizer.exp_avg_sq) for f in s.flats)
    assert 4 * plan.masters >= plan.main_grads * 4 // world
    for owner in owners:
        for gemm_name in ("fprop", "dgrad"):
            owner.operand(gemm_name)
    assert plan.fp8_copies == pytest.approx(sum(owner.nbytes for owner in owners), rel=0.01)  # scales are padded


@pytest.mark.parametrize(
    "values",
    [
        BLOCKWISE,
        BLOCKWISE | {"fp8_weight_tile": "1d"},
        BLOCKWISE | {"fp8_recipe": "mxfp8"},
        BF16 | {"fp8_format": "hybrid"},
        BLOCKWISE | {"first_last_layers_bf16": True},
        BLOCKWISE | SMALL,
        BF16,
    ],
    ids=["blockwise", "1d weights", "mxfp8", "tensorwise", "first and last bf16", "where it pays", "bf16"],
)
def test_fp8_copies_are_what_the_weights_keep(make, values):
    config = make("llama", **values)
    model = build_model(config, ParallelContext(), "cpu")
    tokens = torch.randint(257, (2, 32))
    model(tokens, step=StepContext(), labels=tokens).backward()
    owners = [p.owner for p in model.parameters() if hasattr(p, "owner")]
    assert plan_memory(config).fp8_copies == sum(owner.nbytes for owner in owners)


def test_recomputing_norms_drops_their_outputs(make):
    """Autograd's hooks can't see what replaces them, so this one is a difference of formulas."""
    values = {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}
    plain, less = plan_memory(make("gpt2", **BF16)), plan_memory(make("gpt2", **BF16 | values))
    tokens, hidden, layers = 2 * 32, 64, 3
    assert plain.held - less.held == layers * 2 * tokens * hidden * 2
    assert less.extra.bytes >= tokens * hidden * 2 * 2


def test_llama_8b_layer(make):
    """A Llama-3-8B layer at 8192 tokens: 1088 MiB in BF16; in FP8 without copies for proj and fc2 803."""
    sizes = {
        "num_layers": 1, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
        "num_query_groups": 8, "micro_batch_size": 2, "seq_length": 4096,
    }  # fmt: skip

    def layer_mib(**values):
        items = by_module(plan_memory(make("llama", **sizes, **values)).activations)
        outside = ("embedding", "rotation", "final_norm", "lm_head", "loss")
        return sum(a.bytes for a in items if a.module not in outside) / 2**20

    assert layer_mib(bf16=True) == pytest.approx(1088, abs=2)
    assert layer_mib(bf16=True, fp8_format="e4m3") == pytest.approx(803, abs=2)


def test_temporaries_of_a_llama_8b_layer(make):
    """8192 tokens, counted by hand in MiB: when fc2's dX becomes fc1's dY there are G 64 and dX [T f] 224; in FP8 dY in
    two directions 64, fc1's dY as bytes in two directions 448 and fc2's input again 112; in BF16 fc1's dY 448, and
    fc2's input 224 is gone."""
    sizes = {
        "num_layers": 1, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
        "num_query_groups": 8, "micro_batch_size": 2, "seq_length": 4096, "bf16": True,
    }  # fmt: skip
    for flags, mib in (({}, 64 + 224 + 448 - 224), ({"fp8_format": "e4m3"}, 64 + 64 + 224 + 448 + 112)):
        plan = LayerKinds(make("llama", **sizes | flags))(LayerShape("layers.0", False)).plan()
        assert backward_bytes(plan, MLP_PART) == mib << 20
        # Core attention: G, d(output), dq, dk and dv, and the FP32 sum of dq are more than what proj holds.
        assert backward_bytes(plan, CORE) == (64 + 64 + 64 + 2 * 16 + 128) << 20
    # Two sequence-parallel ranks: dY is gathered in BF16 (64) and quantized (64), before dX (112), fc1's dY (224) and
    # fc2's input (56) are there; G is 32.
    two = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "world_size": 2, "fp8_format": "e4m3"}
    plan = LayerKinds(make("llama", **sizes | two))(LayerShape("layers.0", False)).plan()
    assert backward_bytes(plan, MLP_PART) == (32 + 64 + max(64, 112 + 224 + 56)) << 20


def test_a_recomputed_units_input_counts_once(make):
    """It is what the first layer's norm keeps."""
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    (_, unit, _), (_, *parts, _) = (
        stage_phases(make("llama", bf16=True, num_layers=1, **flags), torch.device("cpu"))[0] for flags in (whole, {})
    )
    assert unit.bytes + unit.again == peak_of(parts)[0]


def test_temporaries_of_head_and_loss(make):
    """8192 tokens of 4096 channels: dX 64 MiB; the input gathered again as much, and dX scattered over two ranks 32."""
    wide = {"hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "bf16": True, "seq_length": 4096}
    sizes = {"": {}, "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "world_size": 2}}
    for flags, mib in zip(sizes.values(), (64, 64 + 64 + 32), strict=True):
        found = Sizes.of(make("llama", micro_batch_size=2, **wide | flags))
        assert loss_bytes(found, 8192, fused=True) == loss_bytes(found, 8192, fused=False) == mib << 20
    alone = Sizes.of(make("llama", micro_batch_size=2, **wide))
    few = replace(alone, model=replace(alone.model, hidden_size=8))
    assert loss_bytes(few, 8192, fused=False) == 4 * 8192 * 384, "FP32 logits of all tokens"
    assert loss_bytes(few, 8192, fused=True) == 2 * 8 * 8192, "GPUs' kernels have none"


def test_the_peak_is_in_the_part_that_holds_most():
    """Backward frees a part after the other, the last first: 30 + 5, 20 + 30 and 10 + 60."""
    phases = [Phase((Activation("x", "", 10),), backward=extra) for extra in (60, 30, 5)]
    assert peak_of(phases) == (70, "gradients")
    assert peak_of(phases[1:]) == (40, "gradients")
    assert peak_of([Phase((Activation("x", "", 1),), again=50, backward=5, what="again")]) == (56, "again")


def test_microbatches_in_flight_follow_the_schedule():
    """1F1B on the first of 4 ranks holds 4; deferred weight gradients of zero-bubble come on top, up to their limit."""
    chunk = ChunkBytes(kept=100, extra=7, what="gradients", deferred=10)
    plain = most_held(rank_actions("1f1b", 0, 4, 1, 8), [chunk])
    assert (plain.held, plain.pairs, plain.extra.bytes, plain.microbatches) == (400, 4, 7, 4)
    assert most_held(rank_actions("gpipe", 0, 4, 1, 8), [chunk]).held == 800
    last = rank_actions("zero-bubble", 3, 4, 1, 8)
    assert most_held(last, [chunk]).held == 100 + 3 * 10
    assert most_held(last, [chunk], wgrad_limit=15).held == 100 + 15
    small = ChunkBytes(kept=1, extra=500, what="loss")
    two = most_held(rank_actions("1f1b", 1, 2, 2, 4), [chunk, small])
    assert two.extra.what == "loss"


def test_total_is_the_sum(make):
    plan = plan_memory(make("llama", **BLOCKWISE))
    parts = plan.weights + plan.main_grads + plan.masters + plan.moments + plan.fp8_copies + plan.workspaces
    assert plan.static == parts
    assert plan.total == sum(plan.owners.values()) == parts + plan.in_flight + plan.extra.bytes
    assert plan.in_flight == plan.held + 20 * 64, "labels, masks and positions of 64 tokens"


TABLE = Path(__file__).resolve().parents[2] / "docs" / "optimizer.md"


def rows_of_the_table() -> dict[str, list[str]]:
    _, _, text = TABLE.read_text().partition("## Bytes a parameter")
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows if row[0] != "weights"}


@pytest.mark.parametrize("label", rows_of_the_table())
def test_table_of_bytes_a_parameter_follows_the_formulas(label):
    """docs/optimizer.md, for a weight of 4096 x 4096."""
    weight, copies, gradient, _, *sums = rows_of_the_table()[label]
    name, _, rest = label.partition(" ")
    expected = (2.0, 0.0)
    if name != "BF16":
        name, tile = name.strip(","), {"32x32,": "2d", "1x32,": "1d"}.get(rest.split()[0])
        recipe = get_recipe(name, weight_tile=tile)
        row, col = (
            quantized_bytes(recipe, "weight", (4096, 4096), orientation) / 4096**2
            for orientation in ("rowwise", "colwise")
        )
        held = row + col if tile == "1d" else row
        expected = (2.0, row + col) if rest.endswith("BF16 weight") else (held, col)
    assert [float(weight), float(copies)] == pytest.approx(expected, abs=6e-4)
    for shards, total in zip((1, 8), sums, strict=True):
        assert float(total) == pytest.approx(sum(expected) + float(gradient) + 12 / shards, abs=6e-4)
