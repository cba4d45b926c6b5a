"""Saving in the background from a GPU: page-locked copies in the order of the stream."""

import torch

from megafp8.checkpoint import BackgroundSaver, CheckpointWriter, load_checkpoint
from megafp8.checkpoint.background import HostCopy
from megafp8.params import StateItem


def state(seed):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = {"model/w": (4096, 4096), "model/b": (4097,), "optimizer/step": (), "optimizer/m": (3, 1000, 333)}
    return {
        name: StateItem.whole(torch.randn(shape, generator=generator, device="cuda")) for name, shape in shapes.items()
    } | {"model/odd": StateItem.whole(torch.randn(64, 65, generator=generator, device="cuda").bfloat16().t()[::2])}


def test_a_background_save_keeps_the_state_of_its_moment(tmp_path):
    """Work queued before the save is in it, work queued after is not, though nobody waits for the GPU."""
    saver = BackgroundSaver(device="cuda")
    items = state(0)
    saver.prepare(items)
    for iteration in (1, 2, 3):
        expected = {name: (item.tensor + iteration).clone() for name, item in items.items()}
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # the GPU lags behind: the changes below are queued, not done
        for item in items.values():
            item.tensor.add_(iteration)
        assert saver.start(CheckpointWriter(tmp_path, iteration), items)
        for item in items.values():
            item.tensor.zero_()
        directory = saver.finish()
        load_checkpoint(directory, items)
        for name, item in items.items():
            assert torch.equal(item.tensor, expected[name]), (iteration, name)


def test_host_memory_is_page_locked_as_large_as_asked_and_kept():
    host = HostCopy(pinned=True)
    host.reserve(100_000_003)
    assert host.nbytes == 100_000_003
    tensors = [torch.randn(1000, 1000, device="cuda") for _ in range(3)]
    addresses = []
    for _ in range(3):
        copies = host.copy(tensors)
        host.wait()
        assert all(copy.is_pinned() for copy in copies)
        assert all(torch.equal(copy, tensor.cpu()) for copy, tensor in zip(copies, tensors, strict=True))
        addresses.append([copy.data_ptr() for copy in copies])
    assert addresses[0] == addresses[1] == addresses[2]


def test_memory_of_the_gpu_stays_flat_over_saves(tmp_path):
    """CASES 89."""
    saver, items, used = BackgroundSaver(device="cuda"), state(0), []
    for iteration in range(1, 11):
        assert saver.start(CheckpointWriter(tmp_path, iteration, retain_interval=100), items)
        saver.finish()
        used.append(torch.cuda.memory_allocated())
    assert len(set(used[2:])) == 1
