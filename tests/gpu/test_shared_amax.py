"""Amaxes that ranks share between the pass that measures and the pass that quantizes: once, and for both copies."""

import pytest
import torch
from megafp8.kernels import norm_quantize, quantize, swiglu_quantize

from megafp8.core.transformer.activation import Activation, swiglu
from megafp8.core.transformer.norm import Norm
from megafp8.fp8.producer import Want
from megafp8.fp8.quantizer import Quantizer
from tests.gpu.quantize_cases import DEVICE, EMULATING, SPECS, Peer, assert_same, expected, holes, normal, raw
from tests.gpu.test_quantize_fused import gates

TENSORS = ["tensorwise", "tensorwise_e5m2", "tensorwise_pow2"]
ORIENTATIONS = [(True, False), (False, True), (True, True)]
# Kernels of one launch for both copies, of rows that programs don't divide; widths that fc1's halves straddle; no rows.
NORM_SHAPES = [(256, 4096), (130, 304), (0, 256)] if not EMULATING else [(12, 512), (0, 256)]
SWIGLU_SHAPES = [(256, 256), (7, 160), (300, 384), (0, 128), (0, 96)]
SHAPES = [(256, 384), (130, 67), (0, 256), (256, 0)]
if EMULATING:
    SWIGLU_SHAPES = [(20, 128), (7, 160), (0, 128), (0, 96)]


def amax_of(y: torch.Tensor) -> float:
    return y[y.isfinite()].float().abs().max().item() if y.numel() else 0.0


def place() -> torch.Tensor:
    return torch.zeros(1, device=DEVICE)


def assert_bytes(row, col, y, spec, orientations, shared) -> None:
    """Both copies are those of `y` under the shared amax; without elements scales are nobody's."""
    want = expected(y, spec, *orientations, amax=shared)
    for got, one, name in zip((row, col), want, ("rowwise", "colwise"), strict=True):
        if y.numel():
            assert_same(got, one, name)
        else:
            assert (got is None) == (one is None)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("orientations", ORIENTATIONS, ids=str)
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_norm(shape, orientations, name):
    spec, x, weight = SPECS[name], (normal(*shape) * 3).to(DEVICE), normal(1, shape[1], seed=2)[0].to(DEVICE)
    plain = norm_quantize.rms_norm_quantize(x, weight, spec, high_precision=True)
    options = dict(zip(("rowwise", "colwise"), orientations, strict=True))
    for rstd in (None, plain.rstd):
        peer, out = Peer(), place()
        made = norm_quantize.rms_norm_quantize(x, weight, spec, **options, amax_out=out, share=peer, rstd=rstd)
        shared = peer.shared(amax_of(plain.y))
        assert torch.equal(out.cpu(), shared)  # what backward will be given
        assert torch.equal(made.rstd, plain.rstd)
        assert_bytes(made.rowwise, made.colwise, plain.y, spec, orientations, shared)
    made = norm_quantize.rms_norm_quantize(x, weight, spec, **options, share=Peer())  # without a place of its own
    assert_bytes(made.rowwise, made.colwise, plain.y, spec, orientations, shared)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("orientations", ORIENTATIONS, ids=str)
@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
def test_swiglu(shape, orientations, name):
    spec, x = SPECS[name], gates(*shape).to(DEVICE)
    options = dict(zip(("rowwise", "colwise"), orientations, strict=True))
    for weights in (None, torch.rand(shape[0], device=DEVICE)):
        y = swiglu_quantize.swiglu_quantize(x, spec, weights=weights, high_precision=True).y
        for stored in ({}, {"x_spec": SPECS["blockwise"]}):
            peer, out = Peer(), place()
            made = swiglu_quantize.swiglu_quantize(
                x, spec, weights=weights, amax_out=out, share=peer, **options, **stored
            )
            shared = peer.shared(amax_of(y))
            assert torch.equal(out.cpu(), shared)
            assert_bytes(made.rowwise, made.colwise, y, spec, orientations, shared)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("orientations", ORIENTATIONS, ids=str)
@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
def test_swiglu_gradient(shape, orientations, name):
    """With SwiGLU's output once more, under the amax that forward has shared."""
    spec, x, dy = SPECS[name], gates(*shape).to(DEVICE), normal(*shape, seed=3).to(DEVICE)
    y = swiglu_quantize.swiglu_quantize(x, spec, high_precision=True).y
    dx = swiglu_quantize.swiglu_grad_quantize(dy, x, spec, high_precision=True).dx
    y_amax, options = place() + 3 * amax_of(y), dict(zip(("rowwise", "colwise"), orientations, strict=True))
    for again in ({}, {"y_spec": SPECS["tensorwise"], "y_amax": y_amax}):
        peer, out = Peer(), place()
        made = swiglu_quantize.swiglu_grad_quantize(dy, x, spec, amax_out=out, share=peer, **options, **again)
        shared = peer.shared(amax_of(dx))
        assert torch.equal(out.cpu(), shared)
        assert_bytes(made.rowwise, made.colwise, dx, spec, orientations, shared)
    assert_bytes(None, made.y_colwise, y, SPECS["tensorwise"], (False, True), y_amax)


@pytest.mark.parametrize("orientations", ORIENTATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize(shape, orientations):
    """Also of a view whose columns are contiguous; without elements the scale is that of the shared amax as well."""
    spec = SPECS["tensorwise"]
    for x in (holes(*shape) if all(shape) else normal(*shape), normal(*shape[::-1]).t()):
        for out in (place(), None):
            peer = Peer()
            row, col = quantize.quantize(x.to(DEVICE), spec, *orientations, amax_out=out, share=peer)
            shared = peer.shared(amax_of(x))
            assert out is None or torch.equal(out.cpu(), shared)
            want = expected(x, spec, *orientations, amax=shared)
            assert_same(row, want[0], "rowwise")
            assert_same(col, want[1], "colwise")


def test_there_must_be_something_to_share():
    x, weight = gates(7, 128).to(DEVICE), torch.ones(256, device=DEVICE, dtype=torch.bfloat16)
    calls = [
        lambda **options: norm_quantize.rms_norm_quantize(x, weight, **options),
        lambda **options: swiglu_quantize.swiglu_quantize(x, **options),
        lambda **options: swiglu_quantize.swiglu_grad_quantize(x[:, :128], x, **options),
        lambda **options: quantize.quantize(x, **options),
    ]
    given = {"amax": place(), "scale": place() + 1}
    for call in calls:
        for name, value in given.items():
            with pytest.raises(ValueError, match="own amax"):
                call(spec=SPECS["tensorwise"], share=Peer(), **{name: value})
        with pytest.raises(ValueError, match="tensor tile"):
            call(spec=SPECS["blockwise"], share=Peer())


@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["norm", "swiglu", "swiglu, stored"])
def test_producers(shape, kind):
    """The bytes that backward makes again with forward's shared amax are forward's, and the gradient's are shared."""
    rows, columns = shape
    quantizer, of_grad = Quantizer(SPECS["tensorwise"]), Quantizer(SPECS["tensorwise_e5m2"])
    if kind == "norm":
        producer = Norm("n", columns, kind="RMSNorm", eps=1e-5, dtype=torch.bfloat16, device=DEVICE)
        torch.nn.init.ones_(producer.weight)
        x, tensors = normal(*shape).to(DEVICE), (producer.weight.detach(),)
    else:
        producer = Activation(swiglu, gated=True, store_fp8="stored" in kind)
        x, tensors = gates(*shape).to(DEVICE), ()
    peer, other = Peer(), Peer()
    want = Want(quantizer, share=peer).measuring(x.device)
    value, kept = producer.produce(x, tensors, want)
    assert torch.equal(want.amax_out.cpu(), peer.shared(peer.given[0].item()))
    again = Want(quantizer, rowwise=False, colwise=True, amax=want.amax_out)
    grad = normal(rows, columns, seed=3).to(DEVICE)
    plain = producer.gradient(grad, kept, tensors, None, False).x
    grads = producer.gradient(grad, kept, tensors, Want(of_grad, True, True, share=other), again)
    shared = other.shared(amax_of(plain))
    stored = [copy and (copy.data, copy.scale_inv) for copy in (grads.x.rowwise, grads.x.colwise)]
    assert_bytes(*stored, plain, of_grad.spec, (True, True), shared)
    if kind != "swiglu, stored":  # of which backward knows rounded values
        assert torch.equal(raw(grads.value.colwise.data), raw(value.rowwise.data).t())
    if rows:
        assert torch.equal(grads.value.colwise.scale_inv, value.rowwise.scale_inv)
