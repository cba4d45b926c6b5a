"""QuantizedTensor under PyTorch's operations (CASES 42): right or absent, never stale."""

import copy
import io

import pytest
import torch
from torch import nn

from megafp8.fp8 import QuantizedTensor, get_recipe

QUANTIZERS = {
    "tensorwise": get_recipe("tensorwise").quantizer("input"),
    "blockwise-1d": get_recipe("blockwise").quantizer("input"),
    "blockwise-2d": get_recipe("blockwise").quantizer("weight"),
    "blockwise-fp32-1d": get_recipe("blockwise", power_of_two_scales=False).quantizer("input"),
    "mxfp8-1d": get_recipe("mxfp8").quantizer("input"),
    "mxfp8-2d": get_recipe("mxfp8").quantizer("weight"),
    "e5m2": get_recipe("tensorwise").quantizer("grad_output"),
}
ALL = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


def values(rows=256, cols=192, seed=0):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make(quantizer, x=None):
    return QuantizedTensor.from_tensor(values() if x is None else x, quantizer, rowwise=True, colwise=True)


def copies(q):
    """Every orientation that is there, as values in the logical shape."""
    found = {}
    if q.rowwise is not None:
        found["rowwise"] = q.rowwise.dequantize()
    if q.colwise is not None:
        found["colwise"] = q.colwise.dequantize().t()
    assert found
    return found


def expect(q, parts):
    """`q` holds exactly `parts` (orientation -> values), or a subset of them."""
    for orientation, got in copies(q).items():
        assert torch.equal(got, parts[orientation]), orientation
    assert torch.equal(q.dequantize(), parts["rowwise" if q.rowwise is not None else "colwise"])


def part(parts, index):
    return {orientation: v[index] for orientation, v in parts.items()}


@ALL
def test_it_looks_like_the_tensor_it_stands_for(quantizer):
    x = values()
    q = make(quantizer, x)
    assert q.shape == x.shape
    assert q.dtype == torch.bfloat16
    assert q.is_contiguous()
    expected = quantizer.quantize(x, colwise=True)
    assert torch.equal(q.dequantize(), expected.dequantize())
    assert q.dequantize().dtype == torch.float32
    assert "rowwise+colwise" in repr(q)


@ALL
@pytest.mark.parametrize(
    "operation",
    [
        lambda q: q.detach(),
        lambda q: q.clone(),
        lambda q: q.contiguous(),
        lambda q: q.view(256, 192),
        lambda q: q.view(2, 128, 192).view(256, 192),
        lambda q: q.to(torch.bfloat16),
        lambda q: q.to("cpu", copy=True),
        lambda q: q.reshape(256, 192),
        lambda q: q.t().t(),
        lambda q: nn.Parameter(q).data,
        copy.deepcopy,
    ],
)
def test_operations_that_keep_every_byte(quantizer, operation):
    q = make(quantizer)
    result = operation(q)
    assert isinstance(result, QuantizedTensor)
    assert set(copies(result)) == {"rowwise", "colwise"}
    expect(result, copies(q))


@ALL
def test_clone_does_not_alias(quantizer):
    q = make(quantizer)
    before = copies(q)
    for twin in (q.clone(), copy.deepcopy(q), q.to("cpu", copy=True)):
        twin.copy_(10 * values(seed=1))
        expect(q, before)
    twin = q.clone()
    assert twin.rowwise.scale_inv.stride() == q.rowwise.scale_inv.stride()


@ALL
def test_copy_writes_bytes_and_scales_of_both_orientations(quantizer):
    q, x = make(quantizer), 10 * values(seed=1)
    alias, viewed = q.detach(), q.view(2, 128, 192)
    q.copy_(x)
    expected = make(quantizer, x)
    for tensor in (q, alias, viewed.view(256, 192)):
        expect(tensor, copies(expected))
        assert set(copies(tensor)) == {"rowwise", "colwise"}


@ALL
@pytest.mark.parametrize(
    ("operation", "plain"),
    [
        (lambda q: q.mul_(3.0), lambda x: x * 3.0),
        (lambda q: q.add_(values(seed=2), alpha=0.5), lambda x: x + 0.5 * values(seed=2)),
        (lambda q: q.zero_(), torch.zeros_like),
        (lambda q: q.fill_(2.5), lambda x: torch.full_like(x, 2.5)),
    ],
)
def test_in_place_operations_quantize_anew(quantizer, operation, plain):
    q = make(quantizer)
    expected = make(quantizer, plain(q.dequantize(torch.bfloat16)))
    operation(q)
    expect(q, copies(expected))


@ALL
def test_copy_from_a_quantized_tensor_keeps_its_bytes(quantizer):
    q, source = make(quantizer), make(quantizer, 10 * values(seed=1))
    q.copy_(source)
    expect(q, copies(source))
    only_rowwise = QuantizedTensor.from_tensor(values(seed=3), quantizer)
    q.copy_(only_rowwise)
    assert torch.equal(q.rowwise.dequantize(), only_rowwise.rowwise.dequantize())
    error = (q.colwise.dequantize().t() - values(seed=3).float()).norm() / values(seed=3).float().norm()
    assert error < 0.1
    other = QuantizedTensor.from_tensor(values(seed=4), get_recipe("tensorwise").quantizer("weight"))
    q.copy_(other)
    expect(q, copies(make(quantizer, other.dequantize())))


@ALL
def test_copy_into_a_plain_tensor(quantizer):
    q, x = make(quantizer), torch.empty(256, 192)
    x.copy_(q)
    assert torch.equal(x.bfloat16(), q.dequantize(torch.bfloat16))


@ALL
@pytest.mark.parametrize(
    "index",
    [
        slice(64, None), slice(128, None), slice(32, 100), slice(1, 7), slice(0, 0), slice(300, 400), slice(-128, None),
        (slice(None), slice(128, None)), (slice(None), slice(32, 100)), (slice(None), slice(3, 5)),
        (slice(128, 256), slice(32, 64)),
    ],
)  # fmt: skip
def test_slices(quantizer, index):
    """An orientation whose tiles don't start at the cut is absent; with none left the values are plain."""
    q = make(quantizer)
    result = q[index]
    assert tuple(result.shape) == tuple(values()[index].shape)
    if isinstance(result, QuantizedTensor):
        expect(result, part(copies(q), index))
    else:
        assert torch.equal(result, q.dequantize(torch.bfloat16)[index])


def test_slices_keep_what_they_can():
    one, two = make(QUANTIZERS["blockwise-1d"]), make(QUANTIZERS["blockwise-2d"])
    assert set(copies(one[64:])) == {"rowwise"}
    assert set(copies(one[128:])) == {"rowwise", "colwise"}
    assert set(copies(one[:, 64:])) == {"colwise"}
    assert set(copies(two[128:])) == {"rowwise", "colwise"}
    assert not isinstance(two[64:], QuantizedTensor)
    assert set(copies(make(QUANTIZERS["tensorwise"])[3:])) == {"rowwise", "colwise"}


@ALL
@pytest.mark.parametrize("size", [32, 100, 128, [128, 128], [200, 56]])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_split(quantizer, size, dim):
    if isinstance(size, list) and dim != 0:
        size = [128, 64]
    q, start = make(quantizer), 0
    parts = q.split(size, dim)
    assert [p.shape[dim] for p in parts] == [p.shape[dim] for p in values().split(size, dim)]
    for piece in parts:
        stop = start + piece.shape[dim]
        index = (slice(start, stop), slice(None)) if dim == 0 else (slice(None), slice(start, stop))
        if isinstance(piece, QuantizedTensor):
            expect(piece, part(copies(q), index))
        else:
            assert torch.equal(piece, q.dequantize(torch.bfloat16)[index])
        start = stop


@ALL
def test_slices_follow_their_base_and_are_not_written_to(quantizer):
    q = make(quantizer)
    rows = q[128:]
    with pytest.raises(ValueError, match="write to the whole tensor"):
        rows.zero_()
    q.copy_(5 * values(seed=6))
    expect(rows, part(copies(q), slice(128, None)))


@ALL
def test_transpose_swaps_the_orientations(quantizer):
    q = make(quantizer)
    t = q.t()
    assert t.shape == (192, 256)
    assert torch.equal(t.rowwise.dequantize(), q.colwise.dequantize())
    assert torch.equal(t.colwise.dequantize(), q.rowwise.dequantize())
    assert torch.equal(q.transpose(0, 1).dequantize(), t.dequantize())


@ALL
def test_other_operations_use_the_values(quantizer):
    q = make(quantizer)
    plain = q.dequantize(torch.bfloat16)
    operations = [
        lambda x: x + 1,
        lambda x: x.sum(),
        lambda x: x @ values().t(),
        lambda x: x.view(-1),
        lambda x: x.view(256, 12, 16),
        lambda x: x[3],
        lambda x: x[::2],
        lambda x: x.float(),
        lambda x: x.abs().max(),
        lambda x: torch.cat([x, x]),
    ]
    for operation in operations:
        result = operation(q)
        assert type(result) is torch.Tensor
        assert torch.equal(result.bfloat16(), operation(plain).bfloat16())


@ALL
def test_state_dict_round_trip(quantizer):
    module, other = nn.Module(), nn.Module()
    module.weight = nn.Parameter(make(quantizer))
    other.weight = nn.Parameter(make(quantizer, values(seed=8)))
    state = module.state_dict()
    assert isinstance(state["weight"], QuantizedTensor)
    other.load_state_dict(state)
    expect(other.weight, copies(module.weight))
    module.weight.data.copy_(values(seed=9))
    expect(other.weight, copies(make(quantizer)))
    other.load_state_dict({"weight": values(seed=10)})
    expect(other.weight, copies(make(quantizer, values(seed=10))))


def test_pickling_is_refused():
    q = make(QUANTIZERS["blockwise-1d"])
    with pytest.raises(TypeError, match="not pickled"):
        torch.save(q, io.BytesIO())
    with pytest.raises(TypeError, match="safetensors"):
        torch.save({"weight": q}, io.BytesIO())


def test_leading_dimensions():
    x = values().view(2, 128, 192)
    q = QuantizedTensor.from_tensor(x, QUANTIZERS["blockwise-1d"], colwise=True)
    assert q.shape == x.shape
    assert torch.equal(q.dequantize(), make(QUANTIZERS["blockwise-1d"]).dequantize().view(2, 128, 192))
    assert torch.equal(q[0].float(), q.dequantize(torch.bfloat16)[0].float())


def test_gradients_flow_through_as_plain_tensors():
    q = make(QUANTIZERS["blockwise-1d"]).requires_grad_()
    (q.view(2, 128, 192) * 2).sum().backward()
    assert type(q.grad) is torch.Tensor
    assert torch.equal(q.grad, torch.full((256, 192), 2.0, dtype=torch.bfloat16))
