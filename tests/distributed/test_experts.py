"""Expert parallelism equals one process: gradients, norms, counts, bias updates, losses, in every layout."""

import pytest
import torch

from tests.distributed.layouts import Layout, compare, run_layout
from tests.distributed.test_families import EXPERTS, biases

LAYOUTS = [
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=4),
    Layout(dp=4, ep=2),
    Layout(tp=2, sp=True, ep=2, etp=1),
    Layout(tp=2, sp=True, etp=1),
    Layout(dp=2, etp=2),
    Layout(tp=2, sp=True, dp=2, ep=2),
    Layout(tp=2, sp=True, dp=2, ep=2, etp=1),
    Layout(pp=2, dp=2, ep=2),
    Layout(dp=4, ep=4, dispatcher="allgather"),
    Layout(tp=2, sp=True, dp=2, ep=2, dispatcher="allgather"),
]


@pytest.fixture(scope="module")
def alone(pool_of_module):
    return run_layout(pool_of_module, EXPERTS, Layout(), observe=biases)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_equals_one_process(pool, alone, layout):
    """CASES 01, 02, 14, 54."""
    run = run_layout(pool, EXPERTS, layout, observe=biases)
    compare(run, alone)
    for rank in run.extra:
        assert all(torch.equal(bias, alone.extra[0][router]) for router, bias in rank.items())
