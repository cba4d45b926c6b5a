"""Expert parallelism equals one process: gradients, norms, counts, bias updates, losses, in every layout."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch

from megafp8.checkpoint import save_checkpoint
from megafp8.core.moe.exchange import joined_bytes
from megafp8.parallel import Axis
from tests.distributed.layouts import Layout, Run, assemble, compare, distance, run_layout, train
from tests.distributed.test_families import EXPERTS, STEPS, biases

LAYOUTS = [
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=4),
    Layout(tp=2, sp=True, ep=2, etp=1),
    Layout(tp=2, sp=True, dp=2, ep=2),
    Layout(pp=2, dp=2, ep=2),
    Layout(dp=4, ep=4, dispatcher="allgather"),
]
MORE = [
    Layout(dp=4, ep=2),
    Layout(tp=2, sp=True, etp=1),
    Layout(dp=2, etp=2),
    Layout(tp=2, sp=True, dp=2, ep=2, etp=1),
    Layout(cp=2, ep=2),
    Layout(tp=2, sp=True, dp=2, ep=2, dispatcher="allgather"),
]


def some_slow(few, more) -> list:
    return [*few, *(pytest.param(case, marks=pytest.mark.slow) for case in more)]


@pytest.fixture(scope="module")
def alone(pool_of_module):
    return run_layout(pool_of_module, EXPERTS, Layout(), STEPS, observe=biases)


@pytest.mark.parametrize("layout", some_slow(LAYOUTS, MORE), ids=str)
def test_layout_equals_one_process(pool, alone, layout):
    """CASES 01, 02, 14, 54."""
    run = run_layout(pool, EXPERTS, layout, STEPS, observe=biases)
    compare(run, alone)
    for rank in run.extra:
        assert all(torch.equal(bias, alone.extra[0][router]) for router, bias in rank.items())


@pytest.mark.slow
def test_the_gate_of_shared_experts_sees_all_ranks_tokens(pool):
    """CASES 14: each rank's gradient is of its own tokens."""
    model = EXPERTS | {"moe_shared_expert_gate": True}
    run = run_layout(pool, model, Layout(tp=2, sp=True, ep=2, etp=1))
    compare(run, run_layout(pool, model, Layout()))


def save_to(directory: str, model, optimizer, parallel) -> None:
    items = optimizer.weights.state() | optimizer.state()
    save_checkpoint(directory, 40, items, {}, parallel=parallel)


@pytest.fixture(scope="module")
def trained(pool_of_module, tmp_path_factory):
    """One process, trained for 40 steps and saved: (directory, Run of the next 5 steps)."""
    directory, model = str(tmp_path_factory.mktemp("trained")), EXPERTS | {"lr": 3e-3, "min_lr": 3e-3}
    run = run_layout(pool_of_module, model, Layout(), 40, observe=partial(save_to, directory))
    assert run.losses[-1] < 0.9 * run.losses[0]
    return directory, run_layout(pool_of_module, EXPERTS, Layout(), 5, load=directory, observe=biases)


@pytest.mark.parametrize("layout", some_slow(LAYOUTS[:1], LAYOUTS[1:4]), ids=str)
def test_layout_equals_one_process_after_40_steps(pool, trained, layout):
    directory, expected = trained
    run = run_layout(pool, EXPERTS, layout, 5, load=directory, observe=biases)
    compare(run, expected)
    for rank in run.extra:
        assert all(torch.equal(bias, expected.extra[0][router]) for router, bias in rank.items())


FP8 = EXPERTS | {
    "bf16": True,
    "fp8_format": "e4m3",
    "moe_ffn_hidden_size": 96,
    "global_batch_size": 4,
    "moe_layer_freq": "1",
    "num_layers": 1,
    "micro_batch_size": 1,
}


def bytes_sent(stack) -> dict[str, int]:
    """Counts what the experts' ranks deal, by dtype, on this rank."""
    sent: dict[str, int] = {}
    deal = Axis.post_deal

    def counting(self, x, out, received):
        sent[str(x.dtype)] = sent.get(str(x.dtype), 0) + x.nbytes
        return deal(self, x, out, received)

    stack.callback(setattr, Axis, "post_deal", deal)
    Axis.post_deal = counting
    return sent


def traffic(values, layout, steps):
    """(Run, bytes) of a rank."""
    with ExitStack() as stack:
        sent = bytes_sent(stack)
        return train(values, layout, steps), sent


@pytest.mark.parametrize("dispatcher", some_slow(["alltoall"], ["allgather"]))
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_fp8_dispatch_changes_no_bit(pool, recipe, dispatcher):
    """CASES 37: gradients, wgrad included, losses and weights; and fewer bytes, all counted."""
    layout, model = Layout(dp=2, ep=2, dispatcher=dispatcher), FP8 | {"fp8_recipe": recipe}
    runs = {on: pool.run_on(2, traffic, model | {"moe_fp8_dispatch": on}, layout, 2) for on in (False, True)}
    for (off, sent), (on, fewer) in zip(runs[False], runs[True], strict=True):
        assert off.losses == on.losses
        assert off.norms == on.norms
        for name, (_, _, grad) in off.grads.items():
            assert torch.equal(grad, on.grads[name][2]), name
        for name, (_, _, weight) in off.weights.items():
            assert torch.equal(weight, on.weights[name][2]), name
        assert any(grad.abs().sum() > 0 for name, (_, _, grad) in off.grads.items() if "experts" in name)
        if dispatcher == "alltoall":
            hidden, scales = 64, 4 if recipe == "blockwise" else 2
            rows = 2 * 2 * 16 * 2  # steps x samples x tokens x top-2
            wide, narrow = joined_bytes(2 * hidden), joined_bytes(hidden + scales)  # a byte a value, and its scales
            assert sent["torch.uint8"] - fewer["torch.uint8"] == rows * (wide - narrow)
            assert sent["torch.bfloat16"] == fewer["torch.bfloat16"]
    if dispatcher == "alltoall":  # of both ranks, forward and backward: there, with a token's weights, and back
        assert sum(sent["torch.uint8"] for _, sent in runs[False]) == 2 * 2 * rows * wide
        assert sum(sent["torch.bfloat16"] for _, sent in runs[False]) == 2 * 2 * rows * hidden * 2


def test_fp8_gradients_of_outputs_stay_near(pool):
    """`--moe-fp8-combine-grad` rounds once more, and sends a byte a value."""
    model = FP8 | {"fp8_recipe": "blockwise", "moe_fp8_dispatch": True}
    layout = Layout(dp=2, ep=2)
    off = pool.run_on(2, traffic, model, layout, 1)
    on = pool.run_on(2, traffic, model | {"moe_fp8_combine_grad": True}, layout, 1)
    for (plain, sent), (rounded, fewer) in zip(off, on, strict=True):
        assert plain.losses == rounded.losses
        for name, (_, _, grad) in plain.grads.items():
            assert distance(rounded.grads[name][2], grad) < 0.05, name
        rows = (sent["torch.bfloat16"] - fewer["torch.bfloat16"]) // (2 * 64)
        assert fewer["torch.uint8"] - sent["torch.uint8"] == rows * (64 + 4)
        assert rows == 2 * 16 * 2


SHARED = {"moe_shared_expert_overlap": True}
CHANGES = {
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "recomputed experts": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    "overlap": SHARED,
    "overlap, recomputed": SHARED | {"recompute_granularity": "selective", "recompute_modules": ("shared_experts",)},
    "buckets": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "primary": {"use_distributed_optimizer": True, "fp8_param_gather": True},
    "zero-bubble": {"pipeline_schedule": "zero-bubble"},
}


@pytest.fixture(scope="module")
def plain(pool_of_module):
    """Of each layout: the run of every rank."""
    model = FP8 | {"moe_fp8_dispatch": True, "num_layers": 2}
    layouts = (Layout(dp=2, ep=2), Layout(dp=2, ep=2, pp=2))
    return {layout: pool_of_module.run_on(layout.world, train, model, layout, 2) for layout in layouts}


@pytest.mark.parametrize("name", some_slow(list(CHANGES)[::2], list(CHANGES)[1::2]))
def test_changes_no_bit(pool, plain, name):
    """CASES 22, 23: the same tokens to the same experts again; nothing depends on what else goes on."""
    layout = Layout(dp=2, ep=2, pp=2 if name == "zero-bubble" else 1)
    schedule = CHANGES[name].get("pipeline_schedule")
    changed = replace(layout, schedule=schedule) if schedule else layout
    model = FP8 | {"moe_fp8_dispatch": True, "num_layers": 2} | CHANGES[name]
    runs = pool.run_on(layout.world, train, model, changed, 2)
    for before, after in zip(plain[layout], runs, strict=True):
        assert before.losses == after.losses
        assert before.norms == after.norms
    if not model.get("use_distributed_optimizer"):
        pairs = zip(plain[layout], runs, strict=True)
    else:  # shards are put together
        pairs = [(Run(grads=whole(plain[layout], "grads")), Run(grads=whole(runs, "grads")))]
    for before, after in pairs:
        for key, part in before.grads.items():
            assert torch.equal(part[2], after.grads[key][2]), key


def whole(runs: list[Run], what: str) -> dict:
    return {name: ((), (), value) for name, value in assemble([getattr(run, what) for run in runs]).items()}


def test_one_expert_in_high_precision(pool):
    """Of four, on the second rank: all ranks send alike, and know the name that the pattern matches."""
    model = FP8 | {"num_experts": 4, "keep_modules_in_bf16": ("layers.0.mlp.experts.3.*",), "moe_fp8_dispatch": True}
    expected = run_layout(pool, model | {"moe_fp8_dispatch": False}, Layout(), 2)
    actual = run_layout(pool, model, Layout(dp=2, ep=2), 2)
    assert actual.losses == pytest.approx(expected.losses, rel=2e-3)
    for expert in (2, 3):
        name = f"layers.0.mlp.experts.{expert}.fc1.weight"
        assert distance(actual.grads[name], expected.grads[name]) < 0.2, name


@pytest.mark.parametrize("recipe", some_slow(["delayed"], ["tensorwise"]))
def test_one_scale_a_tensor(pool, recipe):
    """Each expert's own, over the ranks that hold it; near one process, as scales see other rows together."""
    model = FP8 | {"fp8_format": "hybrid", "fp8_recipe": recipe, "num_experts": 4}
    expected = run_layout(pool, model, Layout(), 2)
    actual = run_layout(pool, model, Layout(dp=2, ep=2), 2)
    assert actual.losses == pytest.approx(expected.losses, rel=2e-3)
    for name in ("layers.0.mlp.experts.3.fc1.weight", "layers.0.mlp.router.weight"):
        assert distance(actual.grads[name], expected.grads[name]) < 0.2, name
