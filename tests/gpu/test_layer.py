"""A layer's fused producers on a GPU: bytes, gradients, what is kept in FP8, shapes that no tensor core likes."""

from dataclasses import replace

import pytest
import torch
from megafp8.kernels import dequantize, rope

from megafp8.core.transformer.activation import STORE, Activation, swiglu
from megafp8.core.transformer.norm import Norm
from megafp8.core.transformer.rope import _rotate
from megafp8.fp8 import get_recipe, reference
from megafp8.fp8.formats import E4M3, E5M2, OperandSpec, Scale, Tile, decode_scale
from megafp8.fp8.policy import Policy
from megafp8.fp8.producer import Want
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.step import StepContext
from tests.core.helpers import LLAMA, Sink, batch, make_model, relative_error
from tests.gpu.quantize_cases import holes, normal

CUDA = torch.device("cuda")
RECIPES = {"blockwise": get_recipe("blockwise"), "mxfp8": get_recipe("mxfp8")}
SHAPES = [(256, 512), (1, 128), (7, 712), (130, 4096), (4092, 896)]


def raw(storage):
    return storage.data.view(torch.uint8), decode_scale(storage.scale_inv)


def assert_same(got, want):
    assert got.orientation == want.orientation
    for a, b in zip(raw(got), raw(want), strict=True):
        assert torch.equal(a, b)


def both(recipe, role="input", colwise=True):
    return Want(recipe.quantizer(role), True, colwise)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("centred", [False, True])
def test_norm_produces_the_quantizers_bytes(shape, recipe, centred):
    norm = Norm("n", shape[1], kind="RMSNorm", eps=1e-5, zero_centered=centred, dtype=torch.bfloat16, device=CUDA)
    with torch.no_grad():
        norm.weight.copy_(normal(1, shape[1], seed=2)[0] * 0.1 + (0 if centred else 1))
    x, grad, want = (normal(*shape) * 3).to(CUDA), normal(*shape, seed=3).to(CUDA), both(recipe)
    made, kept = norm.produce(x, (norm.weight,), want)
    (row, _), _ = norm.produce(x, (norm.weight,), replace(want, colwise=False)), None
    value = norm.compute(x)
    assert relative_error(made.rowwise.dequantize(), value.float()) < 0.04
    assert_same(row.rowwise, made.rowwise)
    again = norm.remake(kept, (norm.weight,), replace(want, rowwise=False), x.dtype)
    assert_same(again.colwise, made.colwise)
    dx, (of_weight,), remade = norm.gradient(grad, kept, (norm.weight,), None, replace(want, rowwise=False))
    dw, before = of_weight(None, False), torch.full(norm.weight.shape, 0.3, device=CUDA)
    assert torch.equal(of_weight(before.clone(), True), before + dw)
    assert torch.equal(of_weight(before.clone(), False), dw.float())
    assert_same(remade.colwise, made.colwise)
    beside = normal(*shape, seed=4).to(CUDA)
    assert torch.equal(norm.gradient(grad, kept, (norm.weight,), None, False, beside).x, dx + beside)
    exact = [t.detach().double().requires_grad_() for t in (x, norm.weight)]
    y = exact[0] * (exact[0].square().mean(1, keepdim=True) + 1e-5).rsqrt() * (exact[1] + float(centred))
    for got, expected in zip((dx, dw), torch.autograd.grad(y, exact, grad.double()), strict=True):
        assert relative_error(got, expected) < 4e-3


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("store_fp8", [False, True])
def test_swiglu_produces_the_quantizers_bytes(shape, recipe, store_fp8):
    activation = Activation(swiglu, gated=True, store_fp8=store_fp8)
    x, grad, want = normal(shape[0], 2 * shape[1]).to(CUDA), normal(*shape, seed=3).to(CUDA), both(recipe)
    made, kept = activation.produce(x, (), want)
    value = activation.compute(x)
    assert_same(made.rowwise, want.quantize(value).rowwise)
    assert_same(made.colwise, want.quantize(value).colwise)
    seen = STORE.quantize(x).rowwise.dequantize(torch.bfloat16) if store_fp8 else x
    assert torch.equal(activation.restore(kept, x.dtype), seen)
    columns, to_fc1 = replace(want, rowwise=False), both(recipe, "grad_output")
    plain = activation.gradient(grad, kept, (), None, True)
    fused = activation.gradient(grad, kept, (), to_fc1, columns)
    assert torch.equal(plain.value, activation.compute(seen))
    assert_same(fused.value.colwise, columns.quantize(plain.value).colwise)
    assert_same(fused.x.rowwise, to_fc1.quantize(plain.x).rowwise)
    assert_same(fused.x.colwise, to_fc1.quantize(plain.x).colwise)
    exact = seen.double().requires_grad_()
    swiglu(exact).backward(grad.double())
    assert relative_error(plain.x, exact.grad) < 4e-3


@pytest.mark.parametrize("recipe", [None, "blockwise", "tensorwise", "mxfp8", "delayed"])
@pytest.mark.parametrize("tokens", [1, 7, 129])
def test_layer_of_unlikely_shapes_equals_the_cpu(recipe, tokens):
    """CASES 90: widths that are no multiple of 16 and few tokens, through whole layers, gradients too."""
    m = replace(LLAMA, hidden_size=88, kv_channels=24, ffn_hidden_size=72)
    if recipe == "delayed":
        recipe_of = Policy(get_recipe(recipe, amax_history_len=1))
    else:
        recipe_of = Policy(get_recipe(recipe) if recipe else None)
    results = []
    for device in (torch.device("cpu"), CUDA):
        from megafp8.fp8 import DelayedScaling

        model = make_model(m, dtype=torch.bfloat16, recipe_of=recipe_of).to(device)
        sink = Sink(model)
        step = StepContext(grads=sink, scaling=DelayedScaling.of(model))
        ids, labels, _ = batch(1, tokens)
        loss = model(ids.to(device), step=step, labels=labels.to(device))
        loss.backward()
        results.append([loss.cpu(), *(b.cpu() - Sink.OFFSET for b in sink.buffers.values())])
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-2, atol=0)
    whole = torch.cat([expected.flatten() for expected in results[0][1:]]).norm()
    for got, expected in zip(results[1][1:], results[0][1:], strict=True):
        assert (got - expected).norm() < 0.1 * max(expected.norm(), 0.01 * whole)


def test_gradients_reach_fc1_as_bytes():
    """Of a blockwise layer: fc1's backward gets the bytes that SwiGLU's gradient wrote."""
    seen = []
    model = make_model(
        replace(LLAMA, hidden_size=128, ffn_hidden_size=256, num_layers=1), dtype=torch.bfloat16, device=CUDA,
        recipe_of=Policy(get_recipe("blockwise")),
    )  # fmt: skip
    original = model.layers[0].mlp.fc1.forward

    def spy(*args, **options):
        made = original(*args, **options)
        made[0].grad_fn.register_prehook(lambda grads: seen.append(type(grads[0])))
        return made

    model.layers[0].mlp.fc1.forward = spy
    tokens, labels, _ = (t.to(CUDA) for t in batch())
    model(tokens, step=StepContext(), labels=labels).backward()
    assert seen == [QuantizedTensor]


@pytest.mark.parametrize("tile", [Tile("1d", 128), Tile("1d", 32), Tile("2d", 128), Tile("tensor")], ids=str)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(40, 304), (1, 1), (300, 512)], ids=str)
def test_dequantized_values_are_the_references(shape, tile, format):
    (data, scale_inv), _ = reference.quantize(holes(*shape), OperandSpec(format, tile, Scale.FP32))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        got = dequantize.dequantize(data.to(CUDA), scale_inv.to(CUDA), tile, dtype).cpu()
        assert torch.equal(got.nan_to_num(1e9), reference.dequantize(data, scale_inv, tile, dtype).nan_to_num(1e9))


@pytest.mark.parametrize("kind", ["1d", "2d"])
@pytest.mark.parametrize("shape", [(3, 64, 160), (2, 300, 512), (1, 40, 100)], ids=str)
def test_stacks_of_mxfp8_weights_that_lie_apart(shape, kind):
    """Code 0 and NaN's among them."""
    tile = Tile(kind, 32)
    data = torch.randint(256, (shape[0], shape[1] + 8, shape[2]), dtype=torch.uint8)[:, : shape[1]].view(E4M3.dtype)
    codes = torch.randint(256, (shape[0], *tile.scale_shape(*shape[1:])), dtype=torch.uint8)
    codes[:, 0, 0], codes[:, 0, -1] = 0, 255
    for scales in (codes, codes.transpose(1, 2).contiguous().transpose(1, 2)):
        scales = scales.view(torch.float8_e8m0fnu)
        for dtype in (torch.bfloat16, torch.float32):
            got = dequantize.dequantize(data.to(CUDA), scales.to(CUDA), tile, dtype).cpu()
            want = torch.stack([reference.dequantize(*one, tile, dtype) for one in zip(data, scales, strict=True)])
            assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))
            there = data.to(CUDA), scales.to(CUDA)
            for stored, right in ((there, want), ((there[0][-1], there[1][-1]), want[-1])):
                turned = dequantize.dequantize(*stored, tile, dtype, transposed=True).cpu().transpose(-1, -2)
                assert torch.equal(turned.nan_to_num(1e9), right.nan_to_num(1e9))


@pytest.mark.parametrize(("groups", "n", "d"), [(8, 4, 128), (3, 1, 64), (1, 40, 32)])
def test_heads_are_split_rotated_and_joined(groups, n, d):
    qkv = normal(50, groups * (n + 2) * d).to(CUDA)
    angles = normal(50, d // 2, torch.float32).to(CUDA)
    cos, sin = angles.cos(), angles.sin()
    q, k, v = rope.split_heads(qkv, cos, sin, n)
    heads = qkv.view(50, groups, n + 2, d)
    for got, part in ((q, heads[:, :, :n]), (k, heads[:, :, n])):
        expected = _rotate(part, cos, sin, False).reshape(got.shape)
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-6)  # products may be fused with sums
    assert torch.equal(v, heads[:, :, n + 1])
    wide = torch.stack([q, q])[0].transpose(0, 1).contiguous().transpose(0, 1)  # strides of attention's gradients
    assert torch.equal(rope.join_heads(wide, k, v, cos, sin), rope.join_heads(q, k, v, cos, sin))
    torch.testing.assert_close(rope.join_heads(q, k, v, cos, sin), qkv, rtol=2**-6, atol=2**-6)
