"""The comparison with one process notices each fault that it is there for: here they are planted one by one."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch

from megafp8.core.tensor_parallel import cross_entropy, embedding
from megafp8.fp8.comm import CommPlan
from megafp8.optimizer.buffers import GradBuffers
from megafp8.parallel import DONE, Axis
from tests.distributed import layouts
from tests.distributed.layouts import LLAMA, Layout, compare, run_layout

TP, SP, DP = Layout(tp=2), Layout(tp=2, sp=True), Layout(dp=2)
SMALL = LLAMA | {"num_layers": 1}


@pytest.fixture(scope="module")
def expected(pool_of_module):
    return run_layout(pool_of_module, SMALL, Layout(), 2)


def patch(stack: ExitStack, owner, name: str, make) -> None:
    stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))


def linear_output_not_summed(stack):
    patch(stack, CommPlan, "_post_sum", lambda original: lambda self, y: lambda: y)


def linear_output_summed_twice(stack):
    patch(stack, CommPlan, "_post_sum", lambda original: lambda self, y: original(self, original(self, y)()))


def only_gradients_of_inputs_not_summed(stack):
    patch(stack, CommPlan, "post_dgrad", lambda original: lambda self, dy, multiply: partial(multiply, dy))


def shards_gathered_in_wrong_order(stack):
    def make(original):
        def post_gather(self, x):
            out, pending = original(self, x)
            pending.wait()
            return out.view(torch.uint8).roll(x.shape[0], 0).view(out.dtype) if x.dim() > 1 else out, DONE

        return post_gather

    patch(stack, Axis, "post_gather", make)


def shards_scattered_in_wrong_order(stack):
    def make(original):
        return lambda self, out, x: original(self, out, x.roll(len(x) // self.size, 0))

    patch(stack, Axis, "post_scatter_sum_into", make)


def partial_gradients_not_summed(stack):
    patch(stack, GradBuffers, "sum_partial", lambda original: lambda *_: None)


def partial_gradients_summed_twice(stack):
    patch(stack, GradBuffers, "sum_partial", lambda original: lambda *args: (original(*args), original(*args)))


def replicas_not_summed(stack):
    patch(stack, GradBuffers, "_launch", lambda original: lambda *_: None)


def replicas_summed_twice(stack):
    patch(stack, GradBuffers, "_launch", lambda original: lambda *args: (original(*args), original(*args)))


def replicas_summed_after_the_first_microbatch(stack):
    def make(original):
        def ready(self, param):
            original(self, param)
            if self.ready_count(param.spec.name) == 1:
                Axis(2, 0, torch.distributed.group.WORLD).sum_(self.buffer(param))

        return ready

    patch(stack, GradBuffers, "ready", make)


def replicas_see_the_same_samples(stack):
    def make(original):
        def micro_batches(config, parallel, iteration):
            return original(config, mock.Mock(dp=Axis(parallel.dp.size, 0)), iteration)

        return micro_batches

    patch(stack, layouts, "micro_batches", make)


def embedding_parts_not_summed(stack):
    patch(stack, embedding, "sum_over", lambda original: lambda x, axis, scatter: x)


def softmax_of_own_columns_only(stack):
    patch(stack, cross_entropy, "_log_sum_exp", lambda original: lambda x, columns, tp: original(x, columns, Axis()))


FAULTS = [
    (linear_output_not_summed, TP),
    (linear_output_summed_twice, TP),
    (only_gradients_of_inputs_not_summed, TP),
    (shards_gathered_in_wrong_order, SP),
    (shards_scattered_in_wrong_order, SP),
    (partial_gradients_not_summed, SP),
    (partial_gradients_not_summed, TP),  # query and key norms
    (partial_gradients_summed_twice, SP),
    (replicas_not_summed, DP),
    (replicas_summed_twice, DP),
    (replicas_summed_after_the_first_microbatch, DP),
    (replicas_see_the_same_samples, DP),
    (embedding_parts_not_summed, TP),
    (softmax_of_own_columns_only, TP),
]


@pytest.mark.parametrize("layout", [TP, SP, DP], ids=str)
def test_without_a_fault_all_is_well(pool, expected, layout):
    compare(run_layout(pool, SMALL, layout, 2), expected)


@pytest.mark.parametrize(("fault", "layout"), FAULTS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_planted_fault_is_noticed(pool, expected, fault, layout):
    with pytest.raises(AssertionError):
        compare(run_layout(pool, SMALL, layout, 2, fault=fault), expected)
