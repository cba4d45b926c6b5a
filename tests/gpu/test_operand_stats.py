"""The monitor's kernels against their twin on the CPU: counts, extremes and histograms exactly, energies to 1e-12.

Without a GPU, `tests/kernels` runs this file in Triton's interpreter, and some of it in the PTX emulator.
"""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from megafp8.kernels import operand_stats as kernels

from megafp8.fp8 import operand_stats
from megafp8.fp8.formats import FORMATS, Scale, Tile
from megafp8.fp8.operand_stats import OperandStats
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import Quantized, QuantizedStorage
from tests.cases import quick
from tests.gpu.quantize_cases import SPECS, holes, normal, wide
from tests.kernels import testing

DEVICE = testing.test_device() or torch.device("cpu")  # there tests/kernels emulates launches
INTERPRETING = testing.interpreting()
if INTERPRETING:
    testing.fix_interpreter()


def there(x):
    """A tensor, or a storage, on the device of the kernels; strides stay."""
    if isinstance(x, torch.Tensor):
        raw = x.view(torch.uint8) if x.element_size() == 1 else x
        return torch.empty_strided(raw.shape, raw.stride(), dtype=raw.dtype, device=DEVICE).copy_(raw).view(x.dtype)
    return QuantizedStorage(there(x.data), there(x.scale_inv), x.tile, x.scale, x.orientation, x.counts)


def seen():
    """Stats of the twin and of the kernels: functions that add to both, and compare."""
    plain, fast = OperandStats.empty(2), OperandStats.empty(2, DEVICE)

    def add(x, storage):
        plain.add(1, x, pair(storage))
        with mock.patch.object(operand_stats, "_kernels_for", return_value=kernels):
            fast.add(1, None if x is None else there(x), pair(there(storage)))

    return plain, fast, add


def pair(storage):
    return Quantized(storage) if storage.orientation == "rowwise" else Quantized(None, storage)


def assert_alike(fast, plain):
    counts = [operand_stats.COLUMNS.index(name) for name in ("elements", "underflow", "saturated", "compared")]
    energies = [operand_stats.COLUMNS.index(name) for name in ("signal", "noise")]
    got, want = fast.sums.cpu(), plain.sums
    assert torch.equal(got[:, counts], want[:, counts]), (got, want)
    torch.testing.assert_close(got[:, energies], want[:, energies], rtol=1e-12, atol=0)
    assert torch.equal(fast.largest.cpu(), plain.largest), (fast.largest, plain.largest)
    assert torch.equal(fast.histogram.cpu(), plain.histogram)


@pytest.fixture(autouse=True)
def no_reference(monkeypatch):
    """On the device only kernels add."""
    plainly = OperandStats._add_plainly

    def on_the_cpu(stats, row, x, storage):
        assert operand_stats._kernels_for(storage.data) is None, "the kernels refused it"
        plainly(stats, row, x, storage)

    monkeypatch.setattr(OperandStats, "_add_plainly", on_the_cpu)


def quantized(x, name, orientation="rowwise"):
    made = Quantizer(SPECS[name]).quantize(x, orientation == "rowwise", orientation == "colwise")
    return getattr(made, orientation)


KINDS = [(name, orientation) for name in SPECS for orientation in ("rowwise", "colwise")]
QUICK = [
    ("blockwise", "rowwise"),
    ("blockwise_2d_fp32", "colwise"),
    ("mxfp8", "colwise"),
    ("tensorwise_e5m2", "rowwise"),
]


@pytest.mark.parametrize(("name", "orientation"), quick(KINDS, QUICK))
def test_every_kind_of_operand(name, orientation):
    """Ragged, with NaN, infinities, zeros; then another one on top of it."""
    plain, fast, add = seen()
    for x in (holes(150, 72), wide(64, 256, torch.float32)):
        add(x, quantized(x, name, orientation))
    assert_alike(fast, plain)
    assert plain.sums[1, :2].all(), "nothing was compared, or nothing underflowed"


@pytest.mark.parametrize("name", ["blockwise", "mxfp8_2d", "tensorwise_e5m2"])
def test_large_operands_are_sampled(monkeypatch, name):
    """And programs do several pieces each."""
    monkeypatch.setattr(operand_stats, "SAMPLED", 3 * 128 * 40)
    monkeypatch.setattr(kernels, "PROGRAMS", 2)
    x = normal(1000, 40) * torch.logspace(-3, 3, 1000)[:, None].bfloat16()
    plain, fast, add = seen()
    add(x, quantized(x, name))
    assert_alike(fast, plain)
    assert plain.sums[1, 0] == 3 * 128 * 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_of_any_strides(dtype):
    """Rows apart from each other, and transposed; at addresses of any alignment."""
    whole = normal(90, 203, torch.float32).to(dtype)
    plain, fast, add = seen()
    for x in (whole[:, 3:100], whole.t()[5:, :33], whole.t()):
        add(x, quantized(x.contiguous(), "blockwise"))
    assert_alike(fast, plain)


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "tensorwise_e5m2"])
def test_saturated_elements_and_scales_alone(name):
    """Under scales that don't fit; and an operand whose values nobody has any more."""
    storage, form = quantized(normal(70, 130), name), SPECS[name].format
    limit = operand_stats.beyond(form) / form.fmax
    value = storage.dequantize()
    x = torch.where(torch.rand(value.shape, generator=torch.Generator().manual_seed(0)) < 0.5, value, value * 2)
    x[::2] = value[::2] * limit  # an element exactly there has not saturated
    plain, fast, add = seen()
    add(x, storage)
    add(None, storage)
    assert_alike(fast, plain)
    assert 0 < plain.sums[1, 2] < 70 * 130 / 2


GROUPED = [
    (name, orientation) for name in ("blockwise", "mxfp8", "tensorwise") for orientation in ("rowwise", "colwise")
]


@pytest.mark.parametrize(("name", "orientation"), quick(GROUPED, GROUPED[1:4:2] + GROUPED[4:5]))
def test_experts_with_and_without_rows(name, orientation):
    """Tiles restart at each expert: each is compared on its own."""
    x, counts = holes(140, 40), (10, 0, 1, 129)
    parts = [quantized(rows, name, orientation) for rows in x.split(counts) if len(rows)]
    scales = [part.scale_inv for part in parts]
    if name == "tensorwise":
        scales.insert(1, torch.ones(1))  # of an expert without rows
    dim = 0 if orientation == "rowwise" else 1
    data, scale_inv = joined([part.data for part in parts], dim), joined(scales, 0 if name == "tensorwise" else dim)
    storage = replace(parts[0], data=data, scale_inv=scale_inv, counts=counts)
    plain, fast, add = seen()
    add(x, storage)
    add(None, storage)
    add(x[:0], quantized(x[:0], name, orientation))
    assert_alike(fast, plain)


def joined(tensors, dim):
    raw = [x.view(torch.uint8) if x.element_size() == 1 else x for x in tensors]
    return torch.cat(raw, dim).view(tensors[0].dtype)


@pytest.mark.parametrize("name", ["blockwise_2d", "mxfp8_2d", "blockwise", "tensorwise"])
def test_pieces_of_a_primary_weights_masters(name):
    x = normal(150, 72)
    storage = quantized(x, name)
    plain, fast, _ = seen()
    for start, end in ((0, 5), (37, 37 + 4096), (5000, 150 * 72)):
        plain.add_errors(1, x.view(-1)[start:end], storage, start)
        with mock.patch.object(operand_stats, "_kernels_for", return_value=kernels):
            fast.add_errors(1, there(x.view(-1)[start:end]), there(storage), start)
    assert_alike(fast, plain)


def test_bins_begin_where_the_numbers_do():
    """Scales next to every edge, subnormal ones, and those that are no scales."""
    edges = torch.tensor([2.0 ** (b / 4 - 128) for b in range(operand_stats.BINS)], dtype=torch.float64)
    near = edges.float()
    bits = near.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)
    odd = torch.tensor([0.0, 2.0**-149, 2.0**-129, math.inf, math.nan]).view(torch.int32)
    scales = torch.cat([bits.flatten(), odd]).view(torch.float32)
    scales = scales[: len(scales) // 8 * 8].view(-1, 8)
    data = torch.ones(scales.shape[0], 8 * 128).to(FORMATS["e4m3"].dtype)
    storage = QuantizedStorage(data, scales, Tile("1d", 128), Scale.FP32, "rowwise")
    plain, fast, add = seen()
    add(None, storage)
    finite = scales[scales.isfinite()].double()
    exact = torch.bucketize(finite, edges, right=True).sub(1).clamp(min=0).bincount(minlength=operand_stats.BINS)
    exact[-1] += scales.numel() - len(finite)
    assert torch.equal(plain.histogram[1], exact)
    assert torch.equal(fast.histogram.cpu(), plain.histogram)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).view(32, 8)
    add(None, QuantizedStorage(data[:32], codes, Tile("1d", 128), Scale.E8M0, "rowwise"))
    assert torch.equal(fast.histogram.cpu(), plain.histogram)
    assert fast.largest.cpu().isnan().equal(plain.largest.isnan())
