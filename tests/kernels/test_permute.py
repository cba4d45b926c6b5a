"""Rows copied and summed by index: the kernels, emulated, against the plain functions; compiled for Hopper."""

import pytest
import torch
from megafp8.kernels import best_experts, permute, place_rows, quantize_derive, three_parts

from megafp8.core.moe import logits
from megafp8.core.moe.permutation import Permutation, arrivals, spread, sums
from megafp8.core.moe.routing import best
from megafp8.fp8 import get_recipe
from megafp8.fp8.grouped_rows import RowSpec, pack, take_rows, unpack
from tests.kernels import testing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the GPU that is here")


def assert_placed(got: place_rows.Placed, want: Permutation) -> None:
    for name, right in (
        ("choices", want.choices),
        ("tokens", want.tokens),
        ("rows", want.rows.reshape(-1)),
        ("room", want.counts),
        ("ends", want.ends),
    ):
        assert torch.equal(getattr(got, name), right), name
        assert getattr(got, name).dtype == right.dtype


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_the_plain_functions(dtype, drops):
    generator = torch.Generator().manual_seed(0)
    experts = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(5)])
    if drops:
        experts[::2, 1] = 6
    order = Permutation.of(experts, 6, drops=drops, alignment=4)
    x = torch.randn(5, 304, generator=generator).to(dtype)
    with testing.emulated_launches():
        rows = permute.spread(x, order.tokens)
    assert torch.equal(rows, spread(x, order.tokens, order.filled))
    y = torch.where((order.choices < 0)[:, None], torch.nan, rows * 3)
    with testing.emulated_launches():
        out = permute.sums(y, order.rows, order.kept)
    torch.testing.assert_close(out, sums(y, order.rows, order.kept), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize(("tokens", "topk", "experts"), [(1, 1, 3), (40, 3, 6), (75, 4, 100)])
def test_rows_are_those_of_a_stable_sort(tokens, topk, experts, alignment, monkeypatch):
    """CASES 56; experts without tokens among them, more blocks than are added up at a time."""
    monkeypatch.setattr(place_rows, "_BLOCK", 64)
    monkeypatch.setattr(place_rows, "_BLOCKS", 2)
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(topk).indices
    chosen[chosen == 1] = 0
    want = Permutation.of(chosen, experts, alignment=alignment)
    with testing.emulated_launches():
        got = place_rows.place(chosen, experts, alignment, len(want.choices))
    assert_placed(got, want)


@pytest.mark.parametrize(("experts", "count"), [(6, 6), (16, 2), (100, 8)])
def test_best_experts_are_those_of_a_stable_sort(experts, count):
    """Equal scores, zeros of both signs, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (40, experts), generator=generator).float()
    scores[3] *= 1e-40
    scores[5, ::2], scores[5, 1::2] = 0.0, -0.0
    scores[6, 1], scores[6, 3], scores[6, 4] = torch.nan, torch.inf, -torch.inf
    scores[7] = -torch.inf
    with testing.emulated_launches():
        got = best_experts.best(scores, count)
    assert torch.equal(got, best(scores, count))


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize(("senders", "experts"), [(1, 1), (2, 5), (3, 16), (5, 3)])
def test_rows_that_arrive_are_those_of_a_stable_sort(senders, experts, alignment, monkeypatch):
    """By sender and expert, some with none; more rows than a program writes at a time."""
    monkeypatch.setattr(place_rows, "_BLOCK", 64)
    arriving = torch.randint(90, (senders, experts), generator=torch.Generator().manual_seed(0))
    arriving[0, 0] = 150
    arriving[-1, experts // 2] = 0
    if experts > 2:
        arriving[:, 2] = 0
    want = arrivals(arriving, arriving.tolist(), alignment)
    assert place_rows.arranges(arriving)
    with testing.emulated_launches():
        got = place_rows.arrange(arriving, alignment, len(want.rows), len(want.choices))
    assert_placed(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_lie_apart(dtype):
    """Rows and a number behind each, which travel together: nothing else is written."""
    generator = torch.Generator().manual_seed(0)
    x, numbers, index = (
        torch.randn(9, 40, generator=generator).to(dtype),
        torch.randn(9, 1),
        torch.tensor([3, -1, 0, 8]),
    )
    for run in ("spread", "sums"):
        index = index if run == "spread" else index.abs()
        made = []
        for kernels in (False, True):
            whole = torch.full((4, 40 * dtype.itemsize + 16), 7, dtype=torch.uint8)
            rows, behind = whole[:, : 40 * dtype.itemsize].view(dtype), whole[:, -4:].view(torch.float32)
            with testing.emulated_launches():
                if run == "spread":
                    parts = (permute.spread,) if kernels else (lambda x, i, out: spread(x, i, True, out),)
                    parts[0](x, index, rows), parts[0](numbers, index, behind)
                else:
                    (permute.sums if kernels else sums)(x, index[:, None], None, rows)
                    (permute.sums if kernels else sums)(numbers, index[:, None], None, behind)
            made.append(whole)
        assert torch.equal(*made)
        assert (made[0][:, 40 * dtype.itemsize : -4] == 7).all()


def test_numbers_in_three_parts():
    x = torch.randn(37, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 20, 24)
    x[0, :4] = torch.tensor([0.0, -0.0, 1.0, torch.inf])
    for one in (x, x.t()):
        with testing.emulated_launches():
            got = three_parts.three_parts(one)
        want = logits.three_parts(one)
        assert torch.equal(got.nan_to_num(9), want.nan_to_num(9))
        assert got.dtype == want.dtype


@pytest.mark.parametrize("kept", [None, True])
def test_rows_of_one_number(kept):
    generator = torch.Generator().manual_seed(0)
    x, index = torch.randn(50, 1, generator=generator), torch.randint(0, 50, (3000,), generator=generator)
    flags = None if kept is None else torch.rand(3000, 1, generator=generator) < 0.5
    x[7] = torch.nan
    if flags is not None:
        flags[index == 7] = False
    with testing.emulated_launches():
        summed = permute.sums(x, index[:, None], flags)
        picked = permute.spread(x, torch.where(index % 3 > 0, index, -1))
    assert torch.equal(summed.nan_to_num(9), sums(x, index[:, None], flags).nan_to_num(9))
    assert torch.equal(picked.nan_to_num(9), torch.where((index % 3 > 0)[:, None], x[index], 0).nan_to_num(9))


@pytest.mark.parametrize("width", [99, 132])
def test_bytes_are_copied(width):
    x = torch.randint(256, (5, width), dtype=torch.uint8)
    index = torch.tensor([4, 0, 0, -1, 2])
    with testing.emulated_launches():
        rows = permute.spread(x, index)
    assert torch.equal(rows, x[index].masked_fill((index < 0)[:, None], 0))


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("width", [96, 384])
def test_packed_rows_are_read_where_they_lie(name, width):
    """What an FP8 dispatch received: rows apart from each other, their scales between."""
    quantizer = get_recipe(name).quantizer("input")
    index = torch.randint(-10, 40, (64,), generator=torch.Generator().manual_seed(0))
    rows = unpack(quantizer, pack(quantizer.quantize(torch.randn(40, width).bfloat16()).rowwise), width)
    assert not rows.data.is_contiguous()
    stored, spec = (rows.data, rows.scale_inv), quantizer.spec
    with testing.emulated_launches():
        made = quantize_derive.quantize_grouped(stored, None, spec, True, True, index=index, derived=True)
        copied = permute.spread(rows.data.view(torch.uint8), torch.arange(40))
    expected = take_rows(rows, index, RowSpec(quantizer, True, 128), torch.bfloat16)
    for (data, _), storage in zip(made, (expected.rowwise, expected.colwise), strict=True):
        assert torch.equal(data.view(torch.uint8), storage.data.view(torch.uint8))
    assert torch.equal(copied, rows.data.view(torch.uint8))


def test_compiled_for_hopper():
    x, index = torch.empty(64, 7168, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    with testing.captured_launches() as launches:
        permute.spread(x, index)
        permute.sums(x, index.view(8, 8), torch.ones(8, 8, dtype=torch.bool))
        permute.sums(x, index.view(8, 8), None)
    with testing.captured_launches() as others:
        place_rows.place(torch.zeros(64, 8, dtype=torch.int64), 128, 128, 16768)
        permute.spread(torch.empty(64, 1), index)
        best_experts.best(torch.empty(64, 128), 8)
        place_rows.arrange(torch.zeros(8, 64, dtype=torch.int64), 128, 4096, 12288)
        three_parts.three_parts(torch.empty(64, 128))
    assert all(testing.resources(testing.compile_launch(launch)).spills == 0 for launch in others)
    for launch in launches:
        used = testing.resources(testing.compile_launch(launch))
        assert used.spills == 0
        assert any(op.startswith("STG.E.128") for op in used.instructions), launch.kernel.__name__
