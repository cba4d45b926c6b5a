"""Layers replayed from graphs on two ranks.

Under data parallelism buckets leave, and weights arrive, between replays; under tensor parallelism messages are a part
of what is replayed.
"""

import pytest

from tests.distributed.layouts import LLAMA, Layout, run_layout
from tests.distributed.test_overlap import GATHER, SMALL_BUCKETS, same
from tests.training.graph_steps import LATENT

GRAPHS = {"cuda_graph_impl": "local"}
BF16 = {"bf16": True}
BLOCKWISE = BF16 | {"fp8_format": "e4m3"}
TENSORWISE = BF16 | {"fp8_format": "hybrid"}
DELAYED = TENSORWISE | {"fp8_recipe": "delayed"}
VALUES = {
    "bf16, overlapped": BF16 | GATHER,
    "tensorwise, FP8 weights": TENSORWISE | GATHER | {"fp8_param_gather": True},
    "delayed": DELAYED,
}
TP, SP, CHUNKS = Layout(tp=2), Layout(tp=2, sp=True), Layout(tp=2, sp=True, overlap=True)
TENSOR = {
    "bf16": (BF16, TP),
    "bf16, tokens cut": (BF16, SP),
    "bf16, in chunks": (BF16, CHUNKS),
    "blockwise": (BLOCKWISE, TP),
    "blockwise, tokens cut": (BLOCKWISE, SP),  # of 32: colwise tiles lie across both ranks
    "blockwise, in chunks": (BLOCKWISE, CHUNKS),
    "tensorwise, tokens cut": (TENSORWISE, SP),
    "tensorwise, in chunks": (TENSORWISE, CHUNKS),
    "delayed, tokens cut": (DELAYED, SP),
    "mxfp8, tokens cut": (BLOCKWISE | {"fp8_recipe": "mxfp8"}, SP),
    "latent, tokens cut": (BLOCKWISE | LATENT | {"add_qkv_bias": False}, SP),
}


def compare(pool, values: dict, layout: Layout, **options) -> None:
    plain, graphs = (run_layout(pool, LLAMA | values | more, layout, 3, **options) for more in ({}, GRAPHS))
    same(graphs, plain)


@pytest.mark.parametrize("case", VALUES)
def test_two_ranks_have_the_bits_of_calls(pool, case):
    compare(pool, VALUES[case], Layout(dp=2), **SMALL_BUCKETS)


@pytest.mark.parametrize("case", TENSOR)
def test_tensor_parallel_ranks_have_the_bits_of_calls(pool, case):
    values, layout = TENSOR[case]
    compare(pool, values, layout)
