"""The executor on one rank, with neighbours that are a mailbox: what it sends, keeps, drops and says."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megafp8.core.pipeline.executor import Executor, HiddenStates
from megafp8.core.pipeline.p2p import Message
from megafp8.core.pipeline.schedules import build_schedule, forward_only
from megafp8.core.pipeline.wgrad_queue import WgradQueue

SHAPE = (3, 5)


class Mailbox:
    """Links to neighbours that have sent everything already, and take everything."""

    def __init__(self):
        self.sent: dict[Message, torch.Tensor] = {}
        self.posted: list[Message] = []

    def send(self, message, x, at_most=None):
        assert message not in self.sent
        assert at_most in (None, 4), "a round's messages of two ranks with two chunks"
        self.bounded = at_most is not None
        self.sent[message] = x

    def post_receive(self, message, x):
        self.posted.append(message)
        return lambda: x.fill_(float(message.microbatch + 1) * (1 if message.forward else 10))

    def finish(self):
        self.finished = True


def make(rank, schedule):
    states = HiddenStates(lambda microbatch: SHAPE, torch.float32, torch.device("cpu"))
    return Executor(schedule, rank, Mailbox(), states, WgradQueue())


def test_middle_stage_passes_hidden_states_on_and_gradients_back():
    weight = torch.tensor(3.0, requires_grad=True)
    executor = make(1, build_schedule("1f1b", 3, 1, 2))
    executor.run(lambda chunk, microbatch, hidden: hidden * weight)
    sent = executor.links.sent
    assert {str(m) for m in sent} == {
        *(f"hidden states of microbatch {m} after stage 1" for m in (0, 1)),
        *(f"gradient of microbatch {m} after stage 0" for m in (0, 1)),
    }
    for m in (0, 1):
        assert torch.equal(sent[Message(True, 1, m)], torch.full(SHAPE, 3.0 * (m + 1)))
        assert torch.equal(sent[Message(False, 0, m)], torch.full(SHAPE, 3.0 * 10 * (m + 1)))
    assert weight.grad == sum((m + 1) * 10 * (m + 1) * 15 for m in (0, 1))
    assert executor.links.finished
    assert executor.ran == list(executor.schedule.actions[1])


def test_receives_are_posted_one_action_ahead():
    executor = make(1, build_schedule("1f1b", 2, 1, 3))
    seen = []
    executor.run(lambda chunk, m, hidden: (seen.append(len(executor.links.posted)), hidden.sum())[1])
    assert seen == [1, 2, 3], "F, then its own backward, which waits for nothing, stands between"
    gpipe = make(1, build_schedule("gpipe", 2, 1, 3))
    seen.clear()
    gpipe.run(lambda chunk, m, hidden: (seen.append(len(gpipe.links.posted)), hidden.sum())[1])
    assert seen == [2, 3, 3]


def test_output_is_dropped_when_sent_and_data_when_used_up():
    executor = make(0, build_schedule("1f1b", 2, 1, 3))
    weight = torch.ones(SHAPE, requires_grad=True)
    outputs, released = [], []

    def forward(chunk, microbatch, hidden):
        gc.collect()
        assert all(output() is None for output in outputs), "an output outlived its message"
        y = weight + microbatch  # nothing of an addition is kept for backward
        outputs.append(weakref.ref(y))
        return y

    executor.run(forward, release=released.append)
    assert released == [0, 1, 2]
    assert torch.equal(weight.grad, torch.full(SHAPE, 10.0 + 20.0 + 30.0))


def test_evaluation_keeps_no_graph():
    executor = make(0, forward_only(2, 2, 3))
    weight = torch.ones(SHAPE, requires_grad=True)
    with torch.no_grad():
        executor.run(lambda chunk, m, hidden: weight + (0 if hidden is None else hidden))
    assert not any(x.requires_grad for x in executor.links.sent.values())
    assert executor.links.bounded
    assert [str(a) for a in executor.ran] == ["F0", "F1", "F0.1", "F1.1", "F2", "F2.1"]


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_a_stage_without_layers_passes_everything_through(name):
    executor = make(1, build_schedule(name, 3, 1, 2))
    executor.run(lambda chunk, microbatch, hidden: hidden)
    assert torch.equal(executor.links.sent[Message(True, 1, 1)], torch.full(SHAPE, 2.0))
    assert torch.equal(executor.links.sent[Message(False, 0, 1)], torch.full(SHAPE, 20.0))


def test_error_says_where():
    executor = make(1, build_schedule("1f1b", 4, 2, 4))

    def forward(chunk, microbatch, hidden):
        if (chunk, microbatch) == (1, 2):
            raise ZeroDivisionError("boom")
        return hidden * 1

    with pytest.raises(ZeroDivisionError) as error:
        executor.run(forward)
    where = "pipeline stage 5 of 8 (pipeline rank 1 of 4), forward of microbatch 2, schedule 1f1b"
    assert (str(error.value), error.value.__notes__) == ("boom", [where])


def test_lost_weight_gradients_are_noticed():
    executor = make(0, build_schedule("1f1b", 1, 1, 1))
    weight = torch.ones(SHAPE, requires_grad=True)

    def forward(chunk, microbatch, hidden):
        executor.wgrads.slot(chunk, microbatch).submit(lambda: None, 1)  # 1F1B has no action that would run it
        return weight.sum()

    with pytest.raises(AssertionError, match="nobody ran"):
        executor.run(forward)
