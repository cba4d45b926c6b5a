"""Which backend multiplies: by capability, which tests fake, and by the table of measured speed."""

import json
from inspect import signature

import pytest
import torch

from megafp8.config import parse_args, with_vocab_size
from megafp8.fp8 import Linear, gemm, gemm_speed, get_recipe, policy, reference, scaled_mm, triton_gemm
from megafp8.fp8.formats import Scale
from megafp8.plan.shapes import linears

HOPPER = gemm.Capability(cublaslt=True, triton=True)
ADA = gemm.Capability(cublaslt=True)
BLACKWELL = gemm.Capability(cublaslt=True, triton=True, any_layout=True, native_mxfp8=True)
NOTHING = gemm.Capability()
SMALL = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --seq-length 32 --lr 1e-3 "
    "--train-iters 1 --tokenizer-type ByteTokenizer --mock-data --bf16 --fp8-format"
)


@pytest.fixture
def device(monkeypatch):
    """Makes the CPU pass for a GPU of the capability given."""

    def fake(capability):
        monkeypatch.setattr(gemm, "capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H")

    return fake


def operands(recipe, m=32, n=64, k=128):
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    x = recipe.quantizer("input").quantize(torch.ones(m, k), colwise=True)
    return x, recipe.quantizer("weight").quantize(torch.ones(n, k), colwise=True)


def forget():
    """Drops what was chosen by another table."""
    gemm_speed.fastest.cache_clear()
    gemm._choice.cache_clear()


def choice(a, b, backend="auto", out_dtype=torch.bfloat16, accumulates=False):
    return gemm._choose(a, b, out_dtype, backend, accumulates)[0]


def test_auto_goes_by_the_nearest_measured_weight(device, monkeypatch):
    rows = [[4096, 64, 128, {"triton": 1, "cublaslt": 2}], [4096, 4096, 8192, {"triton": 2, "cublaslt": 1}]]
    monkeypatch.setattr(gemm_speed, "table", lambda: {"H": {"1d2d": rows, "1d1d+=": [[64, 128, 9, rows[1][3]]]}})
    forget()
    device(HOPPER)
    for m in (1, 4096):  # the number of tokens has no say
        x, w = operands("blockwise", m)
        assert choice(x.rowwise, w.rowwise) == "cublaslt"
    x, w = operands("blockwise", 8, 2048, 8192)
    assert choice(x.rowwise, w.rowwise) == "triton"
    x, _ = operands("blockwise")
    assert choice(x.colwise, x.colwise, out_dtype=torch.float32, accumulates=True) == "triton"
    assert choice(x.colwise, x.colwise, out_dtype=torch.float32) == "cublaslt"  # not measured
    forget()


@pytest.mark.parametrize(("triton", "expected"), [(1009, "cublaslt"), (1011, "triton"), (900, "cublaslt")])
def test_auto_takes_cublaslt_in_a_tie(triton, expected, device, monkeypatch):
    row = [4096, 64, 128, {"triton": triton, "cublaslt": 1000}]
    monkeypatch.setattr(gemm_speed, "table", lambda: {"H": {"1d2d": [row]}})
    forget()
    device(HOPPER)
    x, w = operands("blockwise")
    assert choice(x.rowwise, w.rowwise) == expected
    forget()


@pytest.mark.parametrize(
    ("capability", "recipe", "expected"),
    [
        (NOTHING, "tensorwise", "reference"),
        (NOTHING, "blockwise", "reference"),
        (HOPPER, "mxfp8", "reference"),
        (BLACKWELL, "mxfp8", "cublaslt"),
        (HOPPER, get_recipe("blockwise", input_format="e5m2"), "triton"),
        (HOPPER, get_recipe("blockwise", input_tile="2d", weight_tile="1d"), "cublaslt"),
    ],
)
def test_auto_takes_what_the_device_can_do(capability, recipe, expected, device):
    device(capability)
    x, w = operands(recipe)
    assert choice(x.rowwise, w.rowwise) == expected


@pytest.mark.parametrize(
    ("capability", "backend", "recipe", "reason"),
    [
        (NOTHING, "triton", "blockwise", "no FP8 tensor cores"),
        (ADA, "triton", "blockwise", r"TMA \(compute capability 9.0\)"),
        (HOPPER, "triton", "mxfp8", "no MXFP8 GEMM"),
        (HOPPER, "cublaslt", "mxfp8", "no MXFP8 GEMM"),
        (HOPPER, "triton", get_recipe("blockwise", input_tile="2d", weight_tile="1d"), "no 2d x 1d scales"),
    ],
)
def test_what_a_device_cannot_do_is_refused_with_the_reason(capability, backend, recipe, reason, device):
    device(capability)
    x, w = operands(recipe)
    with pytest.raises(ValueError, match=f"{reason}.*: use 'auto'"):
        gemm.fprop(x.rowwise, w.rowwise, backend=backend)


@pytest.mark.parametrize("backend", ["triton", "cublaslt"])
@pytest.mark.parametrize("fast", [False, True])
def test_fast_accumulation_reaches_fprop_alone(backend, fast, device, monkeypatch):
    """From the recipe of a layer to what multiplies, whichever backend that is."""
    seen, module = [], {"triton": triton_gemm, "cublaslt": scaled_mm}[backend]
    arguments = signature(module.matmul)

    def matmul(a, b, bias, out_dtype, *rest):
        seen.append(arguments.bind(a, b, bias, out_dtype, *rest).arguments["fast"])
        return reference.matmul(a, b, out_dtype)

    monkeypatch.setattr(module, "matmul", matmul)
    device(HOPPER)
    options = {"recipe": get_recipe("tensorwise", fast_accumulation=fast), "gemm_backend": backend}
    layer = Linear(32, 48, bias=False, params_dtype=torch.bfloat16, **options)
    layer(torch.ones(16, 32, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert seen == [fast, False, False]


@pytest.mark.parametrize(
    ("capability", "flags", "reason"),
    [
        (HOPPER, "e4m3 --fp8-recipe mxfp8 --fp8-gemm-backend triton", "no MXFP8 GEMM; use auto"),
        (HOPPER, "hybrid --fp8-module-recipes *.fc1=blockwise:hybrid --fp8-gemm-backend cublaslt", "E4M3 only"),
        (ADA, "e4m3 --fp8-gemm-backend triton", "9.0"),
        (BLACKWELL, "e4m3 --fp8-recipe mxfp8 --fp8-gemm-backend triton", None),
        (BLACKWELL, "e4m3 --fp8-gemm-backend triton", None),
        (HOPPER, "e4m3 --fp8-recipe mxfp8", None),
        (HOPPER, "e4m3 --fp8-recipe mxfp8 --fp8-module-recipes *=blockwise --fp8-gemm-backend triton", None),
        (HOPPER, "e4m3 --fp8-module-recipes *.fc1=mxfp8 *=blockwise --fp8-gemm-backend triton", None),
    ],
)
def test_what_a_run_asks_for_is_checked_before_it_starts(capability, flags, reason, device):
    device(capability)
    config = with_vocab_size(parse_args(f"{SMALL} {flags}".split()), 256)
    recipes, backend = [linear.recipe for linear in linears(config)], config.fp8.fp8_gemm_backend
    if reason is None:
        policy.check_gemms(recipes, backend, torch.device("cpu"))
    else:
        with pytest.raises(ValueError, match=f"^--fp8-gemm-backend .*{reason}"):
            policy.check_gemms(recipes, backend, torch.device("cpu"))


def test_experts_ask_for_what_their_kernels_know(device):
    ends = torch.tensor([32], dtype=torch.int32)
    x, w = operands(get_recipe("blockwise", weight_tile="1d"))
    stacked = triton_gemm.QuantizedStorage(
        w.rowwise.data[None], w.rowwise.scale_inv[None], w.rowwise.tile, w.rowwise.scale, "rowwise"
    )
    expected = gemm.grouped_fprop(x.rowwise, stacked, ends)  # by the reference
    device(HOPPER)
    with pytest.raises(ValueError, match="128 x 128 tiles only: use 'auto'"):
        gemm.grouped_fprop(x.rowwise, stacked, ends, backend="triton")
    assert torch.equal(gemm.grouped_fprop(x.rowwise, stacked, ends, backend="reference"), expected)


def test_the_checked_in_table_is_well_formed():
    table = json.loads(gemm_speed.TABLE.read_text())
    assert table
    for kinds in table.values():
        for kind, rows in kinds.items():
            assert kind.removesuffix("+=") in ("tensorwise", "tensorwise fast", "1d2d", "1d1d", "mxfp8")
            assert all(min(m, n, k) > 0 and set(tflops) == {"triton", "cublaslt"} for m, n, k, tflops in rows)


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_a_layer_runs_blockwise_through_the_mxfp8_gemm(name, device, monkeypatch):
    """Hardware with block-scaled tensor cores, under emulation: all three GEMMs get MXFP8, and give the same bits."""

    def run():
        torch.manual_seed(0)
        layer = Linear(200, 136, bias=True, recipe=get_recipe(name), params_dtype=torch.bfloat16)
        x = torch.randn(37, 200, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x)
        y.backward(torch.randn_like(y))
        return y, x.grad, layer.weight.grad, layer.bias.grad

    expected, matmul, seen = run(), reference.matmul, []

    def watched(a, b, *rest):
        seen.append((a.scale, b.scale, a.tile.block, b.tile.block))
        return matmul(a, b, *rest)

    monkeypatch.setattr(reference, "matmul", watched)
    device(gemm.Capability(native_mxfp8=True))
    for got, want in zip(run(), expected, strict=True):
        assert torch.equal(got, want)
    assert seen == [(Scale.E8M0, Scale.E8M0, 32, 32)] * 3
