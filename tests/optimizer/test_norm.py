"""Norms, clipping and zero counts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.optimizer.layout import ALIGNMENT, Entry, Group, Shard, plan_layouts
from megafp8.optimizer.norm import Measure, chunk_squares, clip_coefficient, grid_shifts, split_on_grids, total_of
from megafp8.parallel import ParallelContext
from megafp8.params import Init, ParamSpec
from tests.optimizer.helpers import make_optimizer, make_param, set_grads


def measured(values, specs=None, bucket_elements=None):
    """(Measure, parts) of parameters on one rank."""
    specs = specs or {n: ParamSpec(n, tuple(v.shape), Init("zeros"), False) for n, v in values.items()}
    entries = [Entry(n, v.numel(), torch.float32, False, Group(False)) for n, v in values.items()]
    shards = [Shard(layout, 0) for layout in plan_layouts(entries, bucket_elements=bucket_elements)]
    flats = [torch.zeros(shard.numel) for shard in shards]
    for shard, flat in zip(shards, flats, strict=True):
        for piece in shard.pieces:
            flat[piece.place] = values[piece.name].reshape(-1)
    measure = Measure(shards, specs, ParallelContext(), torch.device("cpu"))
    return measure, [shard.parts(flat) for shard, flat in zip(shards, flats, strict=True)]


def l2_norm(values, **options):
    measure, parts = measured(values, **options)
    return measure.norm(parts)[0]


def test_norm_is_that_of_float64():
    values = {"embedding": torch.randn(8, 4), "bias": torch.randn(3)}
    expected = torch.cat([value.reshape(-1) for value in values.values()]).double().norm()
    norm = l2_norm(values)
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(expected.item(), rel=1e-14)


def test_zeros_are_counted_without_padding():
    spec = ParamSpec("embedding", (5, 4), Init("normal", 1.0), True, local_shape=(8, 4))
    other = ParamSpec("bias", (3,), Init("zeros"), False)
    values = {"embedding": torch.ones(8, 4), "bias": torch.ones(3)}
    values["bias"][1] = 0
    values["embedding"][2, 3] = 0
    values["embedding"][5:] = 0
    measure, parts = measured(values, {"embedding": spec, "bias": other})
    assert measure.measure(parts, count_zeros=True)[2] == 2


def test_norm_does_not_depend_on_buckets():
    values = {f"p{i}": torch.randn(7, 30) * 10 ** (i % 5) for i in range(30)}
    assert torch.equal(l2_norm(values), l2_norm(values, bucket_elements=300))


NUMBERS = st.lists(st.floats(0, 1e80) | st.floats(0, 1) | st.just(0.0), min_size=1, max_size=60)  # FP32 squared: 1e77


@settings(deadline=None)
@given(NUMBERS, st.randoms())
def test_sums_are_exact_and_the_same_in_any_order_and_any_parts(numbers, random):
    values = torch.tensor(numbers, dtype=torch.float64)
    shifts = grid_shifts(values.max())
    expected = split_on_grids(values, shifts)
    shuffled = torch.tensor(random.sample(numbers, len(numbers)), dtype=torch.float64)
    cut = random.randrange(len(numbers) + 1)
    parts = sum(split_on_grids(part, shifts) for part in (shuffled[:cut], shuffled[cut:]))
    assert torch.equal(parts, expected)
    assert total_of(expected).item() == pytest.approx(math.fsum(numbers), rel=4e-16, abs=1e-300)


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 10**6))
def test_chunks_have_the_same_bits_wherever_they_lie(count, seed):
    x = torch.randn(count * ALIGNMENT, generator=torch.Generator().manual_seed(seed))
    whole = chunk_squares(x)
    assert torch.equal(whole, torch.cat([chunk_squares(part) for part in x.split(ALIGNMENT)]))
    torch.testing.assert_close(whole, x.double().view(-1, ALIGNMENT).square().sum(1), rtol=1e-14, atol=0)


def test_norm_neither_overflows_nor_underflows_in_fp32():
    assert l2_norm({"w": torch.tensor([3e30, 4e30])}).item() == pytest.approx(5e30, rel=1e-6)
    assert l2_norm({"w": torch.tensor([3e-30, 4e-30])}).item() == pytest.approx(5e-30, rel=1e-6)
    assert l2_norm({"w": torch.tensor([3e30, 4e-30])}).item() == pytest.approx(3e30, rel=1e-6)
    assert l2_norm({"w": torch.zeros(5)}) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_norm_shows_a_non_finite_element(bad):
    values = torch.randn(100)
    values[63] = bad
    measure, parts = measured({"w": values})
    norm, flag = measure.norm(parts)
    assert not torch.isfinite(norm)
    assert flag
    values[63] = 0
    measure, parts = measured({"w": values})
    assert not measure.norm(parts)[1]
    assert measure.norm(parts, torch.tensor(True))[1]


def test_an_empty_parameter_adds_nothing():
    assert l2_norm({"a": torch.zeros(0, 4), "b": torch.tensor([3.0, 4.0])}) == 5


def test_clipping_scales_down_only():
    for norm, clip, expected in [(10.0, 1.0, 1 / (10 + 1e-6)), (0.5, 1.0, 1.0), (10.0, 0.0, 1.0), (0.0, 1.0, 1.0)]:
        assert clip_coefficient(torch.tensor(norm, dtype=torch.float64), clip).item() == pytest.approx(expected)


def test_step_reports_zeros_and_norms_of_the_mean_gradient():
    spec, param = make_param("w", (4, 4), std=1.0)
    optimizer = make_optimizer([(spec, param)], clip_grad=1.0)
    grads = set_grads(optimizer, torch.Generator().manual_seed(0))["w"]
    optimizer.grads.buffer(param)[0] = 0
    stats = optimizer.step(lr=0.0, weight_decay=0.0, valid_tokens=8, with_num_zeros=True, with_params_norm=True)
    assert stats.num_zeros == 4
    assert stats.grad_norm.item() == pytest.approx(grads[1:].norm().item() / 8, rel=1e-6)
    assert stats.params_norm.item() == pytest.approx(optimizer.masters.views["w"].norm().item(), rel=1e-6)
    assert math.isclose(optimizer.params_norm().item(), stats.params_norm.item())
