"""FP8 under tensor and sequence parallelism, whole model: operands, gradients, delayed scaling's histories."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import Tensor

from megafp8.fp8 import DelayedScaling, Linear, gemm
from megafp8.fp8.comm import CommPlan
from megafp8.params import named_specs
from tests.cases import quick
from tests.distributed.layouts import LLAMA, Layout, assemble, distance, run_layout, train
from tests.distributed.recorder import record

# 48 tokens a rank: 1 x 128 tiles of columns lie across ranks.
MODEL = LLAMA | {
    "num_layers": 1,
    "hidden_size": 256,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 48,
    "global_batch_size": 4,
    "bf16": True,
}
RECIPES = {
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4},
}
NEAR = RECIPES | {"bf16": {}}
SP = Layout(tp=2, sp=True)

_seen: dict[str, object] = {}


def keep_operands(stack: ExitStack) -> None:
    """Keeps what the first fprop (layer 0's qkv) and the last wgrad (the same) of the first step were given."""
    _seen.clear()

    def fprop(original):
        def call(x, weight, *args, **options):
            _seen.setdefault("fprop", x)
            return original(x, weight, *args, **options)

        return call

    def wgrad(original):
        def call(dy, x, *args, **options):
            _seen["wgrad"] = x
            return original(dy, x, *args, **options)

        return call

    for name, make in (("fprop", fprop), ("wgrad", wgrad)):
        stack.enter_context(mock.patch.object(gemm, name, make(getattr(gemm, name))))


def raw(x: Tensor) -> Tensor:
    return (x.view(torch.uint8) if x.element_size() == 1 else x).clone()


def operands(model, optimizer, parallel) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (raw(storage.data), raw(storage.scale_inv)) for name, storage in _seen.items()}


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_first_input_is_that_of_one_process_bitwise(pool, name):
    """Layer 0's qkv input at step 1, both orientations; wgrad's is gathered again from what the ranks kept."""
    model = MODEL | RECIPES[name] | {"micro_batch_size": 4}
    options = {"fault": keep_operands, "observe": operands}
    (expected,) = run_layout(pool, model, Layout(), 1, **options).extra
    for actual in run_layout(pool, model, SP, 1, **options).extra:
        for gemm_name, tensors in expected.items():
            for a, b in zip(actual[gemm_name], tensors, strict=True):
                assert torch.equal(a, b), gemm_name


def weight_operands(model, optimizer, parallel) -> dict[str, dict]:
    """Bytes and scales of every FP8 weight as parts of the whole, in weights' rows and columns or in tiles of them."""
    specs = {id(param): spec for spec, param in named_specs(model)}
    data, scales = {}, {}
    for linear in (m for m in model.modules() if isinstance(m, Linear) and m.recipe is not None):
        spec, storage = specs[id(linear.weight)], linear.weight.owner.operand("fprop")
        data[spec.name] = (spec.box, spec.shape, raw(storage.data).view(spec.box_shape).float())
        tile, grid = storage.tile, raw(storage.scale_inv).float()
        if tile.kind == "tensor":
            scales[spec.name] = (((0, 1),), (1,), grid)
        else:
            each = (1,) * (len(spec.shape) - 2) + (tile.block,) * 2
            box = tuple((a // n, b // n) for (a, b), n in zip(spec.box, each, strict=True))
            shape = tuple(size // n for size, n in zip(spec.shape, each, strict=True))
            scales[spec.name] = (box, shape, grid.reshape([b - a for a, b in box]))
    return {"data": data, "scales": scales}


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_weights_are_those_of_one_process_bitwise(pool, name):
    model = MODEL | RECIPES[name]
    runs = [run_layout(pool, model, layout, 0, observe=weight_operands).extra for layout in (Layout(), SP)]
    for what in ("data", "scales"):
        expected, actual = (assemble([rank[what] for rank in run]) for run in runs)
        assert len(expected) == 4
        for weight, tensor in expected.items():
            assert torch.equal(actual[weight], tensor), (what, weight)


@pytest.fixture(scope="module")
def one_process(pool_of_module):
    return {name: run_layout(pool_of_module, MODEL | recipe, Layout(), 2) for name, recipe in NEAR.items()}


TP, BOTH = Layout(tp=2), Layout(tp=2, sp=True, dp=2, overlap=True)
QUICK = {*((name, SP) for name in NEAR), ("tensorwise", TP), ("blockwise", BOTH), ("delayed", BOTH)}


@pytest.mark.parametrize(
    ("name", "layout"),
    quick([(n, x) for n in NEAR for x in (SP, TP, BOTH)], QUICK, id=lambda case: f"{case[0]}-{case[1]}"),
)
def test_gradients_are_near_those_of_one_process(pool, one_process, name, layout):
    expected, actual = one_process[name], run_layout(pool, MODEL | NEAR[name], layout, 2)
    for parameter, grad in expected.grads.items():
        assert distance(actual.grads[parameter], grad) <= (0.1 if NEAR[name] else 0.02), parameter
    for a, b in zip(actual.losses + actual.norms, expected.losses + expected.norms, strict=True):
        assert abs(a - b) <= 1e-2 * abs(b)


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_cuts_through_tiles_train_as_one_process(pool, name):
    """A model of which no linear is cut between tiles, fc1's two parts included."""
    values = LLAMA | RECIPES[name] | {"bf16": True, "global_batch_size": 4}
    expected, actual = (run_layout(pool, values, layout, 2) for layout in (Layout(), Layout(tp=4, sp=True)))
    for parameter, grad in expected.grads.items():
        assert distance(actual.grads[parameter], grad) <= 0.1, parameter
    for a, b in zip(actual.losses + actual.norms, expected.losses + expected.norms, strict=True):
        assert abs(a - b) <= 1e-2 * abs(b)


def gather_in_high_precision(stack: ExitStack) -> None:
    for name in ("input_in_fp8", "grad_output_in_fp8"):
        stack.enter_context(mock.patch.object(CommPlan, name, return_value=False))


@pytest.mark.parametrize("name", quick(RECIPES, {"blockwise", "delayed"}))
def test_fp8_gather_on_equals_off_bitwise(pool, name):
    """Losses, norms, every main_grad and every weight after two steps."""
    on = run_layout(pool, MODEL | RECIPES[name], SP, 2)
    off = run_layout(pool, MODEL | RECIPES[name], SP, 2, fault=gather_in_high_precision)
    assert (on.losses, on.norms) == (off.losses, off.norms)
    for a, b in ((on.grads, off.grads), (on.weights, off.weights)):
        assert all(torch.equal(a[parameter], b[parameter]) for parameter in a)


AGAIN = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
}


@pytest.mark.parametrize(
    ("name", "what"),
    quick(
        [(name, what) for name in ("blockwise", "tensorwise") for what in AGAIN],
        {("blockwise", "full"), ("tensorwise", "selective")},
    ),
)
def test_recompute_changes_no_bit(pool, name, what):
    plain, again = (run_layout(pool, MODEL | RECIPES[name] | extra, SP, 2) for extra in ({}, AGAIN[what]))
    assert plain.losses == again.losses
    assert all(torch.equal(plain.weights[parameter], again.weights[parameter]) for parameter in plain.weights)


_scaling: list[DelayedScaling] = []


def keep_scaling(stack: ExitStack) -> None:
    _scaling.clear()
    original = DelayedScaling.advance
    stack.enter_context(
        mock.patch.object(DelayedScaling, "advance", lambda self: (_scaling.append(self), original(self)))
    )


def scaling_state(model, optimizer, parallel) -> dict[str, Tensor]:
    return {name: item.tensor for name, item in _scaling[-1].state().items()}


@pytest.mark.parametrize("layout", quick([SP, Layout(dp=2), Layout(tp=2, dp=2)], {Layout(tp=2, dp=2)}, id=str))
def test_delayed_histories_are_shared(pool, layout):
    """Every rank has the same amaxes and scales; they are about one process's, whose FP8 rounds other sums."""
    model, options = MODEL | RECIPES["delayed"], {"fault": keep_scaling, "observe": scaling_state}
    (expected,) = run_layout(pool, model, Layout(), 3, **options).extra
    first, *others = run_layout(pool, model, layout, 3, **options).extra
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())
    assert first.keys() == expected.keys()
    for name, tensor in expected.items():
        assert distance(first[name], tensor) <= (1e-3 if "weight" in name else 0.1), name


def small_maxima(model: dict, layout: Layout, steps: int) -> list[int]:
    """Numbers of elements of the max all-reduces of `steps` steps, in order."""
    with record() as log:
        train(model, layout, steps)
    return [m.shape[0] for m in log.messages if m.kind == "max" and m.dtype == torch.float32]


def test_amaxes_of_weights_travel_together(pool):
    """After a step, those of all four weights in one message; with a history, all amaxes in one message a step."""
    first, both = (pool.run_on(2, small_maxima, MODEL | RECIPES["tensorwise"], SP, steps)[0] for steps in (1, 2))
    assert first.count(4) == 1
    assert both.count(4) == 2
    assert len(both) - len(first) == len(first) - 4  # in the first step each weight was asked for alone
    delayed = pool.run_on(2, small_maxima, MODEL | RECIPES["delayed"] | {"micro_batch_size": 4}, Layout(tp=2), 2)[0]
    softmax = MODEL["seq_length"] * 4
    after_first = delayed[delayed.index(12) + 1 :]
    assert [n for n in after_first if n != softmax] == [12]
