"""How microbatches get to the device."""

import torch

from megafp8.data import Batch
from megafp8.parallel import Axis
from megafp8.training.step import _Microbatches


class Watched(Batch):
    moves: list[bool] = []

    def to(self, device, non_blocking=False):
        self.moves.append(non_blocking)
        return super().to(device, non_blocking)


def test_the_host_goes_on_while_they_travel():
    """A blocking copy would wait until the device has done all that was queued before."""
    tokens = torch.arange(8).view(1, 8)
    batches = [Watched(tokens + n, tokens, torch.ones(1, 8), tokens) for n in range(3)]
    micro = _Microbatches(batches, torch.device("cpu"), Axis())
    assert torch.equal(micro[2].tokens, tokens + 2)
    assert torch.equal(micro[0].tokens, tokens)
    assert Watched.moves == [True] * 3
