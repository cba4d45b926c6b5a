"""Grouped linears against the same linears one by one, on the same rows: the same bits."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megafp8.fp8 import DelayedScaling, Linear, expert_scales, get_recipe
from megafp8.fp8.grouped_linear import GroupedLinear, can_group, rows_filled_to
from megafp8.fp8.grouped_rows import RowSpec, pack, row_bytes, take_rows, travels, unpack
from megafp8.fp8.storage import Quantized, QuantizedStorage
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.fp8.weight_stack import stacked
from megafp8.parallel import Axis
from megafp8.params import GradSink, Init, ParamSpec
from megafp8.step import Phase, StepContext

COUNTS, IN, OUT = [1, 0, 37, 130], 96, 160
RECIPES = {
    "none": None,
    "blockwise": get_recipe("blockwise"),
    "fp32 scales": get_recipe("blockwise", power_of_two_scales=False),
    "1d weights": get_recipe("blockwise", weight_tile="1d"),
    "mxfp8": get_recipe("mxfp8"),
    "tensorwise": get_recipe("tensorwise"),
}


def linears(recipe) -> list[Linear]:
    torch.manual_seed(0)
    made = []
    for g in range(len(COUNTS)):
        spec = ParamSpec(f"experts.{g}.fc1.weight", (OUT, IN), Init("normal", 1.0), True, expert=True)
        options = {"weight_spec": spec, "params_dtype": torch.bfloat16, "name": f"experts.{g}.fc1"}
        made.append(Linear(IN, OUT, False, recipe=recipe, **options))
        torch.nn.init.normal_(made[-1].weight)
    return made


def filled(recipe, block: int | None = None) -> tuple[list[int], int]:
    """Rows of each group with its filling, and the alignment."""
    block = block or rows_filled_to(recipe)
    return [-(-count // block) * block for count in COUNTS], block


def rows(recipe, seed: int, width: int, block: int | None = None) -> torch.Tensor:
    """Rows of the groups, zeros between; NaN past the last."""
    generator = torch.Generator().manual_seed(seed)
    room, _ = filled(recipe, block)
    x = torch.full((sum(room) + 8, width), torch.nan, dtype=torch.bfloat16)
    start = 0
    for count, size in zip(COUNTS, room, strict=True):
        x[start : start + size] = 0
        x[start : start + count] = torch.randn(count, width, generator=generator).bfloat16()
        start += size
    return x


class Sink(GradSink):
    """Gradient buffers, adjacent or apart."""

    def __init__(self, made, adjacent: bool) -> None:
        flat = torch.full((len(made), OUT + 4, IN), 0.5)
        self.buffers = [flat[g, :OUT] if adjacent else flat[g, :OUT].clone() for g in range(len(made))]
        self.of = {id(linear.weight): g for g, linear in enumerate(made)}
        self.calls = []

    def buffer(self, param):
        return self.buffers[self.of[id(param)]]

    def ready(self, param):
        self.calls.append(self.of[id(param)])


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_linears_one_by_one(name, adjacent):
    """CASES 11, 12, 13: empty groups, odd numbers of rows, NaN past the last; each weight ready once."""
    recipe = RECIPES[name]
    room, alignment = filled(recipe)
    made = linears(recipe)
    x = rows(recipe, 1, IN).requires_grad_()
    dy = rows(recipe, 2, OUT)
    ends = torch.tensor(room).cumsum(0).int()
    sink = Sink(made, adjacent)
    assert can_group(made)
    y = GroupedLinear(made)(x, ends, StepContext(grads=sink), alignment=alignment)
    y.backward(dy)
    assert sink.calls == list(range(len(made)))

    alone, start = Sink(made, True), 0
    for g, size in enumerate(room):
        own = slice(start, start + size)
        part = x.detach()[own].requires_grad_()
        out = made[g](part, StepContext(grads=alone))
        out.backward(dy[own])
        assert torch.equal(y[own], out)
        assert torch.equal(x.grad[own], part.grad)
        assert torch.equal(sink.buffers[g], alone.buffers[g])
        assert (sink.buffers[g] != 0.5).any() == bool(COUNTS[g])
        start += size


HISTORIES = [({}, 128), ({"margin": 1, "amax_compute_algo": "most_recent"}, 1), ({"power_of_two_scales": True}, 16)]


@pytest.mark.parametrize(("axes", "block"), HISTORIES, ids=str)
def test_histories_are_those_of_linears_one_by_one(axes, block):
    """CASE 22: of each weight and its rows; recomputed forwards and evaluations leave none."""
    recipe = get_recipe("delayed", amax_history_len=2, **axes)
    together, apart = linears(recipe), linears(recipe)
    assert can_group(together)
    room, _ = filled(recipe, block)
    grouped, ends = partial(GroupedLinear(together), alignment=block), torch.tensor(room).cumsum(0).int()
    scaling, alone = (DelayedScaling.of(torch.nn.ModuleList(made)) for made in (together, apart))
    for step in range(4):
        x, dy = (rows(recipe, 10 * step + i, width, block) * 2.0 ** (3 * step) for i, width in enumerate((IN, OUT)))
        leaf, sink, other = x.clone().requires_grad_(), Sink(together, True), Sink(apart, True)
        context = StepContext(grads=sink, scaling=scaling)
        with torch.no_grad():
            grouped(5 * leaf, ends, replace(context, phase=Phase.EVAL))
        y = grouped(leaf, ends, context)
        with torch.no_grad():
            assert torch.equal(grouped(leaf, ends, context.recompute())[: ends[-1]], y[: ends[-1]])
        y.backward(dy)
        start = 0
        for linear, size in zip(apart, room, strict=True):
            own = slice(start, start + size)
            part = x[own].clone().requires_grad_()
            out = linear(part, StepContext(grads=other, scaling=alone))
            out.backward(dy[own])
            assert torch.equal(y[own], out)
            assert torch.equal(leaf.grad[own], part.grad)
            start += size
        assert all(torch.equal(a, b) for a, b in zip(sink.buffers, other.buffers, strict=True))
        assert torch.equal(scaling.pending(), alone.pending())
        assert scaling.pending().count_nonzero() == len(scaling.pending()) - 2  # an expert without rows
        for state in (scaling, alone):
            state.advance()
        with torch.no_grad():
            for a, b in zip(together, apart, strict=True):
                b.weight.copy_(a.weight.mul_(1.5))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("role", ["input", "grad_output"])
def test_amaxes_for_scales(role, power_of_two):
    """Of whatever amax a history has made a scale, an amax is found that gives that scale again, bit for bit."""
    quantizer = get_recipe("delayed", power_of_two_scales=power_of_two).quantizer(role)
    mantissas = (torch.arange(1 << 23, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    for amax in (mantissas, torch.logspace(-100, 100, 1001, base=2.0), torch.zeros(1)):
        scales = quantizer.scales(amax)[0]
        assert torch.equal(quantizer.scales(expert_scales.amax_for(quantizer, scales))[0], scales)


def test_without_a_sink_gradients_are_returned():
    made = linears(RECIPES["blockwise"])
    room, alignment = filled(RECIPES["blockwise"])
    x = rows(RECIPES["blockwise"], 1, IN)
    y = GroupedLinear(made)(x, torch.tensor(room).cumsum(0).int(), alignment=alignment)
    y[: sum(room)].float().sum().backward()
    assert made[3].weight.grad.abs().sum() > 0
    assert torch.equal(made[1].weight.grad, torch.zeros_like(made[1].weight))


@pytest.mark.parametrize("fresh", [{1}, {0, 3}, set(range(len(COUNTS)))], ids=["empty", "some", "all"])
@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("name", ["none", "blockwise", "tensorwise"])
def test_a_first_gradient_is_written_whatever_the_others_of_the_stack_have(name, adjacent, fresh):
    """fresh: the weights that have no gradient of this step yet; their buffers hold NaN."""
    recipe, found = RECIPES[name], []
    room, alignment = filled(recipe)
    for content, adds in ((torch.nan, lambda g: g not in fresh), (0.0, lambda g: True)):
        made = linears(recipe)
        sink = Sink(made, adjacent)
        for g in fresh:
            sink.buffers[g].fill_(content)
        sink.target = lambda param, sink=sink, adds=adds: (sink.buffer(param), adds(sink.of[id(param)]))
        y = GroupedLinear(made)(
            rows(recipe, 1, IN), torch.tensor(room).cumsum(0).int(), StepContext(grads=sink), alignment=alignment
        )
        y.backward(rows(recipe, 2, OUT))
        found.append(torch.stack(sink.buffers))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "1d weights"])
def test_copies_follow_each_weight(name):
    """CASES 04, 05: one weight is written; the next forward and backward use it, and the others' bytes stay."""
    recipe = RECIPES[name]
    made, (room, alignment) = linears(recipe), filled(recipe)
    grouped, x, ends = GroupedLinear(made), rows(recipe, 1, IN), torch.tensor(room).cumsum(0).int()

    def run():
        leaf = x.clone().requires_grad_()
        y = grouped(leaf, ends, StepContext(grads=Sink(made, True)), alignment=alignment)
        y.backward(rows(recipe, 2, OUT))
        return y[: ends[-1]], leaf.grad[: ends[-1]]

    before = run()
    operand = grouped.stack.operand("dgrad")
    assert all(torch.equal(a, b) for a, b in zip(before, run(), strict=True))
    assert grouped.stack.operand("dgrad") is operand, "derived once a version"
    with torch.no_grad():
        made[2].weight.mul_(-1)
    after = run()
    changed = slice(room[0] + room[1], room[0] + room[1] + room[2])
    for a, b in zip(before, after, strict=True):
        assert torch.equal(b[changed], -a[changed])
        assert torch.equal(a[changed.stop :], b[changed.stop :])


@pytest.mark.parametrize("sink", [True, False])
def test_a_weight_written_before_backward_is_an_error(sink):
    """Any of them, though not all are inputs of the autograd function where gradients go into a sink."""
    recipe = RECIPES["blockwise"]
    made, (room, alignment) = linears(recipe), filled(recipe)
    step = StepContext(grads=Sink(made, True)) if sink else None
    y = GroupedLinear(made)(rows(recipe, 1, IN), torch.tensor(room).cumsum(0).int(), step, alignment=alignment)
    with torch.no_grad():
        made[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_view_where_weights_lie_at_one_distance():
    flat = torch.arange(60.0)
    parts = [flat[start : start + 6].view(2, 3) for start in (3, 13, 23)]
    view = stacked(parts)
    assert view.data_ptr() == parts[0].data_ptr()
    assert torch.equal(view, torch.stack(parts))
    assert stacked(parts[::-1]) is None, "no negative distance"
    assert stacked([parts[0], parts[1], flat[25:31].view(2, 3)]) is None
    assert stacked([parts[0], parts[1].clone(), parts[2]]) is None
    assert stacked([parts[0], flat[13:19].view(3, 2)]) is None


def test_what_is_not_grouped():
    cut = linears(RECIPES["tensorwise"])
    assert can_group(cut)
    for linear in cut:
        linear.comm = replace(linear.comm, axis=Axis(2), kind="row")
    assert not can_group(cut)  # other ranks' values count for the scale
    assert not can_group(linears(get_recipe("blockwise", weight_tile="1d", input_tile="2d")))
    mixed = linears(RECIPES["blockwise"])
    mixed[1].use_recipe(None)
    assert not can_group(mixed)


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "a floor under amaxes"])
def test_rows_are_the_same_whenever_they_are_quantized(name):
    """Before or after they are copied, and through the wire; the colwise copy comes from the bytes either way."""
    recipe = RECIPES[name] if name in RECIPES else get_recipe("blockwise", amax_epsilon=0.01)
    quantizer = recipe.quantizer("input")
    assert travels(quantizer)
    x = torch.randn(20, IN).bfloat16() * torch.logspace(-3, 3, 20)[:, None].bfloat16()
    index = torch.tensor([3, 3, -1, 19, 0, 7] + [-1] * 122)
    spec = RowSpec(quantizer, colwise=True, alignment=128)
    direct = take_rows(x, index, spec, torch.bfloat16)
    packed = pack(quantizer.quantize(x).rowwise)
    assert packed.shape == (20, row_bytes(quantizer, IN))
    travelled = take_rows(unpack(quantizer, packed, IN), index, spec, torch.bfloat16)
    picked = torch.where(index[:, None] >= 0, x[index.clamp(min=0)], 0)
    whole = quantizer.quantize(picked)
    for got in (direct, travelled):
        assert same(got.rowwise, whole.rowwise)
        assert same(got.colwise, quantizer.derive_colwise(whole.rowwise))


@pytest.mark.parametrize("axes", [{}, {"power_of_two_scales": True}, {"amax_epsilon": 0.01}], ids=str)
@pytest.mark.parametrize("role", ["input", "grad_output"])
@pytest.mark.parametrize("block", [1, 128])
def test_experts_with_one_scale_each_have_their_own_bytes(role, axes, block, monkeypatch):
    """Those of each expert alone; without asking for their sizes, whatever lies past the last, NaN and Inf included."""
    quantizer = get_recipe("tensorwise", **axes).quantizer(role)
    room, _ = filled(None, block)
    ends, x = torch.tensor(room).cumsum(0).int(), torch.randn(sum(room) + 5, IN).bfloat16()
    x[: room[0]] *= 1e-4
    x[3 if block == 1 else block, 5:7] = torch.tensor([torch.inf, torch.nan])
    x[sum(room) :] = torch.nan
    want = quantizer.quantize_grouped(x[: sum(room)], room)
    assert want.rowwise.scale_inv.unique().numel() >= 3
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("waited"))
    groups = expert_scales.Groups(ends, len(x), block)
    got = expert_scales.quantize(quantizer, x, groups, True, True)
    alone = expert_scales.quantize(quantizer, x, groups, False, True)
    assert alone.rowwise is None
    wanted = (got.rowwise, want.rowwise, 0), (got.colwise, want.colwise, 1), (alone.colwise, want.colwise, 1)
    for own, other, dim in wanted:
        data = own.data.view(torch.uint8).narrow(dim, 0, sum(room))
        assert torch.equal(data, other.data.view(torch.uint8))
        assert torch.equal(own.scale_inv, other.scale_inv)


def same(a: QuantizedStorage, b: QuantizedStorage) -> bool:
    scales = (s.scale_inv.clone(memory_format=torch.contiguous_format).view(torch.uint8) for s in (a, b))
    return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(*scales)


def test_a_quantized_input_keeps_its_edge_and_wrong_columns_show():
    """CASES 37; the fault: the column copy of another group."""
    recipe = RECIPES["blockwise"]
    made, (room, alignment) = linears(recipe), filled(recipe)
    ends = torch.tensor(room).cumsum(0).int()
    x = rows(recipe, 1, IN).requires_grad_()
    grads = []
    for wrong in (False, True):
        sink = Sink(made, True)
        given = Wrap.apply(x, recipe.quantizer("input"), wrong)
        assert isinstance(given, QuantizedTensor)
        y = GroupedLinear(made)(given, ends, StepContext(grads=sink), alignment=alignment)
        x.grad = None
        y.backward(rows(recipe, 2, OUT))
        assert x.grad[: ends[-1]].abs().sum() > 0
        grads.append(sink.buffers)
    assert not torch.equal(grads[0][3], grads[1][3])


class Seen(dict):
    """An observer: place -> (values, quantized)."""

    def see(self, place, x, quantized):
        assert place not in self, "each once"
        self[place] = x, quantized


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "tensorwise"])
def test_an_observer_sees_each_linears_rows(name):
    recipe = RECIPES[name]
    made, (room, alignment) = linears(recipe), filled(recipe)
    ends, results = torch.tensor(room).cumsum(0).int(), []
    for seen in (None, Seen()):
        x = rows(recipe, 1, IN).requires_grad_()
        step = StepContext(grads=Sink(made, True), observer=seen)
        y = GroupedLinear(made)(x, ends, step, alignment=alignment)
        y.backward(rows(recipe, 2, OUT))
        results.append((y[: ends[-1]], x.grad[: ends[-1]]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert seen.keys() == {f"experts.{g}.fc1/{role}" for g in range(4) for role in ("input", "grad_output")}
    start = 0
    for g, size in enumerate(room):
        for role, width, seed in (("input", IN, 1), ("grad_output", OUT, 2)):
            value, quantized = seen[f"experts.{g}.fc1/{role}"]
            own = rows(recipe, seed, width)[start : start + size]
            assert torch.equal(value, own)
            assert same(quantized.rowwise, recipe.quantizer(role).quantize(own).rowwise)
        start += size


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, quantizer, wrong):
        q = quantizer.quantize(x, True, True)
        if wrong:
            rolled = quantizer.quantize(x.roll(128, 0), False, True).colwise
            q = Quantized(q.rowwise, rolled)
        return QuantizedTensor(q, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None
