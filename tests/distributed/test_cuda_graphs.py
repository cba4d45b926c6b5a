"""Layers replayed from graphs under data parallelism: buckets leave, and weights arrive, between replays."""

import pytest

from tests.distributed.layouts import LLAMA, Layout, run_layout
from tests.distributed.test_overlap import GATHER, SMALL_BUCKETS, same

GRAPHS = {"cuda_graph_impl": "local"}
BF16 = {"bf16": True}
VALUES = {
    "bf16, overlapped": BF16 | GATHER,
    "tensorwise, FP8 weights": BF16 | GATHER | {"fp8_format": "hybrid", "fp8_param_gather": True},
    "delayed": BF16 | {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
}


@pytest.mark.parametrize("case", VALUES)
def test_two_ranks_have_the_bits_of_calls(pool, case):
    plain, graphs = (
        run_layout(pool, LLAMA | VALUES[case] | more, Layout(dp=2), 3, **SMALL_BUCKETS) for more in ({}, GRAPHS)
    )
    same(graphs, plain)
