"""Every layout equals one process (FP32, gradient accumulation), at random initialization and in a trained model."""

from functools import partial

import pytest

from megafp8.checkpoint import save_checkpoint
from tests.cases import quick
from tests.distributed.layouts import GPT2, LLAMA, Layout, compare, run_layout

MODELS = {"llama": LLAMA, "gpt2": GPT2}
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, sp=True),
    Layout(tp=4),
    Layout(dp=2),
    Layout(tp=2, dp=2),
    Layout(tp=2, sp=True, dp=2),
    Layout(tp=4, sp=True, overlap=True),
]


@pytest.fixture(scope="module")
def fresh(pool_of_module):
    """One process, from the start: name -> Run."""
    return {name: run_layout(pool_of_module, model, Layout()) for name, model in MODELS.items()}


QUICK = {
    *(("llama", layout) for layout in LAYOUTS[1:] if layout not in (Layout(tp=4), Layout(tp=2, dp=2))),
    *(("gpt2", layout) for layout in (Layout(tp=4), Layout(tp=2, dp=2))),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    quick([(n, x) for n in MODELS for x in LAYOUTS], QUICK, id=lambda case: f"{case[0]}-{case[1]}"),
)
def test_layout_equals_one_process(pool, fresh, name, layout):
    """CASES 14, 18, 82: norms see a part of the tokens, samples have 0 to all valid tokens, the vocabulary is 101."""
    compare(run_layout(pool, MODELS[name], layout), fresh[name])


def save_to(directory: str, model, optimizer, parallel) -> None:
    save_checkpoint(directory, 50, optimizer.weights.state() | optimizer.state(), {}, parallel=parallel)


@pytest.fixture(scope="module")
def trained(pool_of_module, tmp_path_factory):
    """One process, trained for 50 steps and saved: (directory, Run of the next 5 steps)."""
    directory = str(tmp_path_factory.mktemp("trained"))
    fast = LLAMA | {"lr": 3e-3, "min_lr": 3e-3}
    run = run_layout(pool_of_module, fast, Layout(), 50, observe=partial(save_to, directory))
    assert run.losses[-1] < 0.8 * run.losses[0]
    return directory, run_layout(pool_of_module, LLAMA, Layout(), 5, load=directory)


@pytest.mark.parametrize("layout", quick(LAYOUTS, {Layout(tp=2, sp=True, dp=2)}, id=str))
def test_layout_equals_one_process_after_50_steps(pool, trained, layout):
    directory, expected = trained
    compare(run_layout(pool, LLAMA, layout, 5, load=directory), expected)


def test_microbatch_size_changes_nothing(pool, fresh):
    """CASES 18: a sample without a valid token, alone in its micro-batch on its rank, weighs nothing."""
    small = LLAMA | {"micro_batch_size": 1}
    for layout in (Layout(), Layout(dp=2), Layout(dp=4)):
        compare(run_layout(pool, small, layout), fresh["llama"])
