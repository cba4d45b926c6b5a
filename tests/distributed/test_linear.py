"""Column- and row-parallel linears against the whole linear, byte for byte where they quantize, and what they send."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from megafp8.config import Config
from megafp8.fp8 import CommPlan
from megafp8.fp8.comm import ALONE
from megafp8.fp8.feature_grid import FeatureGrid
from megafp8.parallel import Axis, build_parallel
from tests.cases import quick
from tests.distributed.layouts import distance
from tests.distributed.linears import (
    CASES,
    RECIPES,
    K,
    N,
    bits,
    data,
    joined,
    parallel_linear,
    parts_of,
    run,
)


def one_of_both(case: tuple) -> bool:
    """Each recipe in both kinds of linears, with and without sequence parallelism."""
    kind, sp, recipe = case
    return recipe == "high precision" or (kind == "column") == sp


@pytest.mark.parametrize(("kind", "sp", "recipe"), quick(CASES, one_of_both))
def test_equals_the_whole_linear(pool, kind, sp, recipe):
    """CASES 13: rows a rank that are no multiple of any tile, on 2 and 4 ranks."""
    for world, rows in ((2, 200), (4, 84)):
        ranks = pool.run_on(world, parallel_linear, kind, sp, recipe, rows)
        expected = run(ALONE, recipe, data(rows))
        actual = joined(kind, sp, [results for results, _, _ in ranks])
        # What is summed over ranks is rounded to BF16 before: y of row-, dx of column-parallel linears.
        names, summed = ("y", "dx", "dw", "db"), {"row": "y", "column": "dx"}[kind]
        for name, a, b in zip(names, actual, expected, strict=True):
            exact = 2e-3 if a.dtype == torch.bfloat16 else 1e-6
            assert distance(a, b) <= (5e-3 if name == summed else exact), name


# GEMM -> along which dimension of its stored operands A and B the ranks have parts; None: each has the whole.
CUTS = {
    "column": {"fprop": (None, 0), "dgrad": (1, 1), "wgrad": (0, None)},
    "row": {"fprop": (1, 1), "dgrad": (None, 0), "wgrad": (None, 0)},
}


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "high precision"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_quantized_operands_are_those_of_the_whole_linear(pool, kind, recipe):
    """Bytes and scales of every operand of every GEMM, with tiles that lie across ranks (CASES 34)."""
    rows, world = 200, 2
    operands: dict = {}
    run(ALONE, recipe, data(rows), operands)
    expected = bits(operands)
    for rank, (_, actual, _) in enumerate(pool.run_on(world, parallel_linear, kind, True, recipe, rows)):
        for name, (a, b) in CUTS[kind].items():
            for place, dim in enumerate((a, a, b, b)):
                whole = expected[name][place]
                if dim is not None and whole.numel() > 1:  # a tensorwise scale is shared
                    whole = whole.chunk(world, dim)[rank]
                assert torch.equal(actual[name][place], whole), (name, place)


def unshared(recipe: str, rows: int) -> dict[str, list[Tensor]]:
    with mock.patch.object(Axis, "max_", lambda self, x: x):
        return parallel_linear("column", True, recipe, rows)[1]


@pytest.mark.parametrize(("recipe", "gemm_name"), [("tensorwise", "fprop"), ("blockwise", "wgrad"), ("mxfp8", "wgrad")])
def test_amaxes_that_are_not_shared_would_show(pool, recipe, gemm_name):
    """The bytes that the test above compares are others without the max all-reduces."""
    shared, alone = pool.run_on(2, parallel_linear, "column", True, recipe, 200), pool.run_on(2, unshared, recipe, 200)
    for (_, good, _), bad in zip(shared, alone, strict=True):
        assert any(not torch.equal(a, b) for a, b in zip(good[gemm_name], bad[gemm_name], strict=True))


@pytest.mark.parametrize(
    ("recipe", "kind"),
    quick(
        [(recipe, kind) for recipe in ("tensorwise", "blockwise", "mxfp8") for kind in ("column", "row")],
        lambda case: case[1] == "column" or case[0] == "tensorwise",
    ),
)
def test_fp8_gather_on_equals_off_bitwise(pool, kind, recipe):
    for rows in (256, 200):
        on, off = (pool.run_on(2, parallel_linear, kind, True, recipe, rows, 1, fp8) for fp8 in (True, False))
        for (a, a_bits, a_log), (b, b_bits, b_log) in zip(on, off, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
            assert all(torch.equal(x, y) for name in a_bits for x, y in zip(a_bits[name], b_bits[name], strict=True))
            if kind == "column" or recipe == "tensorwise":
                assert a_log.bytes("gather") < 0.6 * b_log.bytes("gather")


ON_THE_WIRE = {
    "high precision": 2,
    "tensorwise": 1,
    "blockwise": 1 + 4 / 128,
    "mxfp8": 1 + 1 / 32,
    "blockwise fp32 scales": 2,
}


@pytest.mark.parametrize(("recipe", "bytes_a_value"), ON_THE_WIRE.items())
def test_bytes_on_the_wire(pool, recipe, bytes_a_value):
    """X is gathered in forward and again in backward, in FP8 with its scales; dX and Y are scattered in BF16."""
    rows, world = 512, 2
    local = rows // world * K
    for _, _, log in pool.run_on(world, parallel_linear, "column", True, recipe, rows):
        assert log.bytes("gather") == 2 * local * bytes_a_value
        assert log.bytes("scatter_sum") == rows * K * 2
        assert log.bytes("sum") == 0
        assert log.bytes("max") <= 3 * 4  # tensorwise: the amaxes of input, weight and gradient
    for _, _, log in pool.run_on(world, parallel_linear, "row", True, recipe, rows):
        assert log.bytes("gather") == rows // world * N * (1 if recipe == "tensorwise" else 2)
        assert log.bytes("scatter_sum") == rows * N * 2
    for _, _, log in pool.run_on(world, parallel_linear, "row", False, recipe, rows):
        assert (log.bytes("gather"), log.bytes("sum")) == (0, rows * N * 2)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_nan_of_one_rank_reaches_all(pool, recipe):
    """CASES 34: a NaN in rank 1's rows is in the gathered operand of both, and changes no scale."""
    clean, dirty = (pool.run_on(2, parallel_linear, "column", True, recipe, 200, 1, True, nan) for nan in (False, True))
    for (_, good, _), (results, bad, _) in zip(clean, dirty, strict=True):
        assert results[0][199].isnan().all()
        assert not results[0][:199].isnan().any()
        assert results[2].isnan().any()
        assert bad["fprop"][0][199, 5] == bad["wgrad"][2][5, 199] == 0x7F
        assert (good["fprop"][0] != bad["fprop"][0]).sum() == 1


def saved(sp: bool, recipe: str, rows: int) -> int:
    """Bytes that a column-parallel linear keeps for backward, its weight aside."""
    config = Config().replace(world_size=2, tensor_model_parallel_size=2)
    tp = build_parallel(config, "cpu").tp
    x, dy, weight, bias = parts_of("column", tp, sp, data(rows))
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(CommPlan(tp, "column", sp), recipe, (x, dy, weight, bias))
    return sum(kept.values())


@pytest.mark.parametrize(("rows", "tiles"), [(512, (2, 2)), (200, (1, 2))])
def test_only_the_local_shard_is_kept(pool, rows, tiles):
    """With the scales of the tiles that it touches; rows 100 to 199 lie in two."""
    local = rows // 2
    assert pool.run_on(2, saved, True, "blockwise", rows) == [K * local + 4 * K * n for n in tiles]
    assert pool.run_on(2, saved, True, "tensorwise", rows) == [K * local + 4] * 2
    assert pool.run_on(2, saved, True, "high precision", rows) == [2 * K * local] * 2
    assert pool.run_on(2, saved, False, "tensorwise", rows) == [K * rows + 4] * 2


# Cuts of features that go through tiles: (parts, features a part, ranks).
UNEVEN = [(1, 336, 4), (2, 96, 2), (2, 320, 4), (1, 40, 4)]
TILED = ["blockwise", "blockwise fp32 scales", "mxfp8"]


def uneven_data(kind: str, features: int, rows: int) -> tuple[Tensor, ...]:
    """The whole linear with `features` cut ones: column: out, row: in."""
    x, dy, weight, bias = data(rows)
    x, dy = x.repeat(1, 2), dy.repeat(1, 2)
    weight, bias = weight.repeat(2, 2), bias.repeat(2)
    weight = weight * torch.logspace(-2, 2, len(weight))[:, None].bfloat16()
    if kind == "column":
        return x[:, :K], dy[:, :features], weight[:features, :K], bias[:features]
    return x[:, :features], dy[:, :N], weight[:N, :features], bias[:N]


def uneven_linear(kind: str, sp: bool, recipe: str, parts: int, size: int, rows: int, chunks: int):
    """(results, GEMM operands of this rank and the tiles that it works on)."""
    ranks = torch.distributed.get_world_size()
    tp = build_parallel(Config().replace(world_size=ranks, tensor_model_parallel_size=ranks), "cpu").tp
    grid = FeatureGrid(parts, size, tp, RECIPES[recipe].quantizer("weight").spec.tile.block)
    assert not grid.aligned
    mine = [feature for run_of in grid.segments(tp.rank) for feature in run_of]
    x, dy, weight, bias = uneven_data(kind, parts * size, rows)
    tokens = slice(*tp.split(rows)) if sp else slice(None)
    if kind == "column":
        local = x[tokens], dy[:, mine], weight[mine], bias[mine]
    else:
        local = x[:, mine], dy[tokens], weight[:, mine], bias
    operands: dict = {}
    results = run(CommPlan(tp, kind, sp, chunks, grid=grid), recipe, local, operands)
    dim = 0 if kind == "column" else 1
    weight_bytes, weight_scales = bits(operands)["fprop"][2:]
    return results, mine, grid.unpad(weight_bytes, dim), weight_scales, grid.tiles(tp.rank)


CUT = [(kind, recipe, *uneven) for uneven in UNEVEN for kind in ("column", "row") for recipe in TILED]
QUICK_CUTS = {  # every cut in both kinds of linears, every recipe in both, in turn
    (kind, TILED[(number + 2 * (kind == "row")) % len(TILED)], *uneven)
    for number, uneven in enumerate(UNEVEN)
    for kind in ("column", "row")
}


@pytest.mark.parametrize(("kind", "recipe", "parts", "size", "ranks"), quick(CUT, QUICK_CUTS))
def test_cuts_through_tiles_change_nothing(pool, kind, recipe, parts, size, ranks):
    """Bytes and scales of weights, results and gradients are those of the whole linear, whose tiles ranks share."""
    rows, features = 84, parts * size
    for sp, chunks in ((False, 1), (True, 1), (True, 3)):
        found = pool.run_on(ranks, uneven_linear, kind, sp, recipe, parts, size, rows, chunks)
        operands: dict = {}
        expected = run(ALONE, recipe, uneven_data(kind, features, rows), operands)
        whole_bytes, whole_scales = bits(operands)["fprop"][2:]
        dim = 0 if kind == "column" else 1
        for _, mine, weight_bytes, weight_scales, tiles in found:
            assert torch.equal(weight_bytes, whole_bytes.index_select(dim, torch.tensor(mine)))
            assert torch.equal(weight_scales, whole_scales.index_select(dim, torch.tensor(tiles)))
        order = torch.tensor([feature for _, mine, *_ in found for feature in mine]).argsort()
        y, dx, dw, db = joined(kind, sp, [results for results, *_ in found])
        actual = (y[:, order], dx, dw[order], db[order]) if kind == "column" else (y, dx[:, order], dw[:, order], db)
        for name, a, b in zip(("y", "dx", "dw", "db"), actual, expected, strict=True):
            summed = name == {"row": "y", "column": "dx"}[kind]
            assert distance(a, b) <= (5e-3 if summed else 2e-3 if a.dtype == torch.bfloat16 else 1e-6), (name, sp)
