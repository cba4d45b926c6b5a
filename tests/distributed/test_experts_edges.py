"""One layer of experts over two ranks against the whole layer on one: few tokens, none, all to one rank; and faults."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megafp8.core.build import BuildContext, DispatchPlan
from megafp8.core.gpt import initialize
from megafp8.core.moe import exchange
from megafp8.core.moe.experts import Experts
from megafp8.core.moe.layer import MoELayer
from megafp8.core.transformer import recompute
from megafp8.core.transformer.core_attention import Sequences
from megafp8.fp8 import get_recipe
from megafp8.fp8.policy import Policy
from megafp8.optimizer.buffers import GradBuffers
from megafp8.parallel import Axis, ParallelContext
from megafp8.params import named_specs
from megafp8.step import StepContext
from tests.core.families import DEEPSEEK
from tests.core.helpers import Sink, relative_error
from tests.distributed.layouts import Layout, compare, run_layout
from tests.distributed.test_experts import FP8
from tests.distributed.test_families import EXPERTS

MODEL = replace(DEEPSEEK, hidden_size=64, moe_ffn_hidden_size=96, init_method_std=0.2)
CAPACITY = replace(MODEL, moe_expert_capacity_factor=0.5)
FILLED = replace(CAPACITY, moe_pad_expert_input_to_capacity=True)
FP8_EXPERTS = FP8 | {"fp8_recipe": "blockwise", "moe_fp8_dispatch": True}
# tokens of each rank
CASES = {"even": (24, 24), "one rank has none": (40, 0), "one token in all": (0, 1), "none at all": (0, 0)}


def run(layer, x, grad, recomputed: bool):
    """Output, input gradient, and FP32 gradients by name."""
    sink = Sink(layer)
    step, leaf = StepContext(grads=sink), x.clone().requires_grad_()
    sequences = Sequences(1, len(x))

    def part(x, step):
        return layer(x, sequences, step)

    y = recompute.recomputed(part, step, leaf) if recomputed else part(leaf, step)
    y.backward(grad)
    assert sorted(sink.calls) == sorted(sink.buffers), "each ready, once"
    return y.detach(), leaf.grad, {name: buffer - Sink.OFFSET for name, buffer in sink.buffers.items()}


def against_the_whole(model, tokens, recipe, plan, recomputed, to_one_rank):
    """On each rank: its tokens through half of the experts there, and through all of them here."""
    rank = dist.get_rank()
    axis = Axis(2, rank, dist.group.WORLD)
    parallel = ParallelContext(dp=axis, dp_cp=axis, ep=axis, ep_etp=axis, rank=rank, world_size=2)
    dtype = torch.bfloat16 if recipe else torch.float32
    recipe_of = Policy(recipe and get_recipe(recipe))
    layers = []
    for context in (parallel, ParallelContext()):
        layer = MoELayer(
            "layers.0.mlp", BuildContext(model, dtype, parallel=context, recipe_of=recipe_of, dispatch=plan)
        )
        initialize(layer, 5)
        if to_one_rank:
            layer.router.expert_bias[4:] = -10.0  # the second rank's
        layers.append(layer)
    generator = torch.Generator().manual_seed(rank)
    x, grad = (torch.randn(tokens[rank], model.hidden_size, generator=generator).to(dtype) for _ in range(2))
    y, dx, grads = run(layers[0], x, grad, recomputed)
    whole = run(layers[1], x, grad, recomputed)
    for name, expected in whole[2].items():
        if "experts" in name and "shared" not in name:
            dist.all_reduce(expected)
    bound = 1e-5 if recipe is None else 0.2  # tiles and tensors of both ranks' rows together
    errors = {"y": relative_error(y, whole[0]), "dx": relative_error(dx, whole[1])}
    errors |= {name: relative_error(value, whole[2][name]) for name, value in grads.items() if value.numel()}
    assert max(errors.values()) < bound, errors
    own = {spec.name for spec, _ in named_specs(layers[0]) if spec.expert}
    return {"own": own, "idle": all(not grads[name].any() for name in own), "x": bool(dx.any()) or not len(dx)}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("gathers", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("recipe", [None, "blockwise", pytest.param("tensorwise", marks=SLOW)])
def test_all_tokens_to_one_rank(pool, recipe, gathers):
    """CASES 11, 37: nothing hangs; the idle rank's gradients are zeros."""
    plan = DispatchPlan(gathers=gathers, fp8_tokens=recipe == "blockwise", overlaps_shared=True)
    for recomputed in (False, True):
        first, second = pool.run_on(2, against_the_whole, MODEL, (24, 24), recipe, plan, recomputed, True)
        assert second["idle"]
        assert not first["idle"]
        assert not first["own"] & second["own"]
        assert first["x"]
        assert second["x"]


@pytest.mark.parametrize("tokens", CASES.values(), ids=CASES)
@pytest.mark.parametrize("recipe", ["mxfp8", pytest.param(None, marks=SLOW)])
def test_few_tokens(pool, recipe, tokens):
    plan = DispatchPlan(fp8_tokens=recipe is not None)
    for result in pool.run_on(2, against_the_whole, MODEL, tokens, recipe, plan, False, False):
        assert result["x"]


@pytest.mark.parametrize("model", [CAPACITY, FILLED], ids=["dropped", "filled up"])
@pytest.mark.parametrize("gathers", [False, pytest.param(True, marks=SLOW)])
def test_capacity(pool, model, gathers):
    """Choices that are dropped don't travel; an expert is filled up to the capacity of each rank's tokens."""
    plan = DispatchPlan(gathers=gathers)
    pool.run_on(2, against_the_whole, model, (24, 24), None, plan, False, False)


def lose_a_row(stack: ExitStack) -> None:
    take = exchange.take_rows

    def losing(x, index, spec, *rest, **options):
        index = index.clone()
        index[-1:] = -1  # of a token whose loss counts
        return take(x, index, spec, *rest, **options)

    stack.callback(setattr, exchange, "take_rows", take)
    exchange.take_rows = losing


def average_experts(stack: ExitStack) -> None:
    finish = GradBuffers.finish

    def halving(self):
        finish(self)
        for layout, flat in zip(self.layouts, self.state.flats, strict=True):
            if layout.expert:
                flat.div_(2)

    stack.callback(setattr, GradBuffers, "finish", finish)
    GradBuffers.finish = halving


def ask_for_values(stack: ExitStack) -> None:
    """Experts quantize the gradients of their outputs themselves, from rows in high precision."""
    stack.callback(setattr, Experts, "gradient_spec", Experts.gradient_spec)
    Experts.gradient_spec = lambda self, rows, step: None


@pytest.mark.parametrize("combine", [False, True])
def test_gradients_quantized_as_they_are_spread(pool, combine):
    """Or afterwards: the same bits, from BF16 rows and from rows that came as bytes."""
    model = FP8_EXPERTS | {"moe_fp8_combine_grad": combine}
    on, off = (run_layout(pool, model, Layout(dp=2, ep=2), 1, fault=fault) for fault in (None, ask_for_values))
    assert on.losses == off.losses
    for name, grad in off.grads.items():
        assert torch.equal(on.grads[name], grad), name


@pytest.mark.parametrize("fault", [lose_a_row, average_experts])
def test_faults_are_found(pool, fault):
    """CASES 01: a lost token, and gradients averaged once more over the experts' ranks."""
    expected = run_layout(pool, EXPERTS, Layout(), 1)
    compare(run_layout(pool, EXPERTS, Layout(dp=2, ep=2), 1), expected)
    with pytest.raises(AssertionError):
        compare(run_layout(pool, EXPERTS, Layout(dp=2, ep=2), 1, fault=fault), expected)


def norm_of(values, layout, squares):
    """The gradient norm, and the clipped dense weights, of gradients that only the experts have."""
    from megafp8.core.gpt import build_model
    from megafp8.optimizer import build_optimizer
    from megafp8.parallel import build_parallel
    from megafp8.params import specs_in_order
    from tests.distributed.layouts import make_config

    config = make_config(values, layout)
    parallel = build_parallel(config, "cpu")
    model = build_model(config, parallel, "cpu")
    optimizer = build_optimizer(specs_in_order(model), config, parallel)
    optimizer.zero_grad(1)
    weight = next(param for spec, param in named_specs(model) if spec.expert)
    optimizer.grads.buffer(weight).view(-1)[0] = squares[parallel.ep.rank] ** 0.5
    optimizer.reduce_gradients()
    stats = optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=1)
    dense = next(param for spec, param in named_specs(model) if not spec.expert)
    return stats.grad_norm.item(), dense.detach().clone()


@pytest.mark.parametrize("sharded", [False, True])
def test_the_norm_is_that_of_all_experts(pool, sharded):
    """CASES 02: sqrt(20 + 100) on both ranks, and the same dense weights after it."""
    values = EXPERTS | {"use_distributed_optimizer": sharded}
    (first, a), (second, b) = pool.run_on(2, norm_of, values, Layout(dp=2, ep=2), (20.0, 100.0))
    assert first == second == pytest.approx(120**0.5, rel=1e-6)
    assert torch.equal(a, b)


def save_all(directory, model, optimizer, parallel) -> None:
    from megafp8.checkpoint import save_checkpoint

    save_checkpoint(directory, 2, optimizer.weights.state() | optimizer.state(), {}, parallel=parallel)


def test_checkpoints_of_other_layouts(pool, tmp_path):
    """Saved by four ranks of experts, loaded by one process, and the other way round."""
    spread, alone = Layout(dp=2, tp=2, sp=True, ep=4, etp=1), Layout()
    model = {name: value for name, value in EXPERTS.items() if name != "moe_router_enable_expert_bias"}
    model = {name: value for name, value in model.items() if name != "moe_router_bias_update_rate"}
    for number, (first, second) in enumerate(((spread, alone), (alone, spread))):
        directory = str(tmp_path / str(number))
        run_layout(pool, model, first, 2, observe=partial(save_all, directory))
        expected = run_layout(pool, model, first, 1, load=directory)
        compare(run_layout(pool, model, second, 1, load=directory), expected)
