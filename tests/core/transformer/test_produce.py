"""A linear that runs its producer inside gives what the two give one after the other, gradients included."""

import pytest
import torch

from megafp8.core.transformer.activation import Activation, gelu, squared_relu, swiglu
from megafp8.core.transformer.norm import Norm
from megafp8.core.transformer.produce import branch_after, linear_after, normalized_for
from megafp8.fp8 import CommPlan, DelayedScaling, Linear, QuantizedTensor, get_recipe
from megafp8.fp8.producer import Want
from megafp8.parallel import Axis
from megafp8.params import GradSink
from megafp8.step import StepContext
from tests.gpu.quantize_cases import Peer, raw

RECIPES = ["blockwise", "tensorwise", "mxfp8", "delayed"]
CPU = torch.device("cpu")


class Sink(GradSink):
    def __init__(self):
        self.buffers, self.calls = {}, 0

    def buffer(self, param):
        return self.buffers.setdefault(id(param), torch.zeros(param.shape))

    def ready(self, param):
        self.calls += 1


def make_norm(size=40, *, centred=False, kind="RMSNorm"):
    norm = Norm("n", size, kind=kind, eps=1e-5, zero_centered=centred, dtype=torch.bfloat16, device=CPU)
    generator = torch.Generator().manual_seed(1)
    for param in norm.parameters():
        param.data.copy_(torch.randn(size, generator=generator) * 0.1 + 1)
    return norm


def make_linear(recipe, inputs=40, outputs=24, **options):
    torch.manual_seed(0)
    options = {"bias": False, "params_dtype": torch.bfloat16, "name": "l"} | options
    return Linear(inputs, outputs, recipe=recipe and get_recipe(recipe), **options)


def x_like(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def step_of(linear, sink=None):
    return StepContext(grads=sink, scaling=DelayedScaling.of(torch.nn.ModuleList([linear])))


def run(function, linear, x, *params, sink=None):
    """Output, gradients of x and params, the weight's, and amaxes recorded. A sink may have those of params."""
    x, step = x.clone().requires_grad_(), step_of(linear, sink)
    for param in params:
        param.grad = None
    y = function(x, step)
    y.backward(x_like(*y.shape, seed=9))
    amaxes = [] if step.scaling is None else [step.scaling.pending()]
    weight = linear.weight.grad if sink is None else sink.buffer(linear.weight)
    others = [sink.buffer(p).to(p.dtype) if p.grad is None else p.grad for p in params]
    return [y, x.grad, *others, weight, *amaxes]


def assert_same(a, b):
    assert len(a) == len(b)
    for got, expected in zip(a, b, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("remake", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
def test_norm_inside_equals_norm_before(recipe, remake, centred, with_sink):
    norm = make_norm(centred=centred)
    apart, inside = make_linear(recipe), make_linear(recipe, requantize_input=remake)
    sinks = [Sink(), Sink()] if with_sink else [None, None]
    before = run(lambda x, step: apart(norm(x), step), apart, x_like(7, 40), norm.weight, sink=sinks[0])
    within = run(lambda x, step: linear_after(norm, inside, x, step), inside, x_like(7, 40), norm.weight, sink=sinks[1])
    assert_same(within, before)
    if with_sink:
        assert sinks[1].calls == 2  # the norm's, too
        assert norm.weight.grad is None


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("formula", [swiglu, gelu, squared_relu])
def test_activation_inside_equals_activation_before(recipe, formula):
    activation = Activation(formula, gated=formula is swiglu)
    apart, inside = make_linear(recipe), make_linear(recipe, requantize_input=True)
    x = x_like(7, 80 if activation.gated else 40)
    before = run(lambda x, step: apart(activation(x), step), apart, x)
    within = run(lambda x, step: inside(x, step, producer=activation), inside, x)
    assert_same(within, before)


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_row_weights_inside(recipe):
    activation, weights = Activation(swiglu, gated=True), torch.rand(7).requires_grad_()
    apart, inside = make_linear(recipe), make_linear(recipe, requantize_input=True)
    before = run(lambda x, step: apart(activation(x, weights), step), apart, x_like(7, 80), weights)
    within = run(
        lambda x, step: inside(x, step, producer=activation, tensors=(weights,)), inside, x_like(7, 80), weights
    )
    assert_same(within, before)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_residual_stream_beside_the_norm(recipe, kind):
    """The stream taken from `branch_after` has the gradient of the sum of both ways."""
    norm, apart, inside = make_norm(24, kind=kind), make_linear(recipe, 24), make_linear(recipe, 24)

    def branch(x, step):
        y, x = branch_after(norm, inside, x, step)
        return x + y

    before = run(lambda x, step: x + apart(norm(x), step), apart, x_like(7, 24), norm.weight)
    assert_same(run(branch, inside, x_like(7, 24), norm.weight), before)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_one_norm_for_two_linears(recipe):
    """Quantized once, with one copy held; the same bits as when each quantizes for itself."""
    norm, linears = make_norm(), [make_linear(recipe, name=f"l{i}") for i in range(2)]
    results, held = [], []
    for shared in (False, True):
        scaling = DelayedScaling.of(torch.nn.ModuleList(linears))
        step, x, storages = StepContext(scaling=scaling), x_like(7, 40).requires_grad_(), {}

        def pack(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            h = normalized_for(linears, norm, x, step) if shared else norm(x)
            y = sum(linear(h, step) for linear in linears)
        held.append(sum(t.dtype == torch.float8_e4m3fn for t in storages.values()))
        y.backward(x_like(7, 24))
        results.append([y, x.grad, *(p.grad for p in (norm.weight, *(linear.weight for linear in linears)))])
        for param in (norm.weight, *(linear.weight for linear in linears)):
            param.grad = None
    assert_same(*results)
    assert held == {None: [0, 0], "delayed": [2, 2]}.get(recipe, [2, 1])


def test_stream_alone():
    """Where nobody uses the branch, its weights get no gradient and the stream's passes."""
    norm, linear, x = make_norm(), make_linear("blockwise"), x_like(7, 40).requires_grad_()
    _, stream = branch_after(norm, linear, x, StepContext())
    stream.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert linear.weight.grad is None


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "delayed"])
def test_gradient_comes_as_bytes(recipe):
    """fc2 hands fc1 its gradient as fc1 would quantize it."""
    fc1, fc2 = make_linear(recipe, 40, 80, name="fc1"), make_linear(recipe, requantize_input=True)
    activation, seen, results = Activation(swiglu, gated=True), [], []
    for fused in (False, True):
        scaling = DelayedScaling.of(torch.nn.ModuleList([fc1, fc2]))
        step, x = StepContext(scaling=scaling), x_like(7, 40).requires_grad_()
        inner = fc1(x, step)
        inner.register_hook(lambda grad: seen.append(type(grad)))
        want = fc1.grad_want(step) if fused else None
        fc2(inner, step, producer=activation, grad_want=want).backward(x_like(7, 24))
        results.append([x.grad, fc1.weight.grad, fc2.weight.grad, *([scaling.pending()] if scaling else [])])
        fc1.weight.grad = fc2.weight.grad = None
    assert seen == [torch.Tensor, QuantizedTensor]
    assert_same(*results)


def test_frozen_parts_and_no_gradients():
    norm, linear = make_norm(), make_linear("blockwise", requantize_input=True)
    x = x_like(7, 40)
    linear.weight.requires_grad_(False)
    y = linear_after(norm, linear, x.requires_grad_(), StepContext())
    y.sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None
    linear.weight.requires_grad_(True)
    norm.weight.requires_grad_(False)
    linear_after(norm, linear, x_like(7, 40), StepContext()).sum().backward()  # wgrad alone: the input is made again
    assert linear.weight.grad is not None
    with torch.no_grad():
        assert torch.equal(linear_after(norm, linear, x, StepContext()), y)


def test_a_wish_for_tensor_tiles_measures_once():
    noted = []
    want = Want(get_recipe("tensorwise").quantizer("input"), record=noted.append).measuring(CPU)
    value = x_like(7, 40)
    first = want.quantize(value)
    want.measured()
    assert noted[0].item() == value.float().abs().max().item()
    again = Want(want.quantizer, rowwise=False, colwise=True, amax=noted[0]).quantize(value)
    assert torch.equal(again.colwise.data.view(torch.uint8), first.rowwise.data.view(torch.uint8).t())


def amax_of(value):
    return value.float().abs().max().item() if value.numel() else 0.0


@pytest.mark.parametrize("rows", [7, 0])
@pytest.mark.parametrize(
    "producer",
    [
        make_norm(centred=True),
        Activation(swiglu, gated=True),
        Activation(swiglu, gated=True, store_fp8=True),
        Activation(gelu),
    ],
    ids=["norm", "swiglu", "swiglu, stored", "gelu"],
)
def test_amaxes_are_shared_once(producer, rows):
    """Of the value, and of the gradient of the producer's input; backward's value has the amax that forward kept."""
    x, quantizer = x_like(rows, 40), get_recipe("tensorwise").quantizer("grad_output")
    tensors = (producer.weight,) if isinstance(producer, Norm) else ()
    plain, kept = producer.produce(x, tensors, None)
    grad, peer = x_like(*plain.shape, seed=3), Peer()
    want = Want(quantizer, share=peer).measuring(CPU)
    value, _ = producer.produce(x, tensors, want)
    shared = peer.shared(amax_of(plain))
    assert torch.equal(want.amax_out, shared)
    assert_same_bytes(value.rowwise, quantizer.quantize(plain, amax=shared).rowwise)

    dx, peer = producer.gradient(grad, kept, tensors, None, False).x, Peer()
    again = Want(quantizer, rowwise=False, colwise=True, amax=shared)
    grads = producer.gradient(grad, kept, tensors, Want(quantizer, share=peer), again)
    assert_same_bytes(grads.x.rowwise, quantizer.quantize(dx, amax=peer.shared(amax_of(dx))).rowwise)
    remade = producer.remake(kept, tensors, None, torch.bfloat16)
    assert_same_bytes(grads.value.colwise, quantizer.quantize(remade, False, True, amax=shared).colwise)


def assert_same_bytes(got, expected):
    assert torch.equal(raw(got.data), raw(expected.data))
    assert torch.equal(got.scale_inv, expected.scale_inv)


def test_which_wishes_share():
    """Of a tensor that ranks hold parts of, and only where its scale is made on the spot."""

    def wishes(recipe, kind, sequence_parallel):
        linear = make_linear(recipe, comm=CommPlan(Axis(2), kind, sequence_parallel))
        step, scaling = step_of(linear), linear.facts().scalings["input", False]
        return scaling.want(128, True, False, step, record=False), linear.grad_want(step)

    for kind, sequence_parallel in (("column", True), ("column", False), ("row", False), ("row", True)):
        of_input, of_grad = wishes("tensorwise", kind, sequence_parallel)
        assert (of_input.share is not None) == ((kind == "row") or sequence_parallel)
        assert (of_grad is None) == (kind == "row" and sequence_parallel)  # gathered before it is whole
        assert of_grad is None or (of_grad.share is not None) == (kind == "column")
    assert all(want.share is None for want in wishes("blockwise", "column", True))
    first_step = wishes("delayed", "column", True)
    assert first_step == (None, None)
