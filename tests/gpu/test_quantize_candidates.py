"""Every configuration in the table gives the same bytes, not only the one in use."""

import pytest
import torch
from megafp8.kernels import (
    norm_quantize,
    quantize,
    quantize_configs,
    quantize_derive,
    quantize_experts,
    swiglu_quantize,
)

from tests.gpu.quantize_cases import DEVICE, EMULATING, SPECS, assert_same, expected, holes, normal, wide
from tests.gpu.test_quantize_derive import offsets_of
from tests.gpu.test_quantize_experts import ends_of, used
from tests.gpu.test_quantize_fused import gates

SHAPES = [(256, 512), (200, 304)] if not EMULATING else [(136, 144)]


def quantized(name: str, *orientations: bool):
    spec = SPECS[name]
    return lambda shape: quantize.quantize(holes(*shape).to(DEVICE), spec, *orientations)


def strided(shape):
    return quantize.quantize(wide(shape[0], 2 * shape[1]).to(DEVICE)[:, : shape[1]], SPECS["tensorwise"], True, False)


def grouped(rowwise: bool, colwise: bool, **options):
    def run(shape):
        x, offsets = holes(*shape).to(DEVICE), offsets_of([48, 0, shape[0] - 48])
        row, col = quantize_derive.quantize_grouped(x, offsets, SPECS["blockwise"], rowwise, colwise, **options)
        tiles = 1 + -(-(shape[0] - 48) // 128)
        return row, None if col is None else (col[0], col[1][:, :tiles])

    return run


def derived(shape):
    data, scale_inv = (t.to(DEVICE) for t in expected(holes(*shape), SPECS["blockwise"], colwise=False)[0])
    return None, quantize_derive.derive_colwise(data, scale_inv, SPECS["blockwise"])


def transposed(shape):
    data = (torch.arange(shape[0] * shape[1]) * 7).to(torch.uint8).view(shape).to(DEVICE)
    return (quantize_derive.transpose(data), torch.ones(1)), None


def norm(rowwise: bool, colwise: bool):
    def run(shape):
        x, weight = normal(*shape).to(DEVICE), normal(1, shape[1], seed=1)[0].to(DEVICE)
        if not rowwise:
            rstd = (x.float().square().mean(1) + 1e-5).rsqrt()
            return None, norm_quantize.norm_columns_quantize(x, weight, rstd, SPECS["blockwise"])
        made = norm_quantize.rms_norm_quantize(x, weight, SPECS["blockwise"], colwise=colwise, high_precision=True)
        want = expected(made.y, SPECS["blockwise"], True, colwise)
        assert_same(made.rowwise, want[0])
        assert_same(made.colwise, want[1])
        # Rows' sums are in another order, so that another configuration's rstd may differ by an ulp.
        torch.testing.assert_close(made.rstd, (x.float().square().mean(1) + 1e-5).rsqrt(), rtol=1e-6, atol=0)
        return None, None

    return run


def swiglu(rowwise: bool, colwise: bool, spec: str = "blockwise"):
    return lambda shape: swiglu_quantize.swiglu_quantize(
        gates(*shape).to(DEVICE), SPECS[spec], rowwise=rowwise, colwise=colwise
    )[:2]


def first_pass(of_gradient: bool):
    def run(shape):
        x = gates(*shape).to(DEVICE)
        amax = swiglu_quantize.swiglu_amax(x)
        if of_gradient:
            amax = swiglu_quantize.swiglu_grad_amax(normal(*shape).to(DEVICE), x)
        return (amax, amax), None

    return run


def gradient(with_y: bool):
    def run(shape):
        shape = shape[0], 256
        args = normal(*shape).to(DEVICE), gates(*shape).to(DEVICE), SPECS["blockwise"]
        options = {"weights": torch.linspace(0, 1, shape[0], device=DEVICE)}
        kept = swiglu_quantize.swiglu_grad_quantize(*args, **options, high_precision=True)  # uses the entry without y
        made = kept
        if with_y:
            made = swiglu_quantize.swiglu_grad_quantize(*args, **options, y_spec=SPECS["mxfp8"])
        want = expected(kept.dx, SPECS["blockwise"])
        assert_same(made.rowwise, want[0])
        assert_same(made.colwise, want[1])
        return made.y_colwise, None

    return run


def tensor_gradient(shape):
    shape = shape[0], 256
    made = swiglu_quantize.swiglu_grad_quantize(
        normal(*shape).to(DEVICE),
        gates(*shape).to(DEVICE),
        SPECS["tensorwise_e5m2"],
        y_spec=SPECS["tensorwise"],
        y_scale=torch.full((1,), 3.0, device=DEVICE),
    )
    assert_same(made.colwise, tuple(t.cpu() for t in (made.rowwise[0].t(), made.rowwise[1])))
    return made.rowwise, made.y_colwise


def of_experts(shape):
    x, ends = wide(*shape).to(DEVICE), ends_of([0, 128])
    amax = quantize_experts.expert_amaxes(quantize_experts.row_amaxes(x), ends)
    row, col = quantize_experts.quantize_experts(x, ends, SPECS["tensorwise"], True, True, amax=amax)
    return used(row, 128, 0), used(col, 128, 1)


CALLS = {
    "rows": quantized("blockwise", True, False),
    "columns": quantized("blockwise", False, True),
    "both": quantized("blockwise", True, True),
    "both of 32": quantized("mxfp8", True, True),
    "squares": quantized("blockwise_2d", True, True),
    "squares of 32": quantized("mxfp8_2d", True, True),
    "amax": quantized("tensorwise", True, False),
    "amax strided": strided,
    "cast": quantized("tensorwise", True, False),
    "cast transposed": quantized("tensorwise", True, True),
    "grouped": grouped(True, True, alignment=8),
    "grouped rows": grouped(True, False),
    "grouped columns": grouped(False, True),
    "grouped derived": grouped(True, True, alignment=8, derived=True),
    "row amax": of_experts,
    "experts": of_experts,
    "derived": derived,
    "transpose": transposed,
    "norm rows": norm(True, False),
    "norm both": norm(True, True),
    "norm columns": norm(False, True),
    "swiglu rows": swiglu(True, False),
    "swiglu rows, plain": swiglu(True, False, "tensorwise"),
    "swiglu columns": swiglu(False, True),
    "swiglu both": swiglu(True, True),
    "swiglu amax": first_pass(False),
    "swiglu gradient amax": first_pass(True),
    "swiglu gradient": gradient(False),
    "swiglu gradient, y": gradient(True),
    "swiglu gradient, y, tensor": tensor_gradient,
}
CANDIDATES = [(name, i) for name, configs in quantize_configs.CONFIGS.items() for i in range(1, len(configs))]


def test_every_entry_of_the_table_is_here():
    assert CALLS.keys() == quantize_configs.CONFIGS.keys()


@pytest.mark.parametrize(("name", "candidate"), CANDIDATES, ids=lambda value: str(value).replace(" ", "_"))
def test_bytes_of_every_configuration(name, candidate):
    for shape in SHAPES:
        want = CALLS[name](shape)
        with quantize_configs.using(name, quantize_configs.CONFIGS[name][candidate]):
            got = CALLS[name](shape)
        for g, w, what in zip(got, want, ("rowwise", "colwise"), strict=True):
            assert_same(g, None if w is None else tuple(t.cpu() for t in w), what)
