"""One rank of a large job alone on a GPU: memory within a tenth of the plan, traffic exactly as planned."""

import pytest
import torch

from megafp8.config import build_config, with_vocab_size
from megafp8.plan.at_peak import at_peak, peak_lines, recorded
from megafp8.plan.measured import owner_lines
from megafp8.plan.memory import plan_memory
from megafp8.training.one_rank import measure_one_rank
from megafp8.training.one_rank_report import report_lines, traffic_differs

LLAMA = {
    "num_layers": 8,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "seq_length": 4096,
    "micro_batch_size": 1,
    "global_batch_size": 32,
    "train_iters": 3,
    "lr": 1e-4,
    "bf16": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 32767,
    "mock_data": True,
    "fake_process_group": True,
    "use_distributed_optimizer": True,
}
TP_PP = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "pipeline_model_parallel_size": 4}
EP = {
    "expert_model_parallel_size": 8,
    "num_experts": 32,
    "moe_ffn_hidden_size": 2048,
    "moe_router_topk": 4,
    "pipeline_model_parallel_size": 2,
    "num_layers": 4,
}
ALL = {"fp8_small_linears": "fp8"}
CASES = {
    "Llama, first stage, blockwise": (32, 1, LLAMA | TP_PP | ALL | {"fp8_format": "e4m3"}),
    "Llama, middle stage, BF16": (32, 17, LLAMA | TP_PP),
    "Llama, last stage, tensorwise primary": (
        32,
        31,
        LLAMA | TP_PP | ALL | {"fp8_format": "hybrid", "fp8_param_gather": True},
    ),
    "experts, last stage, blockwise": (16, 12, LLAMA | EP | ALL | {"fp8_format": "e4m3", "moe_fp8_dispatch": True}),
}


def compare(world: int, rank: int, flags: dict) -> tuple[int, int, bool, bool, list[str]]:
    """Peak planned and measured, whether gradients were finite, whether traffic differed, and a page on all of it."""
    config, device = with_vocab_size(build_config(env={"WORLD_SIZE": str(world)}, **flags), 32768), torch.device("cuda")
    with recorded():
        measured = measure_one_rank(config, device, rank)
        plan = plan_memory(config, device, measured.stage)
        page = [*report_lines(config, device, measured), *owner_lines(plan)]
        page += [] if plan.total == pytest.approx(measured.peak, rel=0.1) else peak_lines(at_peak(device))
    return plan.total, measured.peak, measured.finite, traffic_differs(config, measured), page


@pytest.mark.parametrize("case", CASES)
def test_memory_and_traffic_are_as_planned(case):
    planned, measured, finite, differs, page = compare(*CASES[case])
    print("\n".join([case, *page]))
    assert finite
    assert not differs
    assert planned == pytest.approx(measured, rel=0.1)
