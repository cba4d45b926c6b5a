"""Kernels of one scale an expert: the bytes of each expert quantized by itself, its rows picked out of the tokens."""

import pytest
import torch
from megafp8.kernels import quantize_experts, swiglu_quantize

from megafp8.fp8 import reference
from tests.gpu.quantize_cases import DEVICE, EMULATING, SPECS, assert_same, expected, holes, normal, wide
from tests.gpu.test_quantize_fused import gates

TENSORS = ["tensorwise", "tensorwise_e5m2", "tensorwise_pow2"]
ROOMS = [[128, 0, 256, 0], [256]] if not EMULATING else [[128, 0, 128]]
TOKENS = 100


def ends_of(room: list[int]) -> torch.Tensor:
    return torch.tensor(room, device=DEVICE).cumsum(0).to(torch.int32)


def of_each(x: torch.Tensor, spec, room: list[int], **given: torch.Tensor):
    """(rowwise, colwise) of each expert's rows alone, side by side, by the reference on the CPU."""
    rows, columns, start = [], [], 0
    for expert, count in enumerate(room):
        own = {name: value.cpu()[expert : expert + 1] for name, value in given.items()}
        row, col = expected(x.cpu()[start : start + count], spec, **own)
        rows.append(row)
        columns.append(col)
        start += count
    scales = torch.cat([scale for _, scale in rows])
    made = [torch.cat([part.view(torch.uint8) for part, _ in parts], dim) for parts, dim in ((rows, 0), (columns, 1))]
    return tuple((data.view(spec.format.dtype), scales) for data in made)


def used(stored, rows: int, dim: int):
    data, scale_inv = (t.cpu() for t in stored)
    return data.view(torch.uint8).narrow(dim, 0, rows).contiguous().view(data.dtype), scale_inv


def index_of(room: list[int], more: int) -> torch.Tensor:
    """Tokens of rows, some of none; past the last expert's anything."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-20, TOKENS, (sum(room) + more,), generator=generator)


@pytest.mark.parametrize("make", [normal, holes, wide])
@pytest.mark.parametrize("room", ROOMS, ids=str)
@pytest.mark.parametrize("name", TENSORS)
def test_rows_picked_by_an_index(name, room, make):
    """CASES 11, 12: experts without rows, rows that fill up, rows that nobody has."""
    spec, index, ends = SPECS[name], index_of(room, 128), ends_of(room)
    for width in (384, 200):
        x, total = make(TOKENS, width), sum(room)
        picked = torch.where(index[:, None] >= 0, x[index.clamp(min=0)], 0)
        amax = quantize_experts.expert_amaxes(quantize_experts.row_amaxes(x.to(DEVICE)), ends, index.to(DEVICE))
        want = [reference.amax(part, spec.tile).item() if len(part) else 0.0 for part in picked[:total].split(room)]
        assert amax.tolist() == want
        made = quantize_experts.quantize_experts(
            x.to(DEVICE), ends, spec, True, True, amax=amax, index=index.to(DEVICE)
        )
        for stored, right, dim in zip(made, of_each(picked[:total], spec, room), (0, 1), strict=True):
            assert_same(used(stored, total, dim), right, f"{width} {dim}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("given", [None, "amax", "scale"])
@pytest.mark.parametrize("name", TENSORS)
def test_rows_as_they_lie(name, given, dtype):
    """Under amaxes or scales of a history, too."""
    room, spec = ROOMS[0], SPECS[name]
    ends, total = ends_of(room), sum(room)
    x = torch.cat([normal(total, 256, dtype) * 3, torch.full((5, 256), torch.nan, dtype=dtype)])
    amax = quantize_experts.expert_amaxes(quantize_experts.row_amaxes(x.to(DEVICE)), ends)
    options = {"amax": amax}
    if given is not None:
        options = {given: torch.linspace(0.5, 64, len(room), device=DEVICE)}
    right = of_each(x[:total], spec, room, **({} if given is None else options))
    made = quantize_experts.quantize_experts(x.to(DEVICE), ends, spec, True, True, **options)
    row, none = quantize_experts.quantize_experts(x.to(DEVICE), ends, spec, True, False, **options)
    empty, col = quantize_experts.quantize_experts(x.to(DEVICE), ends, spec, False, True, **options)
    assert none is None
    assert empty is None
    for stored in (made[0], row):
        assert_same(used(stored, total, 0), right[0])
    for stored in (made[1], col):
        assert_same(used(stored, total, 1), right[1])


def test_no_rows_at_all():
    ends, spec = torch.zeros(3, dtype=torch.int32, device=DEVICE), SPECS["tensorwise"]
    for tokens in (0, 4):
        x, index = normal(tokens, 256).to(DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
        amax = quantize_experts.expert_amaxes(quantize_experts.row_amaxes(x), ends, index)
        row, col = quantize_experts.quantize_experts(x, ends, spec, True, True, amax=amax, index=index)
        assert row[0].shape == (0, 256)
        assert col[0].shape == (256, 0)
        assert row[1].tolist() == [1.0] * 3


@pytest.mark.skipif(EMULATING, reason="4.3 GB")
def test_amaxes_of_rows_far_apart():
    """Columns that begin more than 2^31 elements after the first."""
    x = torch.zeros(1 << 14, (1 << 17) + 128, dtype=torch.bfloat16, device=DEVICE).t()
    x[5, -1], x[-1, -1], x[7, 0] = 3, -4, 2
    amax = quantize_experts.row_amaxes(x).cpu()
    assert [amax[row].item() for row in (5, -1, 7, 6)] == [3, 4, 2, 0]


@pytest.mark.parametrize("source", ["values", "bytes"])
@pytest.mark.parametrize("name", TENSORS)
def test_swiglu_and_its_gradient(name, source):
    """As of each expert alone: bytes, amaxes, what is kept of fc1's output; also under scales of a history."""
    room, spec, width = ROOMS[0], SPECS[name], 128 if EMULATING else 384
    total, ends, stored = sum(room), ends_of(room), SPECS["blockwise"]
    values = torch.cat([gates(total, width), torch.full((5, 2 * width), torch.nan).bfloat16()]).to(DEVICE)
    dy = torch.cat([normal(total, width, seed=3), torch.full((5, width), torch.nan).bfloat16()]).to(DEVICE)
    weights, x = torch.rand(total + 5, device=DEVICE), values
    dy[:128] *= 100
    if source == "bytes":
        row = expected(values.cpu(), stored, colwise=False)[0]
        x = tuple(t.to(DEVICE) for t in row)
    scale, options = torch.linspace(0.5, 64, len(room), device=DEVICE), {"ends": ends, "weights": weights}
    for history in (False, True):
        amax, d_amax = (torch.zeros(len(room), device=DEVICE) for _ in range(2))
        given = {"scale": scale} if history else {}
        kept = {"x_spec": stored} if source == "values" else {}
        made = swiglu_quantize.swiglu_quantize(x, spec, amax_out=amax, **options, **given, **kept)
        y_given = {"y_scale": scale} if history else {"y_amax": amax}
        grad = swiglu_quantize.swiglu_grad_quantize(
            dy, x, spec, amax_out=d_amax, y_spec=spec, **options, **given, **y_given
        )
        start = 0
        for expert, count in enumerate(room):
            own = slice(start, start + count)
            part = tuple(t[own] for t in x) if source == "bytes" else x[own]
            alone = {"weights": weights[own], "high_precision": True}
            y = swiglu_quantize.swiglu_quantize(part, spec, **alone).y
            dx = swiglu_quantize.swiglu_grad_quantize(dy[own], part, spec, **alone)
            of = {name: value.cpu()[expert : expert + 1] for name, value in given.items()}
            row, col = expected(y, spec, **of)
            assert amax[expert].item() == (y.float().abs().max().item() if count else 0)
            assert d_amax[expert].item() == (dx.dx.float().abs().max().item() if count else 0)
            d_row, d_col = expected(dx.dx, spec, **of)
            for got, right, dim in (
                (made.rowwise, row, 0), (grad.y_colwise, col, 1), (grad.rowwise, d_row, 0), (grad.colwise, d_col, 1),
            ):  # fmt: skip
                data, scales = got[0].cpu().view(torch.uint8), got[1].cpu()
                mine = data.narrow(dim, start, count).contiguous().view(got[0].dtype), scales[expert : expert + 1]
                assert_same(mine, right, f"expert {expert}, dim {dim}")
            torch.testing.assert_close(grad.dweights[own], dx.dweights, rtol=1e-5, atol=1e-5)
            if kept:
                bytes_of, scales = (t[own].cpu() for t in made.x_rowwise)
                assert_same((bytes_of, scales), expected(part, stored, True, False)[0], "kept")
            start += count
