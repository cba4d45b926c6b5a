"""Zeros for counters and maxima: each handed out once, on each stream its own, none of a graph's."""

from types import SimpleNamespace

import pytest
import torch
from megafp8.kernels import zeros

CPU, CUDA = torch.device("cpu"), SimpleNamespace(type="cuda", index=0)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose memory is the host's: its current stream, and whether that is captured."""
    state = SimpleNamespace(stream=0, captured=False, fills=0)
    filled = zeros._filled

    def fill(count, dtype, device):
        state.fills += 1
        return filled(count, dtype, CPU)

    monkeypatch.setattr(zeros, "_filled", fill)
    monkeypatch.setattr(zeros, "_pools", {})
    monkeypatch.setattr(
        zeros, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: state.stream))
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captured)
    return state


def test_each_is_handed_out_once(gpu):
    seen = [zeros.zeros(1, torch.float32, CUDA) for _ in range(2000)]
    assert gpu.fills == -(-2000 // 512)
    assert all(x.shape == (1,) and x.data_ptr() % 16 == 0 for x in seen)
    assert len({x.data_ptr() for x in seen}) == len(seen)
    assert not torch.cat(seen).any()


def test_writing_to_one_is_no_change_of_another(gpu):
    """Autograd keeps one for backward, while the next is raised by PyTorch's operations."""
    x, (one, other) = torch.ones(1, requires_grad=True), (zeros.zeros(1, torch.float32, CUDA) for _ in range(2))
    y = x * one
    other.add_(1)
    y.backward()
    assert x.grad.item() == 0


@pytest.mark.parametrize("count", [1, 3, 17, 5000])
def test_counters_of_any_number(count, gpu):
    found = [zeros.zeros(count, torch.int32, CUDA) for _ in range(5)]
    assert all(x.shape == (count,) and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in found)
    ends = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in found)
    assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))


def test_streams_share_none(gpu):
    here = zeros.zeros(1, torch.float32, CUDA)
    gpu.stream = 7
    there = zeros.zeros(1, torch.float32, CUDA)
    gpu.stream = 0
    again = zeros.zeros(1, torch.float32, CUDA)
    assert gpu.fills == 2
    assert here.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
    assert here.untyped_storage().data_ptr() != there.untyped_storage().data_ptr()


def test_a_captured_stream_fills_its_own(gpu, monkeypatch):
    """A replay must find zeros, too."""
    gpu.captured = True
    made = []
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: made.append((size, options)))
    zeros.zeros(4, torch.int32, CUDA)
    assert made == [((4,), {"dtype": torch.int32, "device": CUDA})]
    assert not gpu.fills
    assert not zeros._pools


def test_what_an_evaluation_leaves_can_be_kept_for_backward(gpu):
    with torch.inference_mode():
        zeros.zeros(1, torch.float32, CUDA)
    x = torch.ones(1, requires_grad=True)
    (x * zeros.zeros(1, torch.float32, CUDA)).backward()
    assert gpu.fills == 1
