"""The FP8 numerics on a GPU: bytes of the CPU, products within the tensor cores' error, the linear layer."""

import pytest
import torch

from megafp8.fp8 import DelayedScaling, Linear, QuantizedTensor, convert, gemm, get_recipe
from megafp8.params import GradSink
from megafp8.step import StepContext

RECIPES = {
    "tensorwise": get_recipe("tensorwise"),
    "blockwise": get_recipe("blockwise"),
    "blockwise-fp32": get_recipe("blockwise", power_of_two_scales=False),
    "blockwise-hybrid": get_recipe("blockwise", fp8_format="hybrid"),
    "mxfp8": get_recipe("mxfp8"),
    "mxfp8-1d": get_recipe("mxfp8", weight_tile="1d"),
}
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
SHAPES = [(256, 384, 512), (1, 7, 33), (7, 712, 896), (4092, 896, 712), (37, 70, 200)]


class Sink(GradSink):
    def __init__(self):
        self.buffers = {}

    def buffer(self, param):
        return self.buffers.setdefault(param.shape, torch.zeros(param.shape, device=param.device))

    def ready(self, param):
        pass


def random(rows, cols, positive=False, seed=0):
    generator = torch.Generator().manual_seed(seed * 7919 + rows * 1000 + cols)
    x = torch.randn(rows, cols, generator=generator)
    return (x.abs() if positive else x).bfloat16()


def raw(x):
    return x.contiguous().view(torch.uint8).cpu() if x.element_size() == 1 else x.contiguous().cpu()


def error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


def values(storage):
    return storage.dequantize(torch.float64)


@ALL_RECIPES
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize(
    "case", ["normal", "ragged", "nonfinite", "zeros", "subnormal", "strided", "one row", "no rows"]
)
def test_bytes_are_those_of_the_cpu(recipe, role, case):
    x = random(300, 290) if case == "ragged" else random(256, 384)
    if case == "nonfinite":
        x[::7, ::5], x[3, 4], x[5] = float("nan"), float("inf"), float("-inf")
    x = x * {"zeros": 0.0, "subnormal": 2.0**-130}.get(case, 1.0)
    x = {"strided": x.t()[:, ::2], "one row": x[:1], "no rows": x[:0]}.get(case, x)
    quantizer = recipe.quantizer(role)
    for dtype in (torch.bfloat16, torch.float32):
        cpu = quantizer.quantize(x.to(dtype), colwise=True)
        gpu = quantizer.quantize(x.cuda().to(dtype), colwise=True)
        for a, b in ((cpu.rowwise, gpu.rowwise), (cpu.colwise, gpu.colwise)):
            assert torch.equal(raw(a.data), raw(b.data))
            assert torch.equal(raw(a.scale_inv), raw(b.scale_inv))
            assert torch.equal(raw(a.dequantize()).nan_to_num(1e9), raw(b.dequantize()).nan_to_num(1e9))


@ALL_RECIPES
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_three_gemms(recipe, positive, shape, backend):
    """CASES 43, 90: against FP64 of the dequantized operands, shapes no tensor core likes included."""
    m, n, k = shape
    x = recipe.quantizer("input").quantize(random(m, k, positive, 1).cuda(), colwise=True)
    w = recipe.quantizer("weight").quantize(random(n, k, positive, 2).cuda(), colwise=True)
    dy = recipe.quantizer("grad_output").quantize(random(m, n, positive, 3).cuda(), colwise=True)
    bias = random(1, n, positive, 4)[0].cuda()
    y = gemm.fprop(x.rowwise, w.rowwise, bias, backend=backend)
    assert error(y, values(x.rowwise) @ values(w.rowwise).t() + bias.double()) < 3e-3
    dx = gemm.dgrad(dy.rowwise, w.colwise, backend=backend)
    assert error(dx, values(dy.rowwise) @ values(w.colwise).t()) < 2.5e-3
    expected = values(dy.colwise) @ values(x.colwise).t()
    buffer = torch.ones(n, k, device="cuda")
    dw = gemm.wgrad(dy.colwise, x.colwise, out=buffer, backend=backend)
    assert error(dw, expected + 1) < (1e-6 if backend == "reference" else 7e-4)


def test_tensor_cores_are_used():
    """Tensorwise and blockwise products go through cuBLASLt, not silently through something slower."""
    for name in ("tensorwise", "blockwise"):
        recipe = RECIPES[name]
        x = recipe.quantizer("input").quantize(random(64, 256).cuda(), colwise=True)
        w = recipe.quantizer("weight").quantize(random(128, 256).cuda(), colwise=True)
        dy = recipe.quantizer("grad_output").quantize(random(64, 128).cuda(), colwise=True)
        gemm.fprop(x.rowwise, w.rowwise, backend="cublaslt")
        gemm.dgrad(dy.rowwise, w.colwise, backend="cublaslt")
        gemm.wgrad(dy.colwise, x.colwise, backend="cublaslt")


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8", "delayed"])
@pytest.mark.parametrize("rows", [0, 1, 300])
@pytest.mark.parametrize("requantize", [False, True])
def test_linear_equals_the_cpu(name, rows, requantize):
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        linear = Linear(200, 72, recipe=get_recipe(name), params_dtype=torch.bfloat16, name="l.weight",
                        requantize_input=requantize).to(device)  # fmt: skip
        history = DelayedScaling.of(torch.nn.ModuleList([linear]))
        sink, outputs = Sink(), []
        for step in range(3):
            x = random(rows, 200, seed=step).to(device).requires_grad_()
            y = linear(x, StepContext(grads=sink, scaling=history, iteration=step))
            y.backward(random(rows, 72, seed=step + 5).to(device))
            outputs += [y, x.grad]
            if history is not None:
                history.advance()
        results.append([t.detach().cpu() for t in (*outputs, *sink.buffers.values())])
    for got, expected in zip(results[1], results[0], strict=True):
        assert got.shape == expected.shape
        if expected.numel() and rows:
            assert error(got, expected.double()) < 4e-3


def test_high_precision_wgrad_is_fp32():
    linear = Linear(2, 3, params_dtype=torch.bfloat16, device="cuda")
    sink = Sink()
    for value in (256.0, 1.0):
        y = linear(torch.ones(1, 2, dtype=torch.bfloat16, device="cuda"), StepContext(grads=sink))
        y.backward(torch.full_like(y, value))
    assert torch.equal(sink.buffer(linear.weight).cpu(), torch.full((3, 2), 257.0))


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8", "delayed"])
def test_converted_model_trains(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 48)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    convert(model, get_recipe(name))
    x, losses = torch.randn(128, 64, device="cuda"), []
    for _ in range(30):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()  # fused: it does not count its writes in the parameters' versions
        optimizer.zero_grad()
        if name == "delayed":
            model.fp8_scaling.advance()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_quantized_tensor_moves_between_devices():
    q = QuantizedTensor.from_tensor(random(130, 200), get_recipe("blockwise").quantizer("input"), colwise=True)
    moved = q.cuda()
    assert moved.rowwise.scale_inv.is_cuda
    assert moved.rowwise.scale_inv.stride() == q.rowwise.scale_inv.stride()
    assert torch.equal(moved.cpu().colwise.dequantize(), q.colwise.dequantize())
    moved.copy_(random(130, 200, seed=3))
    assert torch.equal(
        moved.dequantize().cpu(),
        get_recipe("blockwise").quantizer("input").quantize(random(130, 200, seed=3)).dequantize(),
    )
