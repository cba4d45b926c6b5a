"""The optimizer on a GPU: equal to the CPU, no wait for the device, the same bits again, checkpoints."""

import pytest
import torch

from megafp8.checkpoint import load_checkpoint, save_checkpoint
from tests.optimizer.helpers import SHAPES, assert_same_bits, make_optimizer, make_params, set_grads, snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def steps(optimizer, count=20, bad=()):
    """Steps on the same random gradients wherever the optimizer is; NaN in those of `bad`."""
    generator = torch.Generator().manual_seed(0)
    device = optimizer.step_count.device
    for i in range(count):
        set_grads(optimizer, generator, scale=10.0 ** (i % 3))
        if i in bad:
            optimizer.grads.state.views["layers.0.norm.weight"][2] = float("nan")
        optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=torch.tensor(100.0, device=device))
    return optimizer


def test_gpu_and_cpu_agree():
    cpu, gpu = snapshot(steps(make_optimizer())), snapshot(steps(make_optimizer(make_params(device="cuda"))))
    for name in cpu:
        if name.startswith("optimizer/") and name.count("/") == 2:
            difference = (cpu[name].double() - gpu[name].double().cpu()).norm() / cpu[name].double().norm()
            assert difference <= 1e-6, name


def test_the_same_steps_give_the_same_bits():
    a, b = (snapshot(steps(make_optimizer(make_params(device="cuda")))) for _ in range(2))
    assert_same_bits(a, b)


def test_a_nan_step_leaves_every_bit():
    """CASES 31."""
    optimizer = steps(make_optimizer(make_params(device="cuda")), count=3)
    before = snapshot(optimizer)
    steps(optimizer, count=1, bad=(0,))
    after = snapshot(optimizer)
    assert after.pop("optimizer/skipped_steps") == before.pop("optimizer/skipped_steps") + 1
    assert_same_bits(before, after)


def test_a_step_never_waits_for_the_device():
    optimizer = steps(make_optimizer(make_params(device="cuda")), count=1)
    tokens, loss = torch.tensor(100.0, device="cuda"), torch.tensor(2.0, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.zero_grad()
        for valid in (tokens, 100):
            optimizer.step(
                lr=1e-3, weight_decay=0.1, valid_tokens=valid, loss=loss, with_num_zeros=True, with_params_norm=True
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_checkpoint_moves_between_devices(tmp_path):
    source = steps(make_optimizer(make_params(device="cuda")), count=3)
    items = {**source.weights.state(), **source.state()}
    directory = save_checkpoint(tmp_path, 3, items, {})
    for device in ("cpu", "cuda"):
        target = make_optimizer(make_params(seed=2, device=device))
        tensors = load_checkpoint(directory, {**target.weights.state(), **target.state()})
        target.weights.load_state(tensors)
        target.load_state(tensors)
        expected = {name: tensor.cpu() for name, tensor in snapshot(source).items()}
        assert_same_bits({name: tensor.cpu() for name, tensor in snapshot(target).items()}, expected)


def test_memory_is_flat_over_steps():
    """CASES 89."""
    optimizer = make_optimizer(make_params(device="cuda", shapes={**SHAPES, "big.weight": (1000, 1000)}))
    steps(optimizer, count=5)
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    steps(optimizer, count=1)
    peak = torch.cuda.max_memory_allocated()
    steps(optimizer, count=10)
    assert torch.cuda.memory_allocated() == resident
    assert torch.cuda.max_memory_allocated() == peak
