"""Layers through the MXFP8 kernels, dense and of experts: a stand-in multiplies what the kernels would be handed.

The kernels themselves run in tests/gpu/test_gemm_scaled.py. Faked capabilities choose the route; results must be the
bits of the reference.
"""

from types import SimpleNamespace

import pytest
import torch

from megafp8.fp8 import Linear, decoded_gemm, gemm, get_recipe, reference, triton_gemm
from megafp8.fp8.formats import Scale, Tile
from megafp8.fp8.grouped_linear import GroupedLinear
from megafp8.fp8.storage import QuantizedStorage
from megafp8.step import StepContext
from tests.fp8 import test_grouped_gemm, test_grouped_linear

BLACKWELL = gemm.Capability(triton=True, any_layout=True, native_mxfp8=True)
HOPPER = gemm.Capability(cublaslt=True, triton=True, grouped_bf16=True)
OTHERS = gemm.Capability(cublaslt=True, triton=True)
COUNTS = [32, 0, 64, 160]


def storage(data, codes):
    assert codes.dtype == torch.float8_e8m0fnu
    kind = "1d" if codes.shape[0] == data.shape[0] else "2d"
    assert tuple(codes.shape) == Tile(kind, 32).scale_shape(*data.shape)
    return QuantizedStorage(data, codes, Tile(kind, 32), Scale.E8M0, "rowwise")


def product(a, b, dtype=torch.float32):
    """As `reference.matmul` of operands that are exact in BF16."""
    if dtype == torch.bfloat16 and reference._fast_bf16():
        return a @ b.t()
    return (a.float() @ b.float().t()).to(dtype)


class Kernels:
    """The functions of `kernels/gemm_scaled.py`, by the reference; and `torch._grouped_mm`'s."""

    def __init__(self):
        self.called = []

    def gemm_mxfp8(self, a, b, scale_a, scale_b, *, bias, out, out_dtype, accumulate):
        self.called.append("dense")
        a, b = storage(a, scale_a), storage(b, scale_b)
        if accumulate:
            return out.add_(reference.matmul(a, b))
        return reference.matmul(a, b, out_dtype) if bias is None else (reference.matmul(a, b) + bias).to(out_dtype)

    def grouped_gemm_mxfp8(self, a, b, scale_a, scale_b, ends, *, out_dtype):
        self.called.append("grouped")
        out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype)
        start = 0
        for g, end in enumerate(list(ends)):
            rows = slice(start, end)
            out[rows] = reference.matmul(storage(a[rows], scale_a[rows]), storage(b[g], scale_b[g]), out_dtype)
            start = end
        return out

    def fprop(self, x, weight, ends):
        self.called.append("decoded")
        assert {x.dtype, weight.dtype} == {torch.bfloat16}
        y = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
        start = 0
        for g, end in enumerate(list(ends)):
            y[start:end] = product(x[start:end], weight[g], x.dtype)
            start = end
        return y

    def grouped_wgrad_mxfp8(self, a, b, scale_a, scale_b, ends, *, out, accumulate, padding):
        self.called.append("grouped wgrad")
        assert padding == 16
        out = torch.zeros(len(ends), a.shape[0], b.shape[0]) if out is None else out
        assert accumulate or not out.any()
        start = tile = 0
        for g, end in enumerate(list(ends)):
            some, own = slice(start, end), slice(tile, tile + -(-int(end - start) // 32))
            out[g] += reference.matmul(storage(a[:, some], scale_a[:, own]), storage(b[:, some], scale_b[:, own]))
            start, tile = end, own.stop
        return out


@pytest.fixture
def route(monkeypatch):
    """Makes the CPU pass for a GPU of the capability given, and returns the stand-in."""

    def fake(capability):
        kernels = Kernels()

        def others(*names):
            return SimpleNamespace(**dict.fromkeys(names, lambda *_, **__: pytest.fail("not MXFP8")))

        dense = others("gemm_tensorwise", "gemm_1d2d", "gemm_1d1d")
        grouped = others(
            "grouped_gemm_tensorwise", "grouped_gemm_1d2d", "grouped_wgrad_tensorwise", "grouped_wgrad_1d1d"
        )
        modules = {"gemm": dense, "grouped_gemm": grouped, "gemm_scaled": kernels}
        monkeypatch.setattr(triton_gemm, "kernels", modules.get)
        monkeypatch.setattr(gemm, "capability", lambda device: capability)
        monkeypatch.setattr(decoded_gemm, "grouped_matmul", kernels)
        gemm._say_emulated.cache_clear()
        return kernels

    yield fake
    gemm._say_emulated.cache_clear()


def of_experts(recipe):
    """Output, dX and gradients of experts, as a step leaves them."""
    made = test_grouped_linear.linears(recipe)
    x = test_grouped_linear.rows(recipe, 1, test_grouped_linear.IN).requires_grad_()
    dy = test_grouped_linear.rows(recipe, 2, test_grouped_linear.OUT)
    room, alignment = test_grouped_linear.filled(recipe)
    sink, ends = test_grouped_linear.Sink(made, True), torch.tensor(room).cumsum(0).int()
    y = GroupedLinear(made)(x, ends, StepContext(grads=sink), alignment=alignment)
    y.backward(dy)
    return y[: ends[-1]], x.grad[: ends[-1]], *sink.buffers


def of_a_layer(recipe):
    torch.manual_seed(0)
    layer = Linear(200, 136, bias=True, recipe=recipe, params_dtype=torch.bfloat16)
    x = torch.randn(37, 200, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.backward(torch.randn_like(y))
    return y, x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize(
    ("run", "name", "capability", "expected"),
    [
        (of_a_layer, "blockwise", BLACKWELL, ["dense"] * 3),
        (of_a_layer, "mxfp8", BLACKWELL, ["dense"] * 3),
        (of_experts, "blockwise", BLACKWELL, ["grouped", "grouped", "grouped wgrad"]),
        (of_experts, "1d weights", BLACKWELL, ["grouped", "grouped", "grouped wgrad"]),
        (of_experts, "mxfp8", BLACKWELL, ["grouped", "grouped", "grouped wgrad"]),
        (of_experts, "mxfp8", HOPPER, ["decoded", "decoded", "grouped wgrad"]),
        (of_experts, "mxfp8", OTHERS, ["grouped", "grouped", "grouped wgrad"]),
    ],
)
def test_layers_run_through_the_mxfp8_kernels_with_the_same_bits(run, name, capability, expected, route):
    recipe = test_grouped_linear.RECIPES[name]
    want, kernels = run(recipe), route(capability)
    for got, other in zip(run(recipe), want, strict=True):
        assert torch.equal(got, other)
    assert kernels.called == expected


@pytest.mark.parametrize("capability", [BLACKWELL, HOPPER, OTHERS], ids=["Blackwell", "Hopper", "others"])
def test_experts_do_not_wait_for_their_sizes(capability, route, monkeypatch, caplog):
    """Where the device doesn't multiply MXFP8 the log says so, and `triton` refuses what `auto` emulates."""
    recipe, ends = get_recipe("mxfp8"), test_grouped_gemm.ends_of(COUNTS)
    monkeypatch.setattr(test_grouped_gemm, "N", 72)
    x, dy, w = test_grouped_gemm.operands(recipe, COUNTS)
    stacks = [test_grouped_gemm.stacked([getattr(q, o) for q in w]) for o in ("rowwise", "colwise")]
    kernels = route(capability)
    if capability is not BLACKWELL:
        with pytest.raises(ValueError, match="no MXFP8 GEMM: use 'auto'"):
            gemm.grouped_fprop(x.rowwise, stacks[0], ends, backend="triton")
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("waited"))
    gemm.grouped_fprop(x.rowwise, stacks[0], ends)
    gemm.grouped_dgrad(dy.rowwise, stacks[1], ends)
    gemm.grouped_wgrad(dy.colwise, x.colwise, ends, alignment=32)
    how = "decoded" if capability is HOPPER else "grouped"
    assert kernels.called == [how, how, "grouped wgrad"]
    assert ("emulated" in caplog.text) == (capability is not BLACKWELL)


def test_what_is_decoded_as_it_is_multiplied(route, monkeypatch):
    """Odd widths, FP32 results, experts that begin anywhere: `torch._grouped_mm` takes none of them."""
    recipe, counts = get_recipe("mxfp8"), [5, 0, 130]
    kernels, ends, called = route(HOPPER), test_grouped_gemm.ends_of(counts), []
    for width in (70, 72):
        monkeypatch.setattr(test_grouped_gemm, "N", width)
        x, dy, w = test_grouped_gemm.operands(recipe, counts)
        stack = test_grouped_gemm.stacked([q.rowwise for q in w])
        for dtype in (torch.bfloat16, torch.float32):
            assert gemm.grouped_fprop(x.rowwise, stack, ends, dtype).dtype == dtype
        called += ["decoded" if width == 72 else "grouped", "grouped"]
    assert kernels.called == called


def test_blockwise_experts_of_odd_sizes_keep_their_tiles(route):
    """128-wide tiles that restart at any token are no run of 32-wide ones: they stay blockwise."""
    counts = [5, 130]
    x, dy, _ = test_grouped_gemm.operands(get_recipe("blockwise"), counts)
    want = gemm.grouped_wgrad(dy.colwise, x.colwise, test_grouped_gemm.ends_of(counts))
    kernels = route(gemm.Capability(native_mxfp8=True))
    assert torch.equal(gemm.grouped_wgrad(dy.colwise, x.colwise, test_grouped_gemm.ends_of(counts)), want)
    assert kernels.called == []
    a, _ = gemm._rewritten(dy.colwise, x.colwise, "auto", BLACKWELL, 1)
    assert a.scale is Scale.POW2
    a, _ = gemm._rewritten(dy.colwise, x.colwise, "auto", BLACKWELL, 128)
    assert a.scale is Scale.E8M0
