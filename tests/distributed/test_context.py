"""Context parallelism against one process: all-gather and ring, documents, windows, in training."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.core.context_parallel import own_places, own_tokens, query_bounds
from megafp8.parallel import Axis
from tests.distributed.layouts import GPT2, LLAMA, Layout, compare, run_layout, train
from tests.distributed.recorder import record

LATENT = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "seq_length": 16,
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 12,
    "position_embedding_type": "rope",
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
MODELS = {"llama": LLAMA, "gpt2": GPT2, "window": LLAMA | {"window_size": "5,0"}, "latent": LATENT}
LAYOUTS = [Layout(cp=2), Layout(cp=2, ring=True), Layout(cp=4), Layout(cp=4, ring=True)]
FAST = [("llama", LAYOUTS[2]), ("llama", LAYOUTS[3]), ("gpt2", LAYOUTS[0]), ("window", LAYOUTS[1])]


@pytest.fixture(scope="module")
def one_process(pool_of_module):
    """What one process does, by model; run when first asked for."""
    runs = {}

    def run(name):
        if name not in runs:
            runs[name] = run_layout(pool_of_module, MODELS[name], Layout())
        return runs[name]

    return run


CASES = [
    pytest.param(name, layout, marks=[] if (name, layout) in FAST else [pytest.mark.slow], id=f"{name}-{layout}")
    for name in MODELS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_context_parallel_equals_one_process(pool, one_process, name, layout):
    compare(run_layout(pool, MODELS[name], layout), one_process(name))


def recorded(values, layout):
    with record() as log:
        train(values, layout, 1)
    return log


def test_keys_and_values_travel_in_bf16(pool):
    """K and V of this rank's tokens, once a layer and microbatch; their gradients come back whole, summed."""
    log, _ = pool.run_on(2, recorded, LLAMA | {"bf16": True}, Layout(cp=2))
    layers, microbatches, tokens, channels = 2, 4, 2 * 16 // 2, 4 * 8
    one = 2 * tokens * channels * 2  # keys and values, two bytes each
    assert log.bytes("gather", torch.bfloat16) == layers * microbatches * one
    assert log.bytes("scatter_sum", torch.bfloat16) == layers * microbatches * one * 2
    assert log.bytes("gather", torch.float32) == 0


# The split


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))
def test_every_token_is_on_one_rank_and_work_is_even(size, batch, chunk):
    length = 2 * size * chunk
    x = torch.arange(batch * length).view(batch, length)
    parts = [own_tokens(x, Axis(size, rank)) for rank in range(size)]
    assert sorted(torch.cat(parts, 1).flatten().tolist()) == list(range(batch * length))
    causal = [sum(place + 1 for place in own_places(length, Axis(size, rank)).tolist()) for rank in range(size)]
    assert max(causal) == min(causal)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4))
def test_query_bounds_count_each_documents_tokens(lengths, chunk):
    """Against counting: documents that lie within sequences, and any chunk of those."""
    length = 4 * chunk
    bounds, here = [0], 0
    for n in lengths * 3:
        for stop in range(here + length - here % length, here + n, length):  # a sequence ends a document
            bounds.append(stop)
        here += n
        bounds.append(here)
    total = -(-here // length) * length
    if here < total:
        bounds.append(total)
    bounds = torch.tensor(sorted(set(bounds)), dtype=torch.int32)
    for number in range(4):
        start, stop = number * chunk, (number + 1) * chunk
        inside = [start <= token % length < stop for token in range(total)]
        expected = [sum(inside[:bound]) for bound in bounds.tolist()]
        assert query_bounds(bounds, length, start, stop).tolist() == expected
