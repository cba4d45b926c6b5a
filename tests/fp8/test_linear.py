"""The linear layer: outputs and gradients, what it keeps, where gradients go, and when weights are quantized anew."""

import copy
from dataclasses import dataclass, field

import pytest
import torch

from megafp8.fp8 import DelayedScaling, Linear, QuantizedTensor, gemm, get_recipe
from megafp8.fp8.quantizer import Quantizer
from megafp8.params import GradSink, Init, ParamSpec
from megafp8.step import Phase, StepContext

NAMES = ["tensorwise", "blockwise", "mxfp8", "delayed"]
ALL_NAMES = pytest.mark.parametrize("name", NAMES)


class Sink(GradSink):
    """A gradient sink whose buffers start at `fill`."""

    def __init__(self, fill=0.0):
        self.fill, self.buffers, self.count = fill, {}, {}

    def buffer(self, param):
        return self.buffers.setdefault(id(param), torch.full(param.shape, self.fill))

    def ready(self, param):
        self.count[id(param)] = self.count.get(id(param), 0) + 1


@dataclass
class History:
    """Records what is asked of a scaling history."""

    scales: dict = field(default_factory=dict)
    recorded: list = field(default_factory=list)

    def scale(self, name):
        return self.scales.get(name)

    def record(self, name, amax):
        self.recorded.append((name, amax.item()))


def make(name, n=70, k=200, bias=True, dtype=torch.bfloat16, seed=0, **options):
    torch.manual_seed(seed)
    recipe = get_recipe(name) if name else None
    spec = ParamSpec("layer.weight", (n, k), Init("normal", 0.02), True)
    return Linear(k, n, bias, recipe=recipe, weight_spec=options.pop("weight_spec", None), params_dtype=dtype,
                  name=spec.name, **options)  # fmt: skip


def data(m=37, n=70, k=200, dtype=torch.bfloat16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(dtype).requires_grad_()
    return x, torch.randn(m, n, generator=generator).to(dtype)


def step_for(name, **fields):
    return StepContext(scaling=History() if name == "delayed" else None, **fields)


def fp64_reference(name, linear, x, dy):
    """(y, dx, dw, db) in FP64 of the dequantized operands."""
    recipe = linear.recipe
    q = {
        "input": recipe.quantizer("input").quantize(x, colwise=True),
        "weight": recipe.quantizer("weight").quantize(linear.weight, colwise=True),
        "grad_output": recipe.quantizer("grad_output").quantize(dy, colwise=True),
    }
    row = {role: v.rowwise.dequantize().double() for role, v in q.items()}
    col = {role: v.colwise.dequantize().double() for role, v in q.items()}
    y = row["input"] @ row["weight"].t()
    y = y + linear.bias.double() if linear.bias is not None else y
    return y, row["grad_output"] @ col["weight"].t(), col["grad_output"] @ col["input"].t(), dy.double().sum(0)


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


@ALL_NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_against_fp64(name, dtype, bias):
    linear = make(name, dtype=dtype, bias=bias)
    x, dy = data(dtype=dtype)
    sink = Sink()
    y = linear(x, step_for(name, grads=sink))
    y.backward(dy)
    expected = fp64_reference(name, linear, x.detach(), dy)
    rounding = 1e-6 if dtype == torch.float32 else 3e-3
    assert y.dtype == x.grad.dtype == dtype
    assert error(y, expected[0]) < rounding
    assert error(x.grad, expected[1]) < rounding
    assert error(sink.buffer(linear.weight), expected[2]) < 1e-6
    if bias:
        assert error(sink.buffer(linear.bias), expected[3]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_recipe_it_is_a_plain_linear(dtype):
    linear = make(None, dtype=dtype)
    x, dy = data(dtype=dtype)
    sink = Sink()
    linear(x, StepContext(grads=sink)).backward(dy)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))
    assert error(x.grad, dy.double() @ linear.weight.double()) < (1e-6 if dtype == torch.float32 else 3e-3)
    assert error(sink.buffer(linear.weight), dy.double().t() @ x.detach().double()) < 1e-6
    assert linear.weight.grad is None


@pytest.mark.parametrize("name", [None, "tensorwise", "blockwise", "mxfp8"])
def test_cases_46_microbatches_add_up_in_fp32(name):
    """CASES 46: gradients 256 and 1 make 257; what the buffer held is kept; `.grad` stays empty; ready() each time."""
    linear = make(name, n=3, k=2)
    sink = Sink(fill=0.5)
    for i, value in enumerate((256.0, 1.0)):
        x = torch.ones(1, 2, dtype=torch.bfloat16)
        y = linear(x, StepContext(grads=sink, microbatch=i))
        y.backward(torch.full_like(y, value))
    assert torch.equal(sink.buffer(linear.weight), torch.full((3, 2), 257.5))
    assert torch.equal(sink.buffer(linear.bias), torch.full((3,), 257.5))
    assert linear.weight.grad is None
    assert linear.bias.grad is None
    assert sink.count == {id(linear.weight): 2, id(linear.bias): 2}


@ALL_NAMES
def test_without_a_sink_gradients_go_to_grad(name):
    linear = make(name)
    x, dy = data()
    linear(x, step_for(name)).backward(dy)
    expected = fp64_reference(name, linear, x.detach(), dy)
    assert linear.weight.grad.dtype == torch.bfloat16
    assert error(linear.weight.grad, expected[2]) < 3e-3
    assert error(linear.bias.grad, expected[3]) < 3e-3


def saved(linear, x, step=None):
    """Tensors that the forward keeps for backward, the weight aside."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = linear(x, step)
    return y, [t for t in kept if t.data_ptr() != linear.weight.data_ptr()]


@ALL_NAMES
def test_backward_keeps_one_fp8_copy_of_the_input(name):
    """One colwise copy with its scales; nothing in high precision; as many bytes as the layer reports."""
    linear = make(name)
    x, _ = data()
    _, kept = saved(linear, x, step_for(name))
    assert [t.element_size() for t in kept][0] == 1
    assert kept[0].shape == (200, 37)
    assert len(kept) == 2
    assert sum(t.nbytes for t in kept) == linear.saved_bytes(37)


@ALL_NAMES
def test_input_kept_by_its_producer_is_quantized_again(name):
    """proj: the high-precision input itself is kept, no copy of it, and gradients are the same bits."""
    x, dy = data()
    grads = []
    for requantize in (False, True):
        linear = make(name, requantize_input=requantize)
        sink = Sink()
        y, kept = saved(linear, x, step_for(name, grads=sink))
        y.backward(dy)
        grads.append((sink.buffer(linear.weight), x.grad.clone()))
        x.grad = None
    assert [t.data_ptr() for t in kept if t.numel() > 1] == [x.data_ptr()]  # tensorwise keeps its amax, too
    assert linear.saved_bytes(37) == 0
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@ALL_NAMES
def test_quantized_input_from_a_producer(name):
    """A producer that asks `input_spec()` changes no bit, and its gradient is a compute-dtype tensor."""
    linear = make(name)
    x, dy = data()
    results = []
    for quantized in (False, True):
        step, sink = step_for(name), Sink()
        step = StepContext(grads=sink, scaling=step.scaling)
        given = x
        if quantized:
            spec = linear.input_spec()
            given = QuantizedTensor(spec.quantize(x.detach(), step), spec.dtype, requires_grad=True)
        y = linear(given, step)
        y.backward(dy)
        results.append((y, given.grad.clone(), sink.buffer(linear.weight)))
        given.grad = None
    assert type(results[1][1]) is torch.Tensor
    assert results[1][1].dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_rowwise_bytes_derive_the_colwise_copy():
    linear = make("blockwise")
    x, dy = data()
    quantized = linear.recipe.quantizer("input").quantize(x)
    sink = Sink()
    linear(QuantizedTensor(quantized), StepContext(grads=sink)).backward(dy)
    derived = linear.recipe.quantizer("input").derive_colwise(quantized.rowwise)
    dy_col = linear.recipe.quantizer("grad_output").quantize(dy, rowwise=False, colwise=True).colwise
    assert torch.equal(sink.buffer(linear.weight), gemm.wgrad(dy_col, derived))


def test_input_spec_follows_the_consumer():
    spec = make("blockwise").input_spec()
    assert (spec.rowwise, spec.colwise, spec.requantizes) == (True, True, False)
    assert not make("blockwise").input_spec(training=False).colwise
    assert make("blockwise", requantize_input=True).input_spec().requantizes
    frozen = make("blockwise")
    frozen.weight.requires_grad_(False)
    assert not frozen.input_spec().colwise
    assert make(None).input_spec().quantizer is None


@ALL_NAMES
def test_frozen_weights_skip_wgrad_and_the_input_copy(name):
    linear = make(name)
    linear.weight.requires_grad_(False)
    x, dy = data()
    sink = Sink()
    y, kept = saved(linear, x, step_for(name, grads=sink))
    y.backward(dy)
    assert kept == []
    assert x.grad is not None
    assert id(linear.weight) not in sink.count


@ALL_NAMES
def test_input_without_gradient(name):
    linear = make(name)
    x, dy = data()
    linear(x.detach(), step_for(name)).backward(dy)
    assert linear.weight.grad is not None
    assert x.grad is None


@ALL_NAMES
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_cases_90_few_rows(name, rows):
    """CASES 11, 90: no tokens give zero gradients of weight shape; one token and seven work, backward too."""
    linear = make(name)
    x, dy = data(m=rows)
    sink = Sink()
    y = linear(x, step_for(name, grads=sink))
    y.backward(dy)
    assert y.shape == (rows, 70)
    assert x.grad.shape == (rows, 200)
    assert sink.buffer(linear.weight).shape == (70, 200)
    if not rows:
        assert not sink.buffer(linear.weight).any()
    else:
        assert error(y, fp64_reference(name, linear, x.detach(), dy)[0]) < 3e-3


def test_leading_dimensions_and_strides():
    linear = make("blockwise")
    x, _ = data(m=24)
    assert torch.equal(linear(x.view(2, 3, 4, 200)), linear(x).view(2, 3, 4, 70))
    wide = torch.randn(24, 400).bfloat16()
    assert torch.equal(linear(wide[:, ::2]), linear(wide[:, ::2].contiguous()))
    with pytest.raises(ValueError, match="200 features"):
        linear(torch.zeros(3, 100))


# Weights and their copies.


@ALL_NAMES
def test_cases_05_microbatches_share_bytes_and_a_new_version_is_used(name, monkeypatch):
    """CASES 05: weight bytes are made once a version, and every way to write the weight makes new ones."""
    linear = make(name)
    recipe = linear.recipe
    calls = []
    quantizer = type(recipe.quantizer("weight"))
    original = quantizer.quantize
    weight_quantizer = recipe.quantizer("weight")

    def counted(self, x, *args, **kwargs):
        if x is linear.weight:
            calls.append(x)
        return original(self, x, *args, **kwargs)

    monkeypatch.setattr(quantizer, "quantize", counted)
    x, dy = data()

    def passes():
        for i in range(2):
            y = linear(x, step_for(name, microbatch=i))
            y.backward(dy)
        return y

    before = passes()
    made = len(calls)
    assert made == (1 if weight_quantizer.spec.tile.symmetric else 2)
    assert torch.equal(passes(), before)
    assert len(calls) == made
    writers = {
        "optimizer": lambda value: (linear.weight.owner.write_shard(value), linear.weight.owner.publish()),
        "data": lambda value: (linear.weight.data.copy_(value), linear.weight.owner.publish()),
        "no_grad": lambda value: torch.no_grad()(linear.weight.copy_)(value),
        "state_dict": lambda value: linear.load_state_dict({"weight": value, "bias": linear.bias.data}),
        "assign": lambda value: linear.load_state_dict({"weight": value, "bias": linear.bias.data}, assign=True),
        "dtype and back": lambda value: (
            linear.load_state_dict({"weight": value, "bias": linear.bias.data}),
            linear.to(torch.float64),
            linear.to(torch.bfloat16),
        ),
    }
    for number, write in enumerate(writers.values()):
        value = torch.full((70, 200), float(number + 1), dtype=torch.bfloat16)
        write(value)
        y = linear(x, step_for(name))
        expected = fp64_reference(name, linear, x.detach(), dy)
        assert torch.equal(linear.weight.detach(), value)
        assert error(y, expected[0]) < 3e-3
        x.grad = None
        y.backward(dy)
        assert error(x.grad, expected[1]) < 3e-3


def train(linear, name, steps=3, evaluate=False, microbatches=2):
    """SGD through the optimizer's path; returns outputs and gradients of every step."""
    seen = []
    for number in range(steps):
        sink = Sink()
        for i in range(microbatches):
            x, dy = data(seed=10 * number + i)
            y = linear(x, step_for(name, grads=sink, iteration=number, microbatch=i))
            y.backward(dy)
            seen += [y.detach(), x.grad]
        seen.append(sink.buffer(linear.weight))
        linear.weight.owner.write_shard(linear.weight - 0.01 * sink.buffer(linear.weight))
        linear.weight.owner.publish()
        if evaluate:
            with torch.no_grad():
                linear(data(seed=99)[0], step_for(name, phase=Phase.EVAL))
    return seen


@ALL_NAMES
@pytest.mark.parametrize("keep_transposed", [True, False])
def test_cases_04_an_evaluation_between_steps_changes_nothing(name, keep_transposed):
    """CASES 04: both copies always come from the current weight."""
    plain = train(make(name), name)
    evaluated = train(make(name, keep_transposed=keep_transposed), name, evaluate=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, evaluated, strict=True))
    linear = make(name)
    train(linear, name, evaluate=True)
    owner = linear.weight.owner
    expected = linear.recipe.quantizer("weight").quantize(linear.weight, colwise=True)
    assert torch.equal(owner.operand("fprop").dequantize(), expected.rowwise.dequantize())
    assert torch.equal(owner.operand("dgrad").dequantize(), expected.colwise.dequantize())


@ALL_NAMES
def test_planted_stale_transposed_copy_is_noticed(name, monkeypatch):
    """The equality above fails where publish() forgets the colwise copy."""
    plain = train(make(name), name)
    weight_class = type(make(name).weight.owner)

    def forgetful(self):
        stale = self._copies.get("colwise")
        self._key, self._copies, self._amax = None, {}, None
        if stale is not None:
            self._copies["colwise"] = stale

    monkeypatch.setattr(weight_class, "_drop", forgetful)
    faulty = train(make(name), name)
    assert not all(torch.equal(a, b) for a, b in zip(plain, faulty, strict=True))


@ALL_NAMES
def test_planted_skipped_refresh_is_noticed(name, monkeypatch):
    plain = train(make(name), name)
    monkeypatch.setattr(type(make(name).weight.owner), "_drop", lambda self: setattr(self, "_key", self._key))
    faulty = train(make(name), name)
    assert not all(torch.equal(a, b) for a, b in zip(plain, faulty, strict=True))


def test_a_weight_written_between_forward_and_backward_is_refused():
    linear = make("blockwise")
    x, dy = data()
    y = linear(x)
    linear.weight.owner.write_shard(torch.zeros(70, 200))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_transposed_copy_is_dropped_when_asked():
    x, dy = data()
    sizes = {}
    for keep in (True, False):
        linear = make("blockwise", keep_transposed=keep)
        linear(x).backward(dy)
        sizes[keep] = linear.weight.owner.nbytes
    assert sizes[False] < 0.6 * sizes[True]


def test_deep_copies_own_their_weight():
    linear = make("blockwise")
    x, _ = data()
    y = linear(x)
    twin = copy.deepcopy(linear)
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(twin(x), y)
    assert twin.weight.owner.param is twin.weight
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(twin(x), linear(x))


# Recompute.


@ALL_NAMES
def test_cases_22_recompute_is_bitwise(name):
    """CASES 22: outputs, gradients and what a history records are those of a run without checkpointing."""
    from torch.utils.checkpoint import checkpoint

    results = []
    for recompute in (False, True):
        linear, (x, dy), sink = make(name), data(), Sink()
        step = step_for(name, grads=sink)
        passes = iter([step])

        def run(x, linear=linear, step=step, passes=passes):
            return linear(x, next(passes, step.recompute()))

        y = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
        y.backward(dy)
        results.append((y, x.grad, sink.buffer(linear.weight), step.scaling and step.scaling.recorded))
    assert all(torch.equal(a, b) for a, b in zip(results[0][:3], results[1][:3], strict=True))
    assert results[0][3] == results[1][3]
    if name == "delayed":
        assert [n for n, _ in results[0][3]] == [
            "layer.weight/input",
            "layer.weight/weight",
            "layer.weight/grad_output",
        ]


# Delayed scaling.


def test_delayed_uses_the_history_and_records_in_training_only():
    linear = make("delayed")
    x, dy = data()
    scales = {f"layer.weight/{role}": torch.tensor([v]) for role, v in
              (("input", 3.0), ("weight", 100.0), ("grad_output", 7.0))}  # fmt: skip
    history, sink = History(scales), Sink()
    linear(x, StepContext(scaling=history, grads=sink)).backward(dy)
    q = {
        role: linear.recipe.quantizer(role).quantize(t, colwise=True, scale=scales[f"layer.weight/{role}"])
        for role, t in (("input", x.detach()), ("weight", linear.weight), ("grad_output", dy))
    }
    assert torch.equal(x.grad, gemm.dgrad(q["grad_output"].rowwise, q["weight"].colwise))
    assert torch.equal(sink.buffer(linear.weight), gemm.wgrad(q["grad_output"].colwise, q["input"].colwise))
    assert dict(history.recorded) == {
        "layer.weight/input": x.detach().abs().max().item(),
        "layer.weight/weight": linear.weight.abs().max().item(),
        "layer.weight/grad_output": dy.abs().max().item(),
    }
    history.recorded.clear()
    with torch.no_grad():
        linear(x, StepContext(phase=Phase.EVAL, scaling=history))
    assert history.recorded == []


def test_a_new_scale_makes_new_weight_bytes():
    """Once a step: scales are updated, then weights are quantized with them."""
    linear = make("delayed")
    state = DelayedScaling.of(torch.nn.Sequential(linear))
    x, _ = data()
    step = StepContext(scaling=state)
    linear(x, step)
    state.advance()
    linear(x, step)
    scale = state.scale("layer.weight/weight")
    expected = linear.recipe.quantizer("weight").quantize(linear.weight, scale=scale).rowwise
    assert torch.equal(
        linear.weight.owner.operand("fprop", scale).data.view(torch.uint8), expected.data.view(torch.uint8)
    )
    state.record("layer.weight/weight", torch.tensor([1e3]))
    state.advance()
    linear(x, step)
    assert linear.weight.owner.operand("fprop", state.scale("layer.weight/weight")).scale_inv.item() > 1.0


def test_delayed_without_a_history_says_what_to_do():
    with pytest.raises(ValueError, match="DelayedScaling.of"):
        make("delayed")(data()[0])


def test_a_second_derivative_is_refused():
    """Quantization has none: a gradient penalty must not silently miss this linear."""
    layer = Linear(32, 16, True, recipe=get_recipe("blockwise"))
    x = torch.randn(4, 32, requires_grad=True, dtype=layer.weight.dtype)
    (grad,) = torch.autograd.grad(layer(x).float().pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad.float().pow(2).sum() + x.sum()).backward()


def test_what_was_worked_out_follows_the_linear():
    """Another recipe, name, plan or device, and it is worked out anew; else it is the same object."""
    linear = make("blockwise")
    facts = linear.facts()
    assert linear.facts() is facts
    assert facts.grad_wanted[True, True] == {"rowwise", "colwise"}
    assert facts.scalings["input", False].place == "layer.weight/input"
    linear.use_recipe(get_recipe("delayed"))
    assert linear.facts().uses_history
    assert linear.facts().scalings["weight", False].name == "layer.weight/weight"
    delayed = linear.facts()
    linear.name = "other"
    assert linear.facts().scalings["weight", False].name == "other/weight"
    assert linear.to("meta").facts().device == torch.device("meta") != delayed.device
    linear.use_recipe(None)
    assert linear.facts() is None
    assert not linear.takes_producer


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "delayed"])
def test_an_input_that_is_quantized_again_is_measured_once(name, monkeypatch):
    """The same bits as from a copy kept in FP8; under tensorwise backward is given forward's amax."""
    results, given, quantize = [], [], Quantizer.quantize

    def watched(self, value, *orientations, amax=None, **options):
        given.append((tuple(value.shape), amax))
        return quantize(self, value, *orientations, amax=amax, **options)

    for again in (False, True):
        linear, (x, dy) = make(name, requantize_input=again), data()
        y = linear(x, step_for(name))
        monkeypatch.setattr(Quantizer, "quantize", watched)
        y.backward(dy)
        monkeypatch.setattr(Quantizer, "quantize", quantize)
        results.append((y, x.grad, linear.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    (amax,) = (amax for shape, amax in given if shape == tuple(x.shape))
    if name == "tensorwise":
        assert amax.item() == x.float().abs().max().item()
    else:
        assert amax is None
