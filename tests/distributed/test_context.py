"""Context parallelism against one process: all-gather and ring, documents, windows, in training."""

import pytest

from tests.distributed.layouts import GPT2, LLAMA, Layout, compare, run_layout

MODELS = {"llama": LLAMA, "gpt2": GPT2, "window": LLAMA | {"window_size": "5,0"}}
LAYOUTS = [Layout(cp=2), Layout(cp=2, ring=True), Layout(cp=4), Layout(cp=4, ring=True)]


@pytest.fixture(scope="module")
def one_process(pool_of_module):
    return {name: run_layout(pool_of_module, model, Layout()) for name, model in MODELS.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_context_parallel_equals_one_process(pool, one_process, name, layout):
    compare(run_layout(pool, MODELS[name], layout), one_process[name])
