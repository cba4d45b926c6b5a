"""Every pipeline schedule has the bits of one process: losses, norms, gradients and weights, in every recipe.

Untied, without dropout. CASES 19, 80 (microbatch counts) and 05 (FP8 copies of weights over microbatches).
"""

import pytest
import torch

from tests.distributed.layouts import LLAMA, Layout, run_layout

DEEP = LLAMA | {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4,
                "num_query_groups": 2}  # fmt: skip
FP8 = DEEP | {"bf16": True}
RECIPES = {
    "fp32": DEEP,
    "bf16": FP8,
    "tensorwise": FP8 | {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": FP8 | {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": FP8 | {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "delayed": FP8 | {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 3},
}
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")
LAYOUTS = [
    *(Layout(pp=2, schedule=name) for name in SCHEDULES),
    *(Layout(pp=4, schedule=name) for name in SCHEDULES),
    *(Layout(pp=2, chunks=2, schedule=name) for name in SCHEDULES),
]
QUICK = {
    ("blockwise", Layout(pp=2, schedule="zero-bubble")),
    ("blockwise", Layout(pp=2, chunks=2)),
    ("delayed", Layout(pp=2)),
    ("delayed", Layout(pp=2, chunks=2, schedule="zero-bubble")),
}
STEPS = 2


@pytest.fixture(scope="module")
def one_process(pool_of_module):
    """What one process does, by recipe; run when first asked for."""
    runs = {}

    def run(name):
        if name not in runs:
            runs[name] = run_layout(pool_of_module, RECIPES[name], Layout(), STEPS)
        return runs[name]

    return run


def assert_same_bits(actual, expected):
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    assert actual.grads.keys() == expected.grads.keys()
    different = [name for name, grad in expected.grads.items() if not torch.equal(actual.grads[name], grad)]
    assert not different, f"gradients of {different}"
    different = [name for name, value in expected.weights.items() if not torch.equal(actual.weights[name], value)]
    assert not different, f"weights of {different}"


def cases():
    for name in RECIPES:
        for layout in LAYOUTS:
            slow = name != "fp32" and (name, layout) not in QUICK
            yield pytest.param(name, layout, marks=[pytest.mark.slow] * slow, id=f"{name}-{layout}")


@pytest.mark.parametrize(("name", "layout"), list(cases()))
def test_pipeline_has_the_bits_of_one_process(pool, one_process, name, layout):
    assert_same_bits(run_layout(pool, RECIPES[name], layout, STEPS), one_process(name))
