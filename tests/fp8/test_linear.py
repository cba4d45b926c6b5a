"""The linear layer: outputs and gradients, what it keeps for backward, where gradients go."""

import pytest
import torch

from megafp8.fp8 import Linear, QuantizedTensor, gemm, get_recipe
from megafp8.step import StepContext
from tests.fp8.linears import ALL_NAMES, Sink, data, error, fp64_reference, make, saved, step_for


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
