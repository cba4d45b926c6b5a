"""The planner's activations against CUDA's allocator: what a forward leaves allocated."""

import pytest
import torch

from megafp8.config import build_config, with_vocab_size
from megafp8.plan.memory import plan_memory

LLAMA = {
    "num_layers": 2,
    "hidden_size": 2048,
    "ffn_hidden_size": 7168,
    "num_attention_heads": 16,
    "group_query_attention": True,
    "num_query_groups": 4,
    "seq_length": 2048,
    "micro_batch_size": 2,
    "lr": 1e-3,
    "train_iters": 1,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 8191,
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
ALL, SELECTIVE = {"fp8_small_linears": "fp8"}, {"recompute_granularity": "selective"}
BLOCKWISE = ALL | {"fp8_format": "e4m3"}
CASES = {
    "bf16": {},
    "blockwise": BLOCKWISE,
    "tensorwise": ALL | {"fp8_format": "hybrid"},
    "bf16, whole layers recomputed": {"recompute_granularity": "full"},
    "blockwise, mlp recomputed": BLOCKWISE | SELECTIVE | {"recompute_modules": ("mlp",)},
    "blockwise, norms recomputed": BLOCKWISE | SELECTIVE | {"recompute_modules": ("layernorm",)},
}


@pytest.mark.parametrize("case", CASES)
def test_activations_are_what_the_allocator_holds(case):
    """Within 3%, from the second forward on: FP8 copies of weights are made in the first."""
    from megafp8.core.gpt import build_model
    from megafp8.parallel import ParallelContext
    from megafp8.step import StepContext

    config = with_vocab_size(build_config(env={}, **LLAMA | CASES[case]), 8192)
    model = build_model(config, ParallelContext(), "cuda")
    tokens = torch.randint(8192, (2, 2048), device="cuda")
    for _ in range(2):
        for p in model.parameters():
            p.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(tokens, step=StepContext(), labels=tokens)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        del loss
    planned = plan_memory(config, "cuda").held - 8 * tokens.numel()  # the ids were there before
    assert held == pytest.approx(planned, rel=0.03), f"{held / 2**20:.1f} MiB held, {planned / 2**20:.1f} planned"
