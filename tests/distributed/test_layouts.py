"""Every layout equals one process (FP32, gradient accumulation), at random initialization and in a trained model."""

import pytest

from tests.distributed.layouts import GPT2, LLAMA, Layout, compare, run_layout

LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(tp=4),
    Layout(dp=2),
    Layout(tp=2, dp=2),
    Layout(tp=2, sp=True, dp=2),
    Layout(tp=4, sp=True),
]


@pytest.fixture(scope="module")
def expected(pool_of_module):
    return {name: run_layout(pool_of_module, model, Layout()) for name, model in (("llama", LLAMA), ("gpt2", GPT2))}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layout_equals_one_process(pool, expected, name, layout):
    compare(run_layout(pool, {"llama": LLAMA, "gpt2": GPT2}[name], layout), expected[name])
