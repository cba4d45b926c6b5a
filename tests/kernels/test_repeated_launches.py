"""Launches that repeat hand the driver what Triton's own way to it would: every argument, for every address.

Nothing is compiled and nothing runs, so any machine can tell. tests/gpu/test_repeated_launches.py compares bytes.
"""

import dataclasses
from unittest import mock

import pytest
import torch
from driverless import no_driver
from megafp8.kernels import (
    gemm,
    gemm_launch,
    launch,
    norm_quantize,
    permute,
    quantize,
    quantize_configs,
    quantize_derive,
    quantize_experts,
    swiglu_quantize,
)
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from tests.gpu.quantize_cases import SPECS, normal
from tests.kernels.launch_cases import ALIGNED, BLOCKWISE, CASES, SHIFTED, TENSOR, WHOLE, WIDE, fp8, norm, ones, source


class AllKept(TorchDispatchMode):
    """Inside, no tensor is freed, so that no address is used twice."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.made.append(function(*args, **kwargs or {}))
        return self.made[-1]


class Addresses:
    """Numbers in the place of addresses, in the order in which they are first met: the same for the same use."""

    def __init__(self, x):
        self.seen = {x.data_ptr(): 0}

    def __call__(self, kind, value):
        value = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if kind == "pointer":
            return self.seen.setdefault(value, len(self.seen)), value % 16
        return value


def handed_over(launches, x):
    """What reached the driver, free of the addresses that an allocator happened to choose."""
    number, found = Addresses(x), []
    for one in launches:
        kinds, arguments = [], []
        for value in one.arguments:
            encoded = isinstance(value, tuple) and len(value) == 8  # a tensor descriptor
            arguments.append((number("pointer", value[0]), *map(_plain, value[1:])) if encoded else value)
            kinds.append(None)
        pointers = [kind for kind in one.signature if not str(kind).startswith("tensordesc")]
        rest = arguments[len(arguments) - len(pointers) :]
        rest = [
            number("pointer" if str(kind).startswith("*") else "", value)
            for kind, value in zip(pointers, rest, strict=True)
        ]
        plain = [_plain(value) for value in arguments[: len(arguments) - len(pointers)]]
        found.append((one.kernel.__name__, one.grid, one.stream, one.signature, plain, [_plain(v) for v in rest]))
    return found


def _plain(value):
    return tuple(value) if isinstance(value, list | tuple | torch.Size) else value


@pytest.fixture
def looks(monkeypatch):
    """The kernels at whose arguments Triton looked."""
    seen, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *a, **more: seen.append(kernel) or run(kernel, *a, **more))
    return seen


@pytest.mark.parametrize("layout", [ALIGNED, SHIFTED, WIDE])
@pytest.mark.parametrize("case", CASES)
def test_the_driver_is_handed_the_same(case, layout, looks):
    run, (first, second) = CASES[case], (source(layout, seed) for seed in (1, 2))
    with no_driver() as launches, AllKept():
        run(second)
        expected = handed_over(launches, second)
    with no_driver() as launches, AllKept():
        run(first)
        looks.clear(), launches.clear()
        run(second)
        assert handed_over(launches, second) == expected != []
        assert not looks, [kernel.__name__ for kernel in looks]


@pytest.mark.parametrize("descriptor", [gemm_launch.TensorDescriptor, gemm_launch.GluonDescriptor])
def test_described_is_all_that_triton_asks_of_a_descriptor(descriptor):
    """Sizes of blocks and layouts are compiled in; what versions from 3.7 on read besides has its default."""
    fields = {field.name: field.default for field in dataclasses.fields(descriptor)}
    described = gemm_launch.Described(ones(1), (1,), (1,))
    asked = ({"round_f32_to_tf32": False} | fields).items()
    wanted = {name: value for name, value in asked if name not in ("block_shape", "layout")}
    assert set(wanted) == set(described._fields)
    assert all(getattr(described, name) == value for name, value in wanted.items() if value is not dataclasses.MISSING)


def test_another_size_is_another_launch():
    """A microbatch of other tokens, and back: nothing of one is used for the other."""
    sizes = [(256, 512), (130, 512), (256, 384), (256, 512), (1, 512)]
    run = norm(BLOCKWISE)
    inputs = [source(ALIGNED, 1, size) for size in sizes]
    expected = []
    for x in inputs:
        with no_driver() as launches, AllKept():
            run(x)
            expected.append(handed_over(launches, x))
    with no_driver() as launches, AllKept():
        for x, one in zip(inputs, expected, strict=True):
            launches.clear()
            run(x)
            assert handed_over(launches, x) == one


def test_what_a_launch_follows_from_is_told_apart():
    """Dtypes, specs, strides, alignment, given amaxes and scales, and configurations that a measurement swaps."""
    x, shifted, wide = (source(layout, 1) for layout in (ALIGNED, SHIFTED, WIDE))
    calls = [
        lambda: quantize.quantize(x, TENSOR),
        lambda: quantize.quantize(x.float(), TENSOR),
        lambda: quantize.quantize(x.half(), TENSOR),
        lambda: quantize.quantize(x, SPECS["tensorwise_e5m2"]),
        lambda: quantize.quantize(x, SPECS["tensorwise_pow2"]),
        lambda: quantize.quantize(x, TENSOR, scale=ones(1)),
        lambda: quantize.quantize(x, TENSOR, scale=ones(1), amax_out=ones(1)),
        lambda: quantize.quantize(x, TENSOR, amax=ones(1)),
        lambda: quantize.quantize(x, TENSOR, noop=ones(1, dtype=torch.int32)),
        lambda: quantize.quantize(x, BLOCKWISE),
        lambda: quantize.quantize(x, SPECS["blockwise_epsilon"]),
        lambda: quantize.quantize(x, SPECS["blockwise_fp32"]),
        lambda: quantize.quantize(x.t(), BLOCKWISE),
        lambda: quantize.quantize(shifted, BLOCKWISE),
        lambda: quantize.quantize(wide, BLOCKWISE),
        lambda: norm_quantize.rms_norm_quantize(x, x[0], BLOCKWISE),
        lambda: norm_quantize.rms_norm_quantize(x, shifted[0], BLOCKWISE),
        lambda: norm_quantize.rms_norm_quantize(x, x[0], BLOCKWISE, weight_offset=1.0),
        lambda: norm_quantize.rms_norm_quantize(x, x[0], BLOCKWISE, eps=1e-6),
        lambda: norm_quantize.rms_norm_quantize(x, x[0].float(), BLOCKWISE),
    ]
    expected = []
    for call in calls:
        with no_driver() as launches, AllKept():
            call()
            expected.append(handed_over(launches, x))
    assert len({repr(one) for one in expected}) == len(expected)
    with no_driver() as launches, AllKept():
        for _ in range(2):
            for call, one in zip(calls, expected, strict=True):
                launches.clear()
                call()
                assert handed_over(launches, x) == one
        for config in quantize_configs.CONFIGS["rows"]:
            with quantize_configs.using("rows", config):
                launches.clear()
                quantize.quantize(x, BLOCKWISE)
                assert launches[0].arguments[-3:] == (config.r, config.c, config.num_warps)


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on another device."""

    def get_device(self):
        return 1


def test_two_devices_have_launches_and_streams_of_their_own(looks):
    x, there = source(ALIGNED, 1), source(ALIGNED, 1).as_subclass(Elsewhere)
    with no_driver() as launches:
        for _ in range(2):
            for one in (x, there):
                quantize.quantize(one, BLOCKWISE)
        assert len(looks) == 2
        assert [one.stream for one in launches[2:]] == [(0, 0), (1, 0)]


def test_sizes_that_never_repeat_are_forgotten(looks):
    with no_driver(), mock.patch.object(launch, "MOST", 4):
        for tokens in range(1, 12):
            quantize.quantize(source(ALIGNED, 1, (tokens, 128)), BLOCKWISE)
            gemm.gemm_tensorwise(fp8(tokens, 128), fp8(64, 128), ones(1), ones(1))
            assert len(launch.known) <= 4
            assert len(launch.older) <= 4
            assert len(gemm_launch.repeats) <= 4

    with no_driver(), mock.patch.object(launch, "MOST", 4):  # one that is asked for again stays
        once = source(ALIGNED, 1)
        quantize.quantize(once, BLOCKWISE)
        for tokens in range(1, 12):
            looks.clear()
            quantize.quantize(once, BLOCKWISE)
            assert not looks
            quantize.quantize(source(ALIGNED, 1, (tokens, 128)), BLOCKWISE)


def rows_that_arrive(x):
    """As many as tokens happen to choose an expert here: what is launched for them without another look."""
    rows, dy = len(x), x[:, : x.shape[1] // 2].contiguous()
    buffer, index, options = normal(rows, 600), torch.arange(rows), {"high_precision": True, "weights": ones(rows)}
    return (
        permute.spread(x, index),
        permute.spread(x, index, buffer[:, :512]),
        permute.spread(ones(rows, 1), index, buffer.view(torch.float32)[:, -1:]),
        permute.sums(x, index[:, None], None, buffer[:, :512]),
        swiglu_quantize.swiglu_quantize(x, BLOCKWISE, rowwise=False, **options),
        swiglu_quantize.swiglu_grad_quantize(dy, x, BLOCKWISE, rowwise=False, colwise=False, **options),
        quantize_derive.quantize_grouped(x, None, BLOCKWISE, True, True, index=torch.arange(256)),
        quantize_experts.expert_amaxes(quantize_experts.row_amaxes(x), WHOLE),
        quantize_experts.quantize_experts(x, WHOLE, TENSOR, True, True, amax=ones(3), index=torch.arange(256)),
    )


@pytest.mark.parametrize("others", [(272, 304), (257, 299), (128, 3072)])
def test_numbers_of_rows_that_differ(others, looks):
    """The same launches as by themselves; Triton looks at none that differ in nothing that it compiles for."""
    first, second = (source(ALIGNED, seed, (rows, 512)) for seed, rows in enumerate(others))
    with no_driver() as launches, AllKept():
        rows_that_arrive(second)
        expected = handed_over(launches, second)
    with no_driver() as launches, AllKept():
        for x in (first, source(ALIGNED, 3, (1, 512)), first):
            rows_that_arrive(x)
        looks.clear(), launches.clear()
        rows_that_arrive(second)
        assert handed_over(launches, second) == expected
        assert not looks, [kernel.__name__ for kernel in looks]


def test_a_wrong_operand_is_refused_though_its_kind_was_launched():
    with no_driver():
        a, b = fp8(64, 128), fp8(32, 128)
        gemm.gemm_tensorwise(a, b, ones(1), ones(1))
        for scale in (ones(2), ones(1).double()):
            with pytest.raises(ValueError, match="one FP32 element"):
                gemm.gemm_tensorwise(a, b, scale, ones(1))
        with pytest.raises(ValueError, match="one K"):
            gemm.gemm_tensorwise(a, fp8(32, 256), ones(1), ones(1))
        with pytest.raises(ValueError, match="contiguous rows"):
            norm_quantize.rms_norm_quantize(source(ALIGNED, 1).t(), ones(256), BLOCKWISE)
