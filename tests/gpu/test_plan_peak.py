"""The planner's peak against CUDA's allocator, after two steps of two microbatches of a one-GPU job."""

import pytest
import torch

from megafp8.config import build_config, with_vocab_size
from megafp8.plan.comparison import measure
from megafp8.plan.memory import plan_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DENSE = {
    "num_layers": 4,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "seq_length": 4096,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "lr": 1e-3,
    "train_iters": 1,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 32767,
    "mock_data": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "bf16": True,
}
MOE = DENSE | {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "num_experts": 16,
    "moe_ffn_hidden_size": 1024,
    "moe_router_topk": 4,
    "moe_router_force_load_balancing": True,
}
FP8, PRIMARY = {"fp8_format": "e4m3"}, {"fp8_format": "e4m3", "fp8_param_gather": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {
    "dense, bf16": DENSE,
    "dense, bf16, recomputed": DENSE | FULL,
    "dense, blockwise": DENSE | FP8,
    "dense, blockwise primary": DENSE | PRIMARY,
    "dense, tensorwise, recomputed": DENSE | {"fp8_format": "hybrid"} | FULL,
    "moe, bf16": MOE,
    "moe, blockwise": MOE | FP8,
    "moe, blockwise primary, recomputed": MOE | PRIMARY | FULL,
}


@pytest.mark.parametrize("case", CASES)
def test_peak_within_five_percent(case):
    config = with_vocab_size(build_config(env={}, **CASES[case]), 32768)
    torch.cuda.empty_cache()
    found = measure(config, plan_memory(config, "cuda"), torch.device("cuda"))
    for what, (planned, measured) in found.items():
        assert planned == pytest.approx(measured, rel=0.05), what
