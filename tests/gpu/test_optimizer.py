"""The optimizer on a GPU: equal to the CPU, no wait for the device, the same bits again, checkpoints."""

import pytest
import torch

from megafp8.checkpoint import load_checkpoint, save_checkpoint
from megafp8.fp8 import get_recipe
from megafp8.fp8.param import Weight
from megafp8.optimizer import AdamWOptions, Optimizer, Sharding
from megafp8.optimizer.precision import FP32_STATE, Precision
from tests.gpu.waiting import no_waiting
from tests.optimizer.helpers import (
    SHAPES,
    assert_same_bits,
    make_optimizer,
    make_params,
    set_grads,
    snapshot,
)
from tests.optimizer.test_adamw import check_100_steps


def steps(optimizer, count=20, bad=()):
    """Steps on the same random gradients wherever the optimizer is; NaN in those of `bad`."""
    generator = torch.Generator().manual_seed(0)
    device = optimizer.step_count.device
    for i in range(count):
        set_grads(optimizer, generator, scale=10.0 ** (i % 3))
        if i in bad:
            next(v for n, v in optimizer.grads.state.views.items() if "norm" in n)[2] = float("nan")
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


@pytest.mark.parametrize("recipe", [None, "tensorwise", "blockwise", "mxfp8", "mxfp8 1d"])
def test_a_step_never_waits_for_the_device(recipe):
    if recipe is None:
        optimizer = make_optimizer(make_params(device="cuda"))
    else:
        optimizer = next(iter(pair(recipe=get_recipe(RECIPES[recipe][0], **RECIPES[recipe][1]))))
    steps(optimizer, count=1)
    tokens, loss = torch.tensor(100.0, device="cuda"), torch.tensor(2.0, device="cuda")
    with no_waiting():
        optimizer.zero_grad()
        for valid in (tokens, 100):
            optimizer.step(
                lr=1e-3, weight_decay=0.1, valid_tokens=valid, loss=loss, with_num_zeros=True, with_params_norm=True
            )


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


PRECISIONS = {
    "fp32": FP32_STATE,
    "remainder": Precision("remainder"),
    "bf16": Precision("fp32", "bf16", "bf16"),
    "fp8": Precision("fp32", "fp8", "fp8"),
    "mixed": Precision("remainder", "fp8", "bf16"),
}
RECIPES = {
    "tensorwise": ("tensorwise", {}),
    "blockwise": ("blockwise", {}),
    "mxfp8": ("mxfp8", {}),
    "mxfp8 1d": ("mxfp8", {"weight_tile": "1d"}),
}
LARGE = {"a.weight": (130, 192), "b.weight": (384, 512), "norm.weight": (200,), "c.weight": (100, 1000)}


def pair(precision=FP32_STATE, recipe=None, shapes=LARGE):
    """Two optimizers of the same parameters: with kernels, and without."""
    for fused in (True, False):
        params = make_params(device="cuda", shapes=shapes)
        for spec, param in params:
            if recipe is not None and len(spec.shape) == 2:
                param.owner = Weight(param, recipe)
        precisions = {spec.name: precision for spec, _ in params if len(spec.shape) > 1}
        sharding = Sharding(fp8_primary=recipe is not None)
        yield Optimizer(params, AdamWOptions(), seed=1, sharding=sharding, precisions=precisions, fused=fused)


def held(optimizer):
    """Everything the optimizer stores, and what it tells of its steps."""
    found = {f"master {i}": t for i, t in enumerate(optimizer.masters.stored)}
    for kind in ("exp_avg", "exp_avg_sq"):
        for i, stored in enumerate(getattr(optimizer, kind).stored):
            found |= {f"{kind} {i} {j}": t for j, t in enumerate(stored.tensors) if t is not None}
    for name, param in optimizer.weights.params.items():
        primary = getattr(getattr(param, "owner", None), "primary", None)
        if primary is None:
            found[name] = param.detach()
        else:
            found |= {
                f"{name} {o} {what}": t for what in ("data", "scale_inv") for o, t in getattr(primary, what).items()
            }
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_kernels_and_reference_have_the_same_bits(precision):
    a, b = (steps(o, count=6, bad=(3,)) for o in pair(PRECISIONS[precision], shapes=SHAPES | LARGE))
    assert_same_bits(held(a), held(b))
    assert a.skipped_count == 1


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_and_reference_have_the_same_fp8_bytes(recipe, ragged):
    """ragged: rows that are no whole chunks, whose tiles the kernels leave to PyTorch."""
    name, axes = RECIPES[recipe]
    shapes = LARGE if ragged else {key: shape for key, shape in LARGE.items() if key != "c.weight"}
    a, b = (steps(o, count=4, bad=(2,)) for o in pair(recipe=get_recipe(name, **axes), shapes=shapes))
    assert_same_bits(held(a), held(b))


def test_norms_of_kernels_and_reference_have_the_same_bits():
    stats = []
    for optimizer in pair(shapes=SHAPES | LARGE):
        set_grads(optimizer, torch.Generator().manual_seed(3), scale=1e-3)
        optimizer.grads.state.views["b.weight"][::3] = 0
        stats.append(optimizer.step(lr=0.0, weight_decay=0.0, valid_tokens=7, with_num_zeros=True))
    assert torch.equal(stats[0].grad_norm, stats[1].grad_norm)
    assert torch.equal(stats[0].num_zeros, stats[1].num_zeros)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_100_steps_stay_within_1e_6_of_float64_adamw(weight_decay):
    """CASES 63."""
    check_100_steps("cuda", weight_decay, 0.9, 0.95, 1e-8)


def test_a_step_is_one_update_a_buffer_and_copies_no_gradient():
    optimizer = steps(
        make_optimizer(make_params(device="cuda", shapes={**SHAPES, "big.weight": (4096, 4096)})), count=2
    )
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        optimizer.reduce_gradients()
        optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=100)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    for kernel in ("adamw_kernel", "squares_kernel"):
        assert sum(kernel in name for name in names) == len(optimizer.layouts), names
    large = [event.name for event in profile.events() if event.device_time > 15]  # microseconds: scalars take less
    assert all("adamw_kernel" in name or "squares_kernel" in name or "grids_kernel" in name for name in large), large
