"""The optimizer's kernels, compiled for Hopper and run on the CPU: the bits of the PyTorch reference."""

import pytest
import torch
from megafp8.kernels import adamw as kernels

from megafp8.fp8 import get_recipe
from megafp8.fp8.param import Weight
from megafp8.optimizer import AdamWOptions, Optimizer, Sharding, codecs
from megafp8.optimizer.adamw import Rates, step_scalars
from megafp8.optimizer.layout import Entry, Group, Shard, plan_layouts
from megafp8.optimizer.precision import Precision
from megafp8.optimizer.primary import FlatPrimary
from megafp8.optimizer.stored import Stored
from megafp8.optimizer.update import BufferUpdate
from megafp8.parallel import Axis
from tests.kernels import testing
from tests.optimizer.helpers import make_param, set_grads

CONSTANTS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
GROUPS = {"a": Group(True), "b": Group(False), "c": Group(True)}
RATES = [Rates(3e-3, 0.1), Rates(1e-3, 0.0)]
SIZES = {"a": 64 * 5 + 7, "b": 9, "c": 64 * 70}


class Weights:
    """What an update asks of a buffer of weights."""

    def __init__(self, flat):
        self.flat = flat

    def write(self, masters):
        self.flat[256 : 256 + len(masters)].copy_(masters)

    def announce(self):
        pass

    def tiles(self, name):
        return {}


def make(precision: Precision, seed: int = 0):
    """A buffer of which the rank holds the second half, with a few steps' worth of state: (update, grad)."""
    entries = [Entry(n, size, torch.bfloat16, False, GROUPS[n], precision=precision) for n, size in SIZES.items()]
    (layout,) = plan_layouts(entries, shards=2)
    shard = Shard(layout, 1)
    generator = torch.Generator().manual_seed(seed)
    held, live = shard.numel, torch.zeros(shard.numel)
    for piece in shard.pieces:
        live[piece.place] = 1
    weights = Weights(torch.zeros(layout.numel, dtype=torch.bfloat16))
    start = shard.ranges[0].start
    weights.write = lambda m: weights.flat[start : start + held].copy_(m)
    values = torch.where(live > 0, torch.randn(held, generator=generator), 0.0)
    master = values
    weights.write(values)
    if precision.master == "remainder":
        upper, master = codecs.split_master(values)
        weights.flat[start : start + held] = upper
    spread = torch.tensor([0.02, 0.4, 1.0, 4.0]).repeat_interleave(64).repeat(-(-held // 256))[:held]  # every expansion
    sizes = torch.exp(spread * torch.randn(held, generator=generator)) * live
    cpu = torch.device("cpu")
    m = Stored.zeros(precision.exp_avg, held, cpu, root=False)
    v = Stored.zeros(precision.exp_avg_sq, held, cpu, root=True)
    m.write(sizes * torch.randn(held, generator=generator).sign())
    v.write(sizes**2)
    update = BufferUpdate(shard, {"a": 0, "b": 1, "c": 0}, {"a": 5, "b": 2**31 + 9, "c": 77}, master, m, v, weights)
    grad = torch.rand(layout.numel, generator=generator) + 0.5
    for slot in layout.slots:
        grad[slot.stop : -(-slot.stop // 64) * 64] = 0
    return update, grad


def on_kernels(update: BufferUpdate, grad, scalars) -> None:
    update.use_kernels(kernels)
    with testing.emulated_launches():
        update(grad, scalars, **CONSTANTS)


PRECISIONS = {
    "fp32": Precision(),
    "remainder": Precision("remainder"),
    "bf16": Precision("fp32", "bf16", "bf16"),
    "fp8": Precision("fp32", "fp8", "fp8"),
    "mixed": Precision("remainder", "fp8", "bf16"),
}


def cases(names, quick):
    """(name, skip) pairs; but for `quick` ones they are slow."""
    pairs = [(name, skip) for name in names for skip in (False, True)]
    return [
        pytest.param(*pair, id=f"{pair[0]}{' skipped' * pair[1]}", marks=[] if pair in quick else pytest.mark.slow)
        for pair in pairs
    ]


@pytest.mark.parametrize(("name", "skip"), cases(PRECISIONS, [("fp32", False), ("mixed", False), ("fp8", True)]))
def test_kernel_and_reference_have_the_same_bits(name, skip):
    precision = PRECISIONS[name]
    scale = torch.tensor(0.37, dtype=torch.float64)
    scalars = step_scalars(torch.tensor(3), scale, torch.tensor(skip), RATES, beta1=0.9, beta2=0.95)
    (a, grad), (b, _) = make(precision), make(precision)
    before = [t.clone() for t in state(a)]
    a(grad, scalars, **CONSTANTS)
    on_kernels(b, grad, scalars)
    for name, x, y, old in zip(NAMES, state(a), state(b), before, strict=True):
        x, y, old = (t.view(torch.uint8) for t in (x, y, old))
        assert torch.equal(x, y), name
        if skip or name in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(x, old) == skip, name


def test_every_expansion_is_met():
    update, _ = make(PRECISIONS["fp8"])
    assert set(update.exp_avg.code.tolist()) == set(update.exp_avg_sq.code.tolist()) == {0, 1, 2, 3}


NAMES = ["master", "weights", "exp_avg", "exp_avg_sq", "amax", "amax", "code", "code"]


def state(update):
    rest = [t for kind in ("amax", "code") for s in (update.exp_avg, update.exp_avg_sq) for t in [getattr(s, kind)]]
    empty = torch.zeros(0)
    found = [update.master, update.weights.flat, update.exp_avg.values, update.exp_avg_sq.values]
    return found + [empty if t is None else t for t in rest]


def make_primary(recipe: str) -> Optimizer:
    params = [make_param(name, shape) for name, shape in {"a": (40, 192), "b": (33, 128), "c": (128, 64)}.items()]
    for _, param in params:
        name, _, tile = recipe.partition(" ")
        axes = {"weight_tile": tile} if tile else {}
        param.owner = Weight(param, get_recipe(name, **axes))
    optimizer = Optimizer(params, AdamWOptions(), seed=1, sharding=Sharding(fp8_primary=True))
    set_grads(optimizer, torch.Generator().manual_seed(0))
    return optimizer


@pytest.fixture(autouse=True)
def _small_launches(monkeypatch):
    """One warp a program."""
    monkeypatch.setattr(kernels, "DEFAULT", kernels.Launch(8, 1))
    monkeypatch.setattr(kernels, "FP8_MOMENTS", kernels.Launch(8, 1))


RECIPES = ["tensorwise", "blockwise", "mxfp8", "mxfp8 1d"]


@pytest.mark.parametrize(("recipe", "skip"), cases(RECIPES, [("tensorwise", True), ("mxfp8 1d", False)]))
def test_fp8_primary_weights_have_the_references_bytes(recipe, skip):
    scale = torch.tensor(0.37, dtype=torch.float64)
    scalars = step_scalars(torch.tensor(3), scale, torch.tensor(skip), RATES[:1], beta1=0.9, beta2=0.95)
    a, b = make_primary(recipe), make_primary(recipe)
    (update,), (grad,) = a._updates, a.grads.state.flats
    update(grad, scalars, **CONSTANTS)
    (update,) = b._updates
    update.use_kernels(kernels)
    assert (update._launches.tiles is None) == (recipe == "tensorwise")
    with testing.emulated_launches():
        update(grad, scalars, **CONSTANTS)
    for name, param in a.weights.params.items():
        ours, theirs = param.owner.primary, b.weights.params[name].owner.primary
        for o in ours.data:
            assert torch.equal(*(p.data[o].view(torch.uint8) for p in (ours, theirs))), (name, o)
            assert torch.equal(*(p.scale_inv[o].view(torch.uint8) for p in (ours, theirs))), (name, o)
        assert torch.equal(a.masters.views[name], b.masters.views[name])


SHARDS = [
    pytest.param(recipe, rank, marks=[] if (recipe, rank) == ("blockwise", 1) else pytest.mark.slow)
    for recipe in ("blockwise", "mxfp8")
    for rank in range(3)
]


@pytest.mark.parametrize(("recipe", "rank"), SHARDS)
def test_shards_that_cut_tiles_have_the_references_bytes(recipe, rank):
    """Rows of tiles that are whole here go through one kernel, what is left of the shard through two others."""
    updates = [_shard_of_three(recipe, rank) for _ in range(2)]
    updates[1].use_kernels(kernels)
    launches = updates[1]._launches
    assert launches.tiles is not None
    assert launches.flat is not None
    scalars = step_scalars(torch.tensor(3), torch.tensor(0.37).double(), torch.tensor(False), RATES[:1], beta1=0.9,
                           beta2=0.95)  # fmt: skip
    grad = torch.randn(updates[0].shard.layout.numel, generator=torch.Generator().manual_seed(1))
    updates[0](grad, scalars, **CONSTANTS)
    with testing.emulated_launches():
        updates[1](grad, scalars, **CONSTANTS)
    a, b = updates
    assert torch.equal(a.master, b.master)
    assert torch.equal(a.weights.flats["rowwise"], b.weights.flats["rowwise"])
    for name, weight in a.weights.weights.items():
        ours, theirs = weight.primary.scale_inv["rowwise"], b.weights.weights[name].primary.scale_inv["rowwise"]
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name


def _shard_of_three(recipe: str, rank: int) -> BufferUpdate:
    block = get_recipe(recipe).quantizer("weight").spec.tile.block
    shapes = {"a": (4 * block, 64), "b": (5 * block + 3, 64)}
    params = {}
    for name, shape in shapes.items():
        _, params[name] = make_param(name, shape)
        params[name].owner = Weight(params[name], get_recipe(recipe))
    entries = [Entry(n, p.numel(), torch.float8_e4m3fn, False, Group(True)) for n, p in params.items()]
    (layout,) = plan_layouts(entries, shards=3)
    shard, cpu = Shard(layout, rank), torch.device("cpu")
    weights = FlatPrimary(params, shard, Axis())
    master = torch.randn(shard.numel, generator=torch.Generator().manual_seed(rank))
    moments = [Stored.zeros("fp32", shard.numel, cpu, root=root) for root in (False, True)]
    return BufferUpdate(shard, {"a": 0, "b": 0}, {"a": 1, "b": 2}, master, *moments, weights)
