"""Planted faults of pipelines and context parallelism make the comparison with one process fail; and a stage that dies
is named."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megafp8.core import context_parallel
from megafp8.core.pipeline import executor, p2p
from megafp8.core.pipeline.executor import Executor
from megafp8.core.pipeline.p2p import Links
from megafp8.core.pipeline.wgrad_queue import WgradQueue
from megafp8.core.transformer import core_attention
from megafp8.optimizer.stages import StageNames
from megafp8.parallel import Axis
from tests.distributed.layouts import Layout, compare, run_layout, train
from tests.distributed.test_pipeline import DEEP
from tests.distributed.test_pipeline_layouts import TIED

PP, ZERO, CHUNKS = Layout(pp=2), Layout(pp=2, schedule="zero-bubble"), Layout(pp=2, chunks=2)
CP, RING = Layout(cp=2), Layout(cp=2, ring=True)
UNTIED = DEEP | {"global_batch_size": 6}
SHARED = TIED | {"global_batch_size": 6}


@pytest.fixture(scope="module")
def expected(pool_of_module):
    return {name: run_layout(pool_of_module, values, Layout(), 1) for name, values in VALUES.items()}


VALUES = {"untied": UNTIED, "tied": SHARED}


def patch(stack, owner, name, make):
    stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))


def microbatches_swapped(stack):
    """The second stage takes microbatch 1's hidden states for microbatch 0's, and the other way round."""

    def make(original):
        def tag(self, microbatches):
            number = {0: 1, 1: 0}.get(self.microbatch, self.microbatch)
            swapped = self.forward and torch.distributed.get_rank() == 0
            return original(p2p.Message(self.forward, self.stage, number) if swapped else self, microbatches)

        return tag

    patch(stack, p2p.Message, "tag", make)


def stages_gradient_twice(stack):
    def make(original):
        def backward(outputs, grads):
            return original(outputs, tuple(2 * grad for grad in grads) if torch.distributed.get_rank() == 0 else grads)

        return backward

    patch(stack, executor.torch.autograd, "backward", make)


def chunks_mixed(stack):
    """Interleaved: messages of different chunks under one tag."""
    patch(
        stack,
        p2p.Message,
        "tag",
        lambda original: lambda self, m: original(p2p.Message(self.forward, self.stage % 2, self.microbatch), m),
    )
    # Of the same microbatch, the first chunk's hidden states are sent before the second's, but awaited last.
    patch(stack, Executor, "_post", lambda original: lambda self, receives: original(self, ()))

    def make(original):
        def receive(self, action):
            message = executor.awaited(self.schedule, self.rank, action)
            if message is None:
                return None
            fake = torch.zeros(self.states.shape(action.microbatch), dtype=self.states.dtype)
            real = self.links.post_receive(message, torch.empty_like(fake))()
            return fake if action.chunk == 0 and action.kind.value == "F" and action.microbatch == 0 else real

        return receive

    patch(stack, Executor, "_receive", make)


def deferred_gradients_dropped(stack):
    def make(original):
        def run(self):
            self._tasks.popleft()

        return run

    patch(stack, WgradQueue, "_run_oldest", make)


def deferred_gradients_run_twice(stack):
    def make(original):
        def run(self):
            with torch.no_grad():
                self._tasks[0].run()
            original(self)

        return run

    patch(stack, WgradQueue, "_run_oldest", make)


def hidden_states_in_another_order(stack):
    patch(
        stack, Links, "send", lambda original: lambda self, message, x, *more: original(self, message, x.flip(0), *more)
    )


def tied_gradients_not_summed(stack):
    patch(stack, StageNames, "sum_shared", lambda original: lambda self, views: None)


def tied_gradients_summed_twice(stack):
    patch(stack, StageNames, "sum_shared", lambda original: lambda *args: (original(*args), original(*args)))


def tied_weight_counted_twice(stack):
    stack.enter_context(mock.patch.object(StageNames, "counted_before", frozenset()))


def keys_in_the_order_of_ranks(stack):
    def gather(x, batch, cp):
        return context_parallel._Gather.apply(x, cp).unflatten(0, (cp.size, batch, -1)).transpose(0, 1).flatten(1, 2)

    patch(stack, core_attention, "gather_sequences", lambda original: gather)


def gradients_of_keys_not_summed(stack):
    def make(original):
        def scatter_sum(self, x):
            return x.chunk(self.size)[self.rank].contiguous()

        return scatter_sum

    patch(stack, Axis, "scatter_sum", make)


def positions_not_shared_out(stack):
    from megafp8.training import step

    def make(original):
        def own_part(batch, cp):
            part = original(batch, cp)
            part.position_ids = batch.position_ids[:, : part.tokens.shape[1]]
            return part

        return own_part

    patch(stack, step, "own_part", make)


def ring_stands_still(stack):
    patch(stack, Axis, "post_shift", lambda original: lambda self, x: (x.clone(), []))


FAULTS = [
    (microbatches_swapped, "untied", PP),
    (stages_gradient_twice, "untied", PP),
    (stages_gradient_twice, "untied", ZERO),
    (chunks_mixed, "untied", CHUNKS),
    (deferred_gradients_dropped, "untied", ZERO),
    (deferred_gradients_run_twice, "untied", ZERO),
    (hidden_states_in_another_order, "untied", PP),
    (tied_gradients_not_summed, "tied", PP),
    (tied_gradients_summed_twice, "tied", PP),
    (tied_weight_counted_twice, "tied", PP),
    (keys_in_the_order_of_ranks, "untied", CP),
    (gradients_of_keys_not_summed, "untied", CP),
    (positions_not_shared_out, "untied", CP),
    (ring_stands_still, "untied", RING),
]


@pytest.mark.parametrize("layout", [PP, ZERO, CHUNKS, CP, RING], ids=str)
@pytest.mark.parametrize("name", ["untied", pytest.param("tied", marks=pytest.mark.slow)])
def test_without_a_fault_all_is_well(pool, expected, name, layout):
    compare(run_layout(pool, VALUES[name], layout, 1), expected[name])


@pytest.mark.parametrize(
    ("fault", "name", "layout"), FAULTS, ids=lambda v: getattr(v, "__name__", str(v)) if v not in VALUES else v
)
def test_planted_fault_is_noticed(pool, expected, fault, name, layout):
    with pytest.raises(AssertionError):
        compare(run_layout(pool, VALUES[name], layout, 1, fault=fault), expected[name])


# A stage that dies


def last_words(values, layout) -> list[str]:
    """The second stage fails in the forward of microbatch 1 and is gone; what this rank then says."""
    original = Executor._forward

    def forward(self, action, run):
        if self.rank == 1 and action.microbatch == 1:
            raise MemoryError("no memory left")
        return original(self, action, run)

    with mock.patch.object(Executor, "_forward", forward):
        try:
            train(values, layout, 1)
        except Exception as error:
            torch.distributed.destroy_process_group()  # as at its process's end: the other rank's messages fail
            return [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
    return []


def test_errors_name_the_stage_and_what_it_did(pool):
    first, second = pool.run_on(2, last_words, UNTIED, PP)
    assert second == [
        "MemoryError",
        "no memory left",
        "pipeline stage 1 of 2 (pipeline rank 1 of 2), forward of microbatch 1, schedule 1f1b",
    ]
    assert first[0] == "LostStageError"
    assert "after stage 0, and rank 1 is gone or silent" in first[1], "whichever message it was at: a race"
    assert "pipeline stage 0 of 2" in first[2]
