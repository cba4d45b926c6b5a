"""Column- and row-parallel linears against the whole linear, byte for byte where they quantize, and what they send."""

from __future__ import annotations

import math
import weakref
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch import Tensor

from megafp8.config import Config
from megafp8.fp8 import CommPlan, Linear, gemm, get_recipe
from megafp8.fp8.comm import ALONE
from megafp8.fp8.feature_grid import FeatureGrid
from megafp8.parallel import Axis, build_parallel
from megafp8.params import GradSink, Init, ParamSpec
from megafp8.step import StepContext
from tests.cases import quick
from tests.distributed.layouts import distance
from tests.distributed.recorder import record

RECIPES = {
    "high precision": None,
    "tensorwise": get_recipe("tensorwise"),
    "blockwise": get_recipe("blockwise"),
    "blockwise fp32 scales": get_recipe("blockwise", power_of_two_scales=False),
    "mxfp8": get_recipe("mxfp8"),
}
K, N = 512, 512


class Sink(GradSink):
    """One FP32 buffer a parameter. events: gets a line when a gradient is there."""

    def __init__(self, events: list[str] | None = None):
        self.buffers: dict[int, Tensor] = {}
        self.events = [] if events is None else events

    def buffer(self, param: Tensor) -> Tensor:
        return self.buffers.setdefault(id(param), torch.zeros(param.shape))

    def ready(self, param: Tensor) -> None:
        self.events.append("gradient of the " + ("weight" if param.dim() == 2 else "bias"))


def data(rows: int, nan: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, dy, weight, bias) of the whole linear, BF16; rows differ by orders of magnitude, some are zero."""
    generator = torch.Generator().manual_seed(rows)
    x, dy, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((rows, K), (rows, N), (N, K), (N,)))
    x *= torch.logspace(-3, 3, rows)[:, None]
    dy *= torch.logspace(2, -4, rows)[:, None]
    x[rows // 3] = 0
    if nan:
        x[rows - 1, 5] = math.nan
    return tuple(t.bfloat16() for t in (x, dy, weight * 0.1, bias))


def run(
    plan: CommPlan,
    recipe: str,
    parts: tuple[Tensor, ...],
    operands: dict | None = None,
    events: list[str] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, dx, main_grad of the weight, of the bias); `operands` collects what the three GEMMs were given, `events` the
    gradients' deliveries."""
    x, dy, weight, bias = parts
    spec = ParamSpec("linear.weight", tuple(weight.shape), Init("zeros"), True)
    linear = Linear(
        weight.shape[1],
        weight.shape[0],
        recipe=RECIPES[recipe],
        weight_spec=spec,
        bias_spec=ParamSpec("linear.bias", tuple(bias.shape), Init("zeros"), False),
        params_dtype=torch.bfloat16,
        comm=plan,
    )
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    sink, x = Sink(events), x.clone().requires_grad_()
    with ExitStack() as stack:
        for name in ("fprop", "dgrad", "wgrad") if operands is not None else ():
            stack.enter_context(mock.patch.object(gemm, name, keeping(name, operands, sink.events)))
        y = linear(x, StepContext(grads=sink))
        y.backward(dy)
    return y.detach(), x.grad, sink.buffer(linear.weight), sink.buffer(linear.bias)


def keeping(name: str, operands: dict, events: list[str]):
    original = getattr(gemm, name)

    def call(a, b, *args, **options):
        operands.setdefault(name, (a, b))
        events.append(name)
        return original(a, b, *args, **options)

    return call


def raw(x: Tensor) -> Tensor:
    """FP8 and E8M0 as bytes, which can be compared."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def bits(operands: dict) -> dict[str, list[Tensor]]:
    """Of each GEMM: data and scales of A, data and scales of B."""
    return {
        name: [raw(t).clone() for side in pair for t in (side.data, side.scale_inv)] for name, pair in operands.items()
    }


def parts_of(kind: str, tp: Axis, sp: bool, whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """This rank's x, dy, weight and bias."""
    x, dy, weight, bias = whole
    rows, (a, b) = slice(*tp.split(len(x))) if sp else slice(None), tp.split(N if kind == "column" else K)
    if kind == "column":
        return x[rows], dy[:, a:b], weight[a:b], bias[a:b]
    return x[:, a:b], dy[rows], weight[:, a:b], bias


def parallel_linear(kind: str, sp: bool, recipe: str, rows: int, chunks: int = 1, fp8: bool = True, nan: bool = False):
    """(results, GEMM operands, messages of forward and backward) of this rank."""
    size = torch.distributed.get_world_size()
    config = Config().replace(world_size=size, tensor_model_parallel_size=size)
    tp = build_parallel(config, "cpu").tp
    plan = CommPlan(tp, kind, sp, chunks, fp8)
    operands: dict = {}
    with record() as log:
        results = run(plan, recipe, parts_of(kind, tp, sp, data(rows, nan)), operands, log.events)
    return results, bits(operands), log


def joined(kind: str, sp: bool, ranks: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The whole linear's y, dx and gradients, from the ranks'; replicas must agree bitwise."""
    y, dx, dw, db = zip(*ranks, strict=True)
    features = 1 if kind == "column" else None  # None: replicated or cut by rows
    whole = lambda parts: torch.cat(parts) if sp else alike(parts)  # noqa: E731
    if features == 1:
        return torch.cat(y, 1), whole(dx), torch.cat(dw), torch.cat(db)
    return whole(y), torch.cat(dx, 1), torch.cat(dw, 1), sum(db) if sp else alike(db)


def alike(parts: tuple[Tensor, ...]) -> Tensor:
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


CASES = [(kind, sp, recipe) for kind in ("column", "row") for sp in (False, True) for recipe in RECIPES]


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


OVERLAPPED = [case for case in CASES if case[2] != "blockwise fp32 scales"]


def overlap_is_quick(case: tuple) -> bool:
    kind, sp, recipe = case
    if sp:
        return kind == "column" or recipe in ("high precision", "blockwise")
    return recipe == "high precision" or (kind, recipe) in (("row", "tensorwise"), ("column", "mxfp8"))


@pytest.mark.parametrize(("kind", "sp", "recipe"), quick(OVERLAPPED, overlap_is_quick))
def test_overlap_changes_no_number(pool, kind, sp, recipe):
    for rows in (200, 6):
        plain, chunked = (pool.run_on(2, parallel_linear, kind, sp, recipe, rows, chunks) for chunks in (1, 4))
        for (a, *_), (b, *_) in zip(plain, chunked, strict=True):
            for x, y in zip(a, b, strict=True):
                # A CPU GEMM's own order of sums may depend on the number of rows: a BF16 rounding may flip.
                assert distance(x, y) <= (1e-4 if x.dtype == torch.bfloat16 else 1e-6)


def test_overlap_posts_before_it_waits(pool):
    """Column: chunk i + 1 travels while chunk i is multiplied; sums leave while the next chunk is multiplied."""
    for _, _, log in pool.run_on(2, parallel_linear, "column", True, "high precision", 256, 4):
        gathers = [e for e in log.events if "gather" in e]
        assert gathers[:4] == ["post gather 0", "post gather 1", "wait gather 0", "post gather 2"]
        assert gathers[4:8] == ["wait gather 1", "post gather 3", "wait gather 2", "wait gather 3"]
        backward = log.events[log.events.index("wait gather 3") + 1 :]
        assert backward[0] == "post gather 4"  # wgrad's operand travels during dgrad
        assert backward[1:5] == [f"post scatter_sum {i}" for i in range(4)]
        assert backward[5:7] == ["wait gather 4", "gradient of the weight"]
        assert backward[7:11] == [f"wait scatter_sum {i}" for i in range(4)]  # they travel during wgrad
    for _, _, log in pool.run_on(2, parallel_linear, "row", True, "high precision", 256, 4):
        assert log.events[:4] == [f"post scatter_sum {i}" for i in range(4)]
        backward = log.events[log.events.index("post gather 0") :]  # dY's pieces are under way before the first GEMM
        assert backward[:8] == [f"{what} gather {i}" for what in ("post", "wait") for i in range(4)]


def without_amaxes(events: list[str]) -> list[str]:
    return [event for event in events if "max" not in event]


@pytest.mark.parametrize("recipe", ["high precision", "tensorwise", "blockwise", "mxfp8"])
def test_backward_computes_while_messages_travel(pool, recipe):
    """Without chunks too: X travels during dgrad, the sum of dX during wgrad."""
    gemms = ([], []) if recipe == "high precision" else (["dgrad"], ["wgrad"])
    for sp, total in ((True, "scatter_sum 0"), (False, "sum 0")):
        travels, arrives = (["post gather 1"], ["wait gather 1"]) if sp else ([], [])
        dgrad, wgrad = gemms
        expected = [*travels, *dgrad, f"post {total}", *arrives, *wgrad, "gradient of the weight", f"wait {total}"]
        for _, _, log in pool.run_on(2, parallel_linear, "column", sp, recipe, 256):
            events = without_amaxes(log.events)
            start = events.index(expected[0])
            assert events[start : start + len(expected)] == expected


def left_at_wgrad(kind: str, sp: bool, recipe: str) -> tuple[bool, bool]:
    """Whether dgrad's operand, and what was gathered for wgrad before it was put in order, are there during wgrad."""
    size = torch.distributed.get_world_size()
    tp = build_parallel(Config().replace(world_size=size, tensor_model_parallel_size=size), "cpu").tp
    seen, gathered, found = [], [], []
    dgrad, wgrad, post_gathers = gemm.dgrad, gemm.wgrad, Axis.post_gathers

    def see(dy, *rest):
        seen.append(weakref.ref(dy.data))
        return dgrad(dy, *rest)

    def gather(axis, parts):
        outs, pending = post_gathers(axis, parts)
        gathered.append(weakref.ref(outs[0]))  # scales may be read as they came
        return outs, pending

    def look(*args):
        found.append(tuple(any(ref() is not None for ref in refs) for refs in (seen, gathered)))
        return wgrad(*args)

    with (
        mock.patch.object(gemm, "dgrad", see),
        mock.patch.object(gemm, "wgrad", look),
        mock.patch.object(Axis, "post_gathers", gather),
    ):
        run(CommPlan(tp, kind, sp), recipe, parts_of(kind, tp, sp, data(256)))
    return found[0]


@pytest.mark.parametrize(("kind", "sp"), [("column", True), ("column", False), ("row", True)])
def test_wgrad_finds_only_its_own_operands_in_memory(pool, kind, sp):
    for found in pool.run_on(2, left_at_wgrad, kind, sp, "blockwise"):
        assert found == (False, False)


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
