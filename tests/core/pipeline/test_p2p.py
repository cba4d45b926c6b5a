"""Messages between stages: where they go, their tags, and how many are on their way."""

from unittest import mock

import pytest
import torch

from megafp8.core.pipeline import p2p
from megafp8.core.pipeline.p2p import Links, LostStageError, Message
from megafp8.parallel import Axis


class Work:
    def __init__(self, log, name):
        self.log, self.name, self.done = log, name, False

    def is_completed(self):
        return self.done

    def wait(self):
        self.done = True
        self.log.append(f"wait {self.name}")


@pytest.fixture
def wire(monkeypatch):
    """torch.distributed with ranks of a pipeline at 10, 20, ...; notes what is posted and waited for."""
    log = []
    fake = mock.Mock()
    fake.get_global_rank = lambda group, rank: 10 * (rank + 1)

    def post(kind):
        def call(x, peer, group, tag):
            log.append(f"{kind} {peer} {group} {tag}")
            return Work(log, tag)

        return call

    monkeypatch.setattr(p2p, "dist", fake)
    monkeypatch.setattr("megafp8.parallel.dist.isend", post("send"))  # the axis's own
    monkeypatch.setattr("megafp8.parallel.dist.irecv", post("receive"))
    return log


def test_messages_go_one_rank_on_or_back_around_the_ring(wire):
    links = Links(Axis(4, 3), 5, {(True, True): "wrap"})
    x = torch.zeros(2)
    links.send(Message(True, 3, 0), x)  # the last rank's first chunk goes on in the first rank's second
    links.post_receive(Message(True, 2, 0), x)
    links.send(Message(False, 2, 1), x)
    links.post_receive(Message(False, 3, 4), x)
    assert [line.rsplit(" ", 1)[0] for line in wire] == [
        "send 10 wrap", "receive 30 None", "send 30 None", "receive 10 None",
    ]  # fmt: skip


def test_tags_differ():
    messages = [Message(f, s, m) for f in (True, False) for s in range(6) for m in range(5)]
    assert len({message.tag(5) for message in messages}) == len(messages)


def test_wrong_rank_is_noticed(wire):
    with pytest.raises(AssertionError):
        Links(Axis(4, 1), 5).send(Message(True, 2, 0), torch.zeros(1))


def test_sends_never_block_unless_too_many_are_on_their_way(wire):
    links = Links(Axis(2, 0), 9)
    for m in range(3):
        links.send(Message(True, 0, m), torch.zeros(1))
    assert not any("wait" in line for line in wire)
    for m in range(3, 6):
        links.send(Message(True, 0, m), torch.zeros(1), at_most=2)
    tags = [Message(True, 0, m).tag(9) for m in range(6)]
    waited = [int(line.split()[1]) for line in wire if line.startswith("wait")]
    assert waited == tags[:4]
    links.finish()
    assert [int(line.split()[1]) for line in wire if line.startswith("wait")] == tags


def test_a_silent_neighbour_is_named(wire):
    links = Links(Axis(2, 0), 3)
    arrive = links.post_receive(Message(False, 0, 2), torch.zeros(1))
    gone = mock.patch.object(Work, "wait", side_effect=RuntimeError("Connection closed by peer"))
    with gone, pytest.raises(LostStageError) as error:
        arrive()
    assert "waits for the gradient of microbatch 2 after stage 0, and rank 20 is gone or silent" in str(error.value)
    assert "Connection closed by peer" in str(error.value)
