"""Experts on a GPU: bytes of the CPU, products within the tensor cores' error, no wait for the device at EP 1."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.build import BuildContext
from megafp8.core.moe.layer import MoELayer
from megafp8.core.moe.permutation import Permutation, arrivals, permute_weights, spread, sums
from megafp8.core.transformer.core_attention import Sequences
from megafp8.fp8 import DelayedScaling, get_recipe
from megafp8.fp8.grouped_linear import GroupedLinear
from megafp8.fp8.grouped_rows import RowSpec, pack, take_rows, unpack, unpack_values
from megafp8.fp8.policy import Policy
from megafp8.step import StepContext
from tests.core.families import DEEPSEEK
from tests.core.helpers import Sink, randomize, relative_error
from tests.core.moe.test_one_by_one import as_spread_and_after
from tests.fp8 import test_grouped_linear as cases
from tests.gpu.waiting import no_waiting

TILED = [name for name in cases.RECIPES if name != "none"]


def same(a, b) -> bool:
    return cases.same(replace(a, data=a.data.cpu(), scale_inv=a.scale_inv.cpu()), b)


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("width", [96, 384])
def test_rows_have_the_bytes_of_the_cpu(name, width):
    quantizer = cases.RECIPES[name].quantizer("input")
    x = torch.randn(300, width).bfloat16() * torch.logspace(-3, 3, 300)[:, None].bfloat16()
    index = torch.randint(-60, 300, (384,))
    index[200:256] = -1
    spec = RowSpec(quantizer, colwise=True, alignment=128)
    expected = take_rows(x, index, spec, torch.bfloat16)
    got = take_rows(x.cuda(), index.cuda(), spec, torch.bfloat16)
    assert same(got.rowwise, expected.rowwise)
    assert same(got.colwise, expected.colwise)
    values = take_rows(x, index, spec, torch.bfloat16, derives=False)
    got = take_rows(x.cuda(), index.cuda(), spec, torch.bfloat16, derives=False)
    assert same(got.rowwise, expected.rowwise)
    assert same(got.colwise, values.colwise)
    if name in ("blockwise", "mxfp8"):
        stored = quantizer.quantize(x.cuda()).rowwise
        packed = pack(stored)
        assert torch.equal(packed.cpu(), pack(quantizer.quantize(x).rowwise))
        for source in (stored, unpack(quantizer, packed, width)):
            got = take_rows(source, index.cuda(), spec, torch.bfloat16)
            assert same(got.rowwise, expected.rowwise)
            assert same(got.colwise, expected.colwise)
        values = unpack_values(quantizer, packed, width, torch.bfloat16)
        assert torch.equal(values.cpu(), quantizer.quantize(x).rowwise.dequantize(torch.bfloat16))


@pytest.mark.parametrize("name", TILED)
def test_stacks_have_the_bytes_of_the_cpu(name):
    recipe = cases.RECIPES[name]
    here = GroupedLinear(cases.linears(recipe)).stack
    there = GroupedLinear([linear.cuda() for linear in cases.linears(recipe)]).stack
    for gemm_name in ("fprop", "dgrad"):
        assert same(there.operand(gemm_name), here.operand(gemm_name))


@pytest.mark.parametrize("name", cases.RECIPES)
def test_products_are_near_the_cpu(name):
    """CASES 11, 12, 13: empty experts, odd numbers of rows, NaN past the last one and in whatever is allocated."""
    recipe, results = cases.RECIPES[name], []
    room, alignment = cases.filled(recipe)
    for device in ("cpu", "cuda"):
        made = [linear.to(device) for linear in cases.linears(recipe)]
        sink = cases.Sink(made, adjacent=True)
        sink.buffers = [buffer.to(device) for buffer in sink.buffers]
        x = cases.rows(recipe, 1, cases.IN).to(device).requires_grad_()
        if device == "cuda":
            poison = [torch.full((1 << 22,), torch.nan, device=device) for _ in range(8)]
            del poison
        ends = torch.tensor(room, device=device).cumsum(0).int()
        y = GroupedLinear(made)(x, ends, StepContext(grads=sink), alignment=alignment)
        y.backward(cases.rows(recipe, 2, cases.OUT).to(device))
        used = sum(room)
        results.append([y[:used], x.grad[:used], *(buffer - 0.5 for buffer in sink.buffers)])
    for expected, got in zip(*results, strict=True):
        assert torch.isfinite(got).all()
        assert relative_error(got.cpu(), expected) < 5e-3


WIDE = replace(DEEPSEEK, hidden_size=256, moe_ffn_hidden_size=128, moe_shared_expert_intermediate_size=128)


def layer(device: str, recipe) -> MoELayer:
    build = BuildContext(WIDE, dtype=torch.bfloat16, device=torch.device(device), recipe_of=Policy(recipe))
    made = MoELayer("layers.0.mlp", build)
    randomize(made.cpu(), 3)
    return made.to(device)


RECIPES = [None, "blockwise", "mxfp8", "tensorwise", "delayed"]


@pytest.mark.parametrize("name", RECIPES)
def test_layer_is_near_the_cpu(name):
    """The second of two steps, which is the first with scales of a history."""
    results = []
    for device in ("cpu", "cuda"):
        made = layer(device, name and get_recipe(name))
        scaling = DelayedScaling.of(made)
        for _ in range(2):
            sink = Sink(made)
            x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
            x = x.to(device).requires_grad_()
            y = made(x, Sequences(2, 32), StepContext(grads=sink, scaling=scaling))
            y.backward(torch.ones_like(y))
            if scaling is not None:
                scaling.advance()
        results.append([y.float(), x.grad.float(), *sink.buffers.values()])
    for expected, got in zip(*results, strict=True):
        # A tensor's scale moves with its amax, and with it the rounding of every element: in E5M2 gradients the most.
        assert relative_error(got.cpu(), expected) < (0.15 if name in ("tensorwise", "delayed") else 2e-2)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "tensorwise"])
def test_gradients_quantized_as_they_are_spread(recipe):
    """By one kernel, or row by row copied and then quantized: the same bits, of every gradient of the layer."""
    one, other = as_spread_and_after(recipe, "cuda", 8192)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_waits_for_the_device(name):
    """Forward and backward of a layer whose experts are all here; counts stay on the device."""
    made = layer("cuda", name and get_recipe(name))
    x = torch.randn(64, 256, device="cuda").bfloat16().requires_grad_()
    grad, step = torch.ones_like(x), StepContext(grads=Sink(made), scaling=DelayedScaling.of(made))
    made(x, Sequences(2, 32), step).backward(grad)
    if step.scaling is not None:
        step.scaling.advance()
        made(x, Sequences(2, 32), step).backward(grad)
    with no_waiting():
        made(x, Sequences(2, 32), step).backward(grad)


@pytest.mark.parametrize("alignment", [1, 32, 128])
@pytest.mark.parametrize(("tokens", "experts", "topk"), [(1, 4, 2), (300, 16, 8), (4096, 128, 8), (9000, 500, 3)])
def test_rows_are_those_of_a_stable_sort(tokens, experts, topk, alignment):
    """CASES 56; on the device alone."""
    chosen = torch.rand(tokens, experts).topk(topk).indices
    chosen[chosen == 1] = 0
    want, there = Permutation.of(chosen, experts, alignment=alignment), chosen.cuda()
    Permutation.of(there, experts, alignment=alignment)  # compiles
    with no_waiting():
        got = Permutation.of(there, experts, alignment=alignment)
        parts = [(name, getattr(got, name)) for name in ("choices", "tokens", "rows", "counts", "ends")]
    for name, part in parts:
        assert torch.equal(part.cpu(), getattr(want, name)), name
    weights = torch.randn(tokens, topk).cuda().requires_grad_()
    rows = permute_weights(weights, got)
    choices = want.choices
    picked = torch.where(choices >= 0, weights.detach().cpu().flatten()[choices.clamp(min=0)], 0)
    assert torch.equal(rows.detach().cpu(), picked)
    rows.backward(rows.detach())
    assert torch.equal(weights.grad, weights.detach())


@pytest.mark.parametrize("alignment", [1, 128])
@pytest.mark.parametrize(("senders", "experts"), [(1, 4), (2, 64), (8, 32), (64, 8), (3, 1)])
def test_rows_that_arrive_are_those_of_a_stable_sort(senders, experts, alignment):
    """From some senders none, for some experts none, for one far more than for the others."""
    arriving = torch.randint(900, (senders, experts)) * (torch.rand(senders, experts) > 0.2)
    arriving[0, -1], arriving[:, experts // 2] = 20000, arriving[:, experts // 2] * (experts < 2)
    numbers = arriving.tolist()
    want, there = arrivals(arriving, numbers, alignment), arriving.cuda()
    arrivals(there, numbers, alignment)  # compiles
    with no_waiting():
        got = arrivals(there, numbers, alignment)
        parts = [(name, getattr(got, name)) for name in ("choices", "tokens", "rows", "counts", "ends")]
    for name, part in parts:
        assert torch.equal(part.cpu(), getattr(want, name)), name


@pytest.mark.parametrize("width", [256, 7168])
def test_rows_and_numbers_that_travel_together(width):
    """Written side by side into rows that lie apart, in each of several numbers of rows."""
    for rows in (5, 4096, 4097, 5):
        x, numbers = torch.randn(700, width).bfloat16().cuda(), torch.randn(700, 1).cuda()
        index = torch.randint(700, (rows,)).cuda()
        for fill in (spread, sums):
            whole = torch.full((rows, 2 * width + 16), 7, dtype=torch.uint8, device="cuda")
            packed, behind = whole[:, : 2 * width].view(torch.bfloat16), whole[:, -4:].view(torch.float32)
            for source, target in ((x, packed), (numbers, behind)):
                fill(source, index, False, target) if fill is spread else fill(source, index[:, None], None, target)
            assert torch.equal(packed, x[index])
            assert torch.equal(behind, numbers[index])
            assert (whole[:, 2 * width : -4] == 7).all()


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_copied_and_summed_by_index(dtype, drops):
    experts = torch.stack([torch.randperm(16)[:8] for _ in range(300)])
    if drops:
        experts[::3, 2] = 16
    x = torch.randn(300, 7168).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        order = Permutation.of(experts.to(device), 16, drops=drops, alignment=128)
        rows = spread(x.to(device), order.tokens, order.filled)
        holes = torch.where((order.choices < 0)[:, None], torch.nan, rows)
        results.append((rows.cpu(), sums(holes, order.rows, order.kept).cpu()))
    (rows, total), (same_rows, near) = results
    assert torch.equal(rows, same_rows)
    torch.testing.assert_close(near, total, rtol=2**-8, atol=1e-5)
