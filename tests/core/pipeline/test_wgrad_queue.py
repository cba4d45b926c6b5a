"""The queue of deferred weight gradients: order, bytes, limit; and a linear that leaves its gradient there."""

import gc
import weakref

import pytest
import torch

from megafp8.core.pipeline.wgrad_queue import WgradQueue
from megafp8.fp8 import DelayedScaling, Linear, get_recipe
from megafp8.params import GradSink, Init, ParamSpec
from megafp8.step import StepContext


def fill(queue, ran, tasks):
    for chunk, microbatch, size in tasks:
        queue.slot(chunk, microbatch).submit(lambda key=(chunk, microbatch): ran.append(key), size)


def test_tasks_wait_until_their_turn_and_run_in_order():
    queue, ran = WgradQueue(), []
    fill(queue, ran, [(0, 0, 10), (0, 0, 20), (0, 1, 30)])
    assert (ran, queue.held_bytes, queue.peak_bytes, len(queue)) == ([], 60, 60, 3)
    queue.run(0, 0)
    assert (ran, queue.held_bytes, queue.peak_bytes, len(queue)) == ([(0, 0), (0, 0)], 30, 60, 1)
    queue.run(0, 1)
    assert (queue.held_bytes, len(queue)) == (0, 0)
    queue.run(0, 2)  # nothing was deferred
    assert ran == [(0, 0), (0, 0), (0, 1)]


def test_out_of_order_is_noticed():
    queue, ran = WgradQueue(), []
    fill(queue, ran, [(0, 0, 1), (0, 1, 1)])
    with pytest.raises(AssertionError, match="out of order"):
        queue.run(0, 1)


@pytest.mark.parametrize("limit", [0, 25, 50, 1000])
def test_limit_runs_the_oldest_early(limit):
    queue, ran = WgradQueue(limit), []
    tasks = [(0, 0, 20), (0, 1, 20), (1, 0, 20), (1, 1, 20)]
    fill(queue, ran, tasks)
    assert len(queue) == min(4, limit // 20)
    assert ran == [(c, m) for c, m, _ in tasks][: 4 - len(queue)]
    assert queue.peak_bytes <= max(limit, 20)
    for chunk, microbatch, _ in tasks:
        queue.run(chunk, microbatch)
    assert ran == [(c, m) for c, m, _ in tasks]


class Sink(GradSink):
    def __init__(self, param):
        self.total, self.count = torch.zeros_like(param, dtype=torch.float32), 0

    def buffer(self, param):
        return self.total

    def ready(self, param):
        self.count += 1


RECIPES = {
    "none": None,
    "tensorwise": ("tensorwise", "hybrid"),
    "blockwise": ("blockwise", "e4m3"),
    "mxfp8": ("mxfp8", "e4m3"),
    "delayed": ("delayed", "hybrid"),
}


@pytest.mark.parametrize("requantize", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_deferred_gradient_is_the_same_and_holds_only_its_operands(name, requantize):
    """In FP8 the task holds dY and X in FP8 with their scales: neither the BF16 input nor a second orientation."""
    torch.manual_seed(0)
    recipe = RECIPES[name] and get_recipe(RECIPES[name][0], fp8_format=RECIPES[name][1])
    spec = ParamSpec("w", (64, 160), Init("normal", 0.1), True)
    linear = Linear(160, 64, False, recipe=recipe, weight_spec=spec, params_dtype=torch.bfloat16,
                    requantize_input=requantize)  # fmt: skip
    torch.nn.init.normal_(linear.weight, std=0.1)
    x, dy = torch.randn(96, 160).bfloat16(), torch.randn(96, 64).bfloat16()
    totals, grads = {}, {}
    for deferred in (False, True):
        sink, queue = Sink(linear.weight), WgradQueue()
        scaling = DelayedScaling.of(linear)
        step = StepContext(grads=sink, scaling=scaling, wgrads=queue.slot(0, 0) if deferred else None)
        leaf = x.clone().requires_grad_()
        source = leaf * 1  # not a leaf: nobody else keeps it
        y = linear(source, step)
        gone = weakref.ref(source)
        del source
        y.backward(dy)
        grads[deferred] = leaf.grad
        del y
        gc.collect()
        if deferred:
            assert not sink.total.any(), "it was not deferred"
            assert sink.count == 0
            assert len(queue) == 1
            if recipe is not None:
                assert gone() is None, "the task holds the input in high precision"
                scales = 96 * 160 / 8 + 96 * 64 / 8  # more than any recipe's scales
                assert 96 * (160 + 64) <= queue.held_bytes <= 96 * (160 + 64) + scales
            else:
                assert queue.held_bytes == 2 * 96 * (160 + 64)
            queue.run(0, 0)
        totals[deferred] = sink.total
        assert sink.count == 1
    assert torch.equal(totals[True], totals[False])
    assert totals[True].any()
    assert torch.equal(grads[True], grads[False])
