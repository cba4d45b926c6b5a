"""Launches that repeat hand the driver what Triton's own way to it would: every argument, for every address.

Nothing is compiled and nothing runs, so any machine can tell. tests/gpu/test_repeated_launches.py compares bytes.
"""

import dataclasses
from unittest import mock

import pytest
import torch
from driverless import no_driver
from megafp8.kernels import (
    best_experts,
    cross_entropy,
    dequantize,
    gemm,
    gemm_launch,
    grouped_gemm,
    head_norm,
    latent_heads,
    launch,
    norm_grad,
    norm_quantize,
    operand_stats,
    permute,
    place_rows,
    quantize,
    quantize_configs,
    quantize_derive,
    quantize_experts,
    rope,
    swiglu_quantize,
    three_parts,
)
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from megafp8.fp8.quantizer import Quantizer
from tests.gpu.quantize_cases import SPECS, normal

BLOCKWISE, SQUARES, TENSOR, MXFP8 = (SPECS[name] for name in ("blockwise", "blockwise_2d", "tensorwise", "mxfp8"))
ENDS = torch.tensor([64, 100, 256], dtype=torch.int32)
WHOLE = torch.tensor([128, 128, 256], dtype=torch.int32)  # ends of experts that are filled up to whole tiles
ROWS = torch.arange(256).view(128, 2)
ANGLES = torch.rand(256, 32)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def fp8(*shape):
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def row_scales(rows, blocks):
    return torch.ones(blocks, rows).t()


def stored(x, spec):
    return quantize.quantize(x, spec)[0]


def all_copies(spec):
    return lambda x: [quantize.quantize(x, spec, *wanted) for wanted in ((True, False), (False, True), (True, True))]


def with_a_history(x):
    return quantize.quantize(x, TENSOR, True, True, scale=ones(3)[1:2], amax_out=torch.zeros(3)[2:])


def norm(spec, **amax):
    def run(x):
        made = norm_quantize.rms_norm_quantize(x, x[0].contiguous(), spec, colwise=True)
        row = norm_quantize.rms_norm_quantize(x, x[0].contiguous(), spec, weight_offset=1.0)
        dx, parts = norm_grad.rms_norm_grad(x, x, x[0].contiguous(), made.rstd, beside=x)
        dw = norm_grad.sum_parts(parts, x.dtype), norm_grad.sum_parts(parts, x.dtype, parts[0], True)
        return made, row, dx, dw, norm_quantize.norm_columns_quantize(x, x[0].contiguous(), made.rstd, spec, **amax)

    return run


def swiglu(spec, **amax):
    def run(x):
        dy = x[:, : x.shape[1] // 2].contiguous()
        made = swiglu_quantize.swiglu_quantize(x, spec, high_precision=True, weights=ones(len(x)))
        both = swiglu_quantize.swiglu_quantize(x, spec, colwise=True)
        return made, both, swiglu_quantize.swiglu_grad_quantize(dy, x, spec, y_spec=spec, **amax)

    return run


def of_bytes(x):
    data, scale_inv = stored(x, BLOCKWISE)
    return (
        swiglu_quantize.swiglu_quantize((data, scale_inv), BLOCKWISE),
        quantize_derive.derive_colwise(data, scale_inv, BLOCKWISE),
        quantize_derive.transpose(data),
        dequantize.dequantize(data, scale_inv, BLOCKWISE.tile),
    )


def experts(x):
    offsets = torch.cat([ENDS[:1] * 0, ENDS])
    index = torch.arange(256)
    return (
        quantize_derive.quantize_grouped(x, offsets, BLOCKWISE),
        quantize_derive.quantize_grouped(x, offsets, BLOCKWISE, index=index, derived=True),
        permute.spread(x, index),
        permute.sums(x, ROWS, ROWS > 3),
    )


def experts_with_one_scale_each(x):
    """Experts of 128 rows and of none; SwiGLU from values and from bytes."""
    dy, index = x[:, : x.shape[1] // 2].contiguous(), torch.arange(256)
    amax = quantize_experts.expert_amaxes(quantize_experts.row_amaxes(x), WHOLE, index)
    options = {"ends": WHOLE, "weights": ones(256)}
    return (
        amax,
        quantize_experts.expert_amaxes(ones(256), WHOLE),
        quantize_experts.quantize_experts(x, WHOLE, TENSOR, True, True, amax=ones(3), index=index),
        quantize_experts.quantize_experts(x, WHOLE, TENSOR, True, False, scale=ones(3)),
        swiglu_quantize.swiglu_quantize(x, TENSOR, x_spec=BLOCKWISE, **options),
        swiglu_quantize.swiglu_grad_quantize(
            dy, stored(x, BLOCKWISE), TENSOR, y_spec=TENSOR, y_amax=ones(3), **options
        ),
    )


def routing(x):
    chosen = torch.zeros(64, 4, dtype=torch.int64)
    return (
        best_experts.best(x[:, :32].float(), 4),
        place_rows.place(chosen, 8, 128, 1280),
        place_rows.arrange(torch.zeros(2, 8, dtype=torch.int64), 128, 256, 1280),
        three_parts.three_parts(x[:, :32].float()),
        permute.spread(ones(256, 1), torch.arange(256)),
        permute.sums(ones(256, 1), torch.arange(256)[:, None], torch.ones(256, 1, dtype=torch.bool)),
    )


def stacks(x):
    data, codes = fp8(3, 64, 96), torch.zeros(3, 64, 3, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return (
        quantize_derive.transpose(data[:, :32]),
        dequantize.dequantize(data, codes, MXFP8.tile, torch.bfloat16),
        dequantize.dequantize(data[1], codes[1], MXFP8.tile, torch.bfloat16, transposed=True),
    )


def heads(x):
    cos, sin = ANGLES[: len(x)].cos(), ANGLES[: len(x)].sin()
    qkv, weights = x[:, :320].contiguous(), (x[0, :64].contiguous(), x[1, :64].contiguous())
    plain = rope.split_heads(qkv, cos, sin, 3)
    normed = head_norm.norm_heads(qkv, weights, cos, sin, 3, eps=1e-5)
    back = head_norm.norm_heads_grad(*normed, qkv, weights, cos, sin, eps=1e-5)
    tails = latent_heads.turn_tails(x[:, :256].reshape(-1, 2, 128), cos, sin, back=True)
    latent = latent_heads.keys_and_values(x[:, :256].contiguous(), x[:, :64].contiguous(), cos, sin, 2, 64)
    return plain, rope.join_heads(*plain, cos, sin), normed, back, tails, latent_heads.keys_and_values_grad(
        *latent, cos, sin
    )  # fmt: skip


def loss(x):
    labels, logits = torch.arange(len(x)), x.float()
    top, total, picked = cross_entropy.loss_rows(logits, 300, labels)
    cross_entropy.loss_grad(
        logits, logits, labels, top, total, ones(len(x)), 300, first=0, smoothing=0.1, vocab_size=300, z=0.0
    )
    cross_entropy.scale(logits, ones(1))
    return top, total, picked


def products(x):
    """Dense GEMMs of each kind; results in BF16, in FP32, added, behind an address that TMA doesn't reach."""
    m, k = x.shape
    a, b, out, apart = fp8(m, k), fp8(384, k), ones(m, 384), ones(m * 384 + 1)[1:].view(m, 384)
    rows, columns, squares = row_scales(m, -(-k // 128)), row_scales(384, -(-k // 128)), ones(3, -(-k // 128))
    return [
        gemm.gemm_tensorwise(a, b, ones(1), ones(1)),
        gemm.gemm_tensorwise(a, b, ones(1), ones(1), bias=ones(384), fast_accum=True),
        gemm.gemm_tensorwise(a, b, ones(1), ones(1), out=out, accumulate=True),
        gemm.gemm_1d2d(a, b, rows, squares, bias=ones(384)),
        gemm.gemm_1d2d(a, b, rows, squares.t().contiguous().t(), out=apart),
        gemm.gemm_1d1d(a, b, rows, columns, out=out, accumulate=True),
        gemm.gemm_1d1d(a, b, rows, columns, out=apart, accumulate=True),
        gemm.gemm_1d1d(a, b, rows, columns),
        gemm.gemm_1d1d(a, b, rows, columns, backend="tl"),
    ]


def grouped_products(x):
    a, b, w = fp8(256, 512), fp8(3, 384, 512), fp8(384, 256)
    return [
        grouped_gemm.grouped_gemm_tensorwise(a, b, ones(3), ones(3), ENDS),
        grouped_gemm.grouped_gemm_1d2d(a, b, row_scales(256, 4), ones(3, 3, 4), ENDS),
        grouped_gemm.grouped_wgrad_1d1d(w, w, row_scales(384, 5), row_scales(384, 5), ENDS, padding=16),
        grouped_gemm.grouped_wgrad_1d1d(
            w, w, row_scales(384, 5), row_scales(384, 5), ENDS, padding=16, out=ones(3, 384, 384), accumulate=True
        ),
    ]


def monitor(x):
    """The monitor's, with values and without, and of masters."""
    row = operand_stats.Row(torch.zeros(6, dtype=torch.float64), ones(4)[:3], torch.zeros(1024, dtype=torch.int64))
    for spec in (BLOCKWISE, SQUARES, MXFP8, TENSOR):
        storage = Quantizer(spec).store_pair(stored(x, spec), None).rowwise
        operand_stats.look(row, x, storage, 464.0, 1 << 16)
        operand_stats.look(row, None, storage, 464.0, 1 << 16)
        operand_stats.look_at_errors(row, x.reshape(-1)[: x.numel() // 2], storage, 464.0, 16)
    return row


CASES = {
    "blockwise": all_copies(BLOCKWISE),
    "blockwise weights": all_copies(SQUARES),
    "mxfp8": all_copies(MXFP8),
    "tensorwise": all_copies(TENSOR),
    "delayed": with_a_history,
    "norm, blockwise": norm(BLOCKWISE),
    "norm, tensorwise": norm(TENSOR, amax=ones(1)),
    "SwiGLU, blockwise": swiglu(BLOCKWISE),
    "SwiGLU, tensorwise": swiglu(TENSOR, y_amax=ones(1)),
    "bytes": of_bytes,
    "experts": experts,
    "experts with one scale each": experts_with_one_scale_each,
    "stacks": stacks,
    "routing": routing,
    "heads": heads,
    "loss": loss,
    "monitor": monitor,
    "GEMMs": products,
    "grouped GEMMs": grouped_products,
}
# GEMMs whose operands are copied first, or that nobody repeats in place, are launched by the next best way.
ALIGNED, SHIFTED, WIDE = "aligned", "shifted", "wide rows"


def source(layout, seed, shape=(256, 512)):
    """BF16 values: by themselves, two bytes behind an aligned address, or as a part of wider rows."""
    rows, columns = shape
    if layout == SHIFTED:
        return normal(1, rows * columns + 8, seed=seed)[0, 1 : rows * columns + 1].view(rows, columns)
    return normal(rows, columns + (24 if layout == WIDE else 0), seed=seed)[:, :columns]


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
