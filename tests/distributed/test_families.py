"""Experts, latent attention and multi-token prediction on several ranks equal one process (experts on every rank)."""

import pytest
import torch

from tests.distributed.layouts import LLAMA, Layout, compare, distance, run_layout

EXPERTS = LLAMA | {
    "num_experts": 8,
    "moe_ffn_hidden_size": 48,
    "moe_layer_freq": "[0,1]",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.125,
    "moe_aux_loss_coeff": (0.1,),
    "moe_shared_expert_intermediate_size": 32,
}
DEEPSEEK = {k: v for k, v in EXPERTS.items() if k not in ("group_query_attention", "num_query_groups", "add_qkv_bias")}
DEEPSEEK |= {
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
    "mtp_num_layers": 1,
}
MODELS = {"experts": EXPERTS, "deepseek": DEEPSEEK}
STEPS = 3  # an odd number: biases of even loads go there and back


def biases(model, optimizer, parallel) -> dict[str, torch.Tensor]:
    return {router.name: router.expert_bias.clone() for router in model.routers()}


@pytest.fixture(scope="module")
def alone(pool_of_module):
    return {name: run_layout(pool_of_module, model, Layout(), STEPS, observe=biases) for name, model in MODELS.items()}


LAYOUTS = [Layout(dp=2), Layout(tp=2), Layout(tp=2, sp=True), Layout(tp=2, sp=True, dp=2), Layout(pp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_layout_equals_one_process(pool, alone, name, layout):
    """CASES 14, 23, 54: expert, router and dense gradients; biases move by the loads of the whole global batch."""
    run = run_layout(pool, MODELS[name], layout, STEPS, observe=biases)
    compare(run, alone[name])
    expected = alone[name].extra[0]
    for rank in run.extra:
        assert all(torch.equal(bias, expected[router]) for router, bias in rank.items())
    assert {router for rank in run.extra for router in rank} == expected.keys()
    assert all(bias.abs().sum() > 0 for bias in expected.values())


# Parts of a rank are whole tiles of 128.
FP8 = DEEPSEEK | {
    "hidden_size": 256,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "moe_ffn_hidden_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 64,
    "bf16": True,
    "fp8_format": "e4m3",
    "num_experts": 4,
    "global_batch_size": 2,
}


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_fp8_stays_near_one_process(pool, recipe):
    """Sums of two halves round otherwise than a whole: near, not equal. Copies on both ranks are equal to the bit."""
    model = FP8 | {"fp8_recipe": recipe}
    expected = run_layout(pool, model, Layout(), 1)
    actual = run_layout(pool, model, Layout(tp=2, sp=True), 1)
    assert actual.losses == pytest.approx(expected.losses, rel=2e-3)
    for name in ("layers.1.attention.kv_down.weight", "layers.1.mlp.shared_experts.fc1.weight", "mtp.0.eh_proj.weight"):
        assert distance(actual.grads[name], expected.grads[name]) < 0.1, name
