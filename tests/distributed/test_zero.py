"""ZeRO-1: the same bits for any number of data-parallel ranks, and checkpoints of shards.

Gradients are small integers, so that their sums over the ranks are exact whatever the number of ranks.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from megafp8.checkpoint import find_checkpoint, load_found, save_checkpoint
from megafp8.config import Config
from megafp8.optimizer import AdamWOptions, Group, Optimizer, Sharding
from megafp8.parallel import ParallelContext, build_parallel
from megafp8.params import StateItem, name_of
from tests.distributed.recorder import record
from tests.optimizer.helpers import make_param

# Odd offsets of tiles and rows: 77 elements come first, and shards cut rows, matrices and stacked parts.
SHAPES = {
    "a.weight": (7, 11),
    "b.weight": (130, 200),
    "c.weight": (2, 33, 40),
    "c.bias": (66,),
    "d.weight": (96, 128),
    "norm.weight": (200,),
}
STEPS = 6
Parts = dict[str, list[tuple[tuple, tuple, Tensor]]]


def context(world: int) -> ParallelContext:
    return build_parallel(Config().replace(world_size=world, data_parallel_size=world), "cpu")


def make(parallel: ParallelContext, seed: int = 1, **sharding) -> Optimizer:
    params = [make_param(name, shape, seed=seed) for name, shape in SHAPES.items()]
    params += [make_param("experts.0.weight", (30, 20), expert=True, seed=seed)]
    options = AdamWOptions(clip_grad=1.0)
    groups = {"a.weight": Group(True, decoupled=True)}
    return Optimizer(params, options, seed=seed, parallel=parallel, groups=groups, sharding=Sharding(**sharding))


def fill(optimizer: Optimizer, iteration: int, microbatches: int = 1) -> None:
    """This rank's share of the same total, whatever the number of ranks."""
    rank, size = optimizer.parallel.rank, optimizer.parallel.world_size
    for number, (name, view) in enumerate(sorted(optimizer.grads.state.views.items())):
        generator = torch.Generator().manual_seed(1000 * iteration + number)
        shares = torch.randint(-100, 100, (12, *view.shape), generator=generator, dtype=torch.int8)
        mine, param = shares[rank::size].float().sum(0), optimizer.weights.params[name]
        for micro in range(microbatches):
            optimizer.grads.buffer(param).add_(mine if micro == 0 else 0)
            optimizer.grads.ready(param)


def step(optimizer: Optimizer, iteration: int) -> tuple[float, int, float]:
    optimizer.zero_grad(1)
    fill(optimizer, iteration)
    optimizer.reduce_gradients()
    stats = optimizer.step(
        lr=1e-3 * (1 + iteration % 3),
        decoupled_lr=2e-3,
        weight_decay=0.1,
        valid_tokens=1000 + iteration,
        with_num_zeros=True,
        with_params_norm=True,
    )
    return stats.grad_norm.item(), int(stats.num_zeros), stats.params_norm.item()


def parts_of(items: dict[str, StateItem]) -> Parts:
    parts: Parts = {}
    for key, item in items.items():
        parts.setdefault(name_of(key), []).append((item.box, tuple(item.shape), item.tensor.clone()))
    return parts


def whole(ranks: list[Parts], *, once: bool = False) -> dict[str, Tensor]:
    """The global tensors of all ranks' parts; copies must agree. once: no element is on two ranks."""
    tensors: dict[str, Tensor] = {}
    for name in sorted({name for rank in ranks for name in rank}):
        held = [part for rank in ranks for part in rank.get(name, [])]
        shape, dtype = held[0][1], held[0][2].dtype
        total, count = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.int32)
        for box, _, values in held:
            place = tuple(slice(a, b) for a, b in box)
            again = count[place] > 0
            assert torch.equal(total[place][again], values[again]), f"copies of {name} differ"
            total[place] = values
            count[place] += 1
        assert (count > 0).all(), name
        assert not once or (count == 1).all(), name
        tensors[name] = total
    return tensors


def train(world: int, sharding: dict) -> tuple[list, Parts, Parts]:
    optimizer = make(context(world), **sharding)
    stats = [step(optimizer, iteration) for iteration in range(STEPS)]
    return stats, parts_of(optimizer.state()), parts_of(optimizer.weights.state())


@pytest.fixture(scope="module")
def one_rank(pool_of_module):
    (result,) = pool_of_module.run_on(1, train, 1, {})
    return result


ZERO = {"distributed": True}


@pytest.mark.parametrize(
    ("world", "sharding"),
    [*product((2, 3, 4), (ZERO, {})), (1, ZERO), (3, ZERO | {"bucket_elements": 20000, "overlap_reduce": True})],
    ids=str,
)
def test_any_number_of_ranks_gives_the_same_bits(pool, one_rank, world, sharding):
    """CASES 06: masters, moments, weights, norms and counts after some steps, shards cut anywhere."""
    stats, state, weights = one_rank
    expected = [whole([part]) for part in (state, weights)]
    ranks = pool.run_on(world, train, world, sharding)
    for rank in ranks:
        assert rank[0] == stats
    tensors = [name for name in state if name.startswith("optimizer/") and name.count("/") == 2]
    moved = [{name: rank[1][name] for name in tensors} for rank in ranks]
    found = whole(moved, once=bool(sharding) and world > 1)
    for name in tensors:
        assert torch.equal(found[name], expected[0][name]), name
    found = whole([rank[2] for rank in ranks])
    for name, tensor in expected[1].items():
        assert torch.equal(found[name], tensor), name


def sizes(world: int, sharding: dict) -> tuple[int, int, int]:
    optimizer = make(context(world), **sharding)
    flats = (optimizer.grads.state.flats, optimizer.masters.flats, optimizer.exp_avg.flats)
    return tuple(sum(flat.nbytes for flat in kind) for kind in flats)


def test_state_is_sharded_and_gradients_are_not(pool):
    (grads, masters, moments) = pool.run_on(4, sizes, 4, ZERO)[0]
    assert masters == moments == grads // 4
    assert sizes(1, {})[1] == sizes(1, {})[0]


def messages(world: int, sharding: dict) -> tuple[list, int, int]:
    optimizer = make(context(world), **sharding)
    with record() as log:
        step(optimizer, 1)
    grads = sum(flat.numel() for flat in optimizer.grads.state.flats)
    return [(m.kind, m.dtype, m.size) for m in log.messages if m.size > 100], grads, len(optimizer.layouts)


def test_gradients_are_scattered_in_fp32_and_weights_gathered_in_bf16(pool):
    for sent, elements, buffers in pool.run_on(2, messages, 2, ZERO):
        assert [kind for kind, *_ in sent] == ["scatter_sum"] * buffers + ["gather"] * buffers
        assert sum(size for kind, _, size in sent if kind == "scatter_sum") == 4 * elements
        assert sum(size for kind, _, size in sent if kind == "gather") == 2 * elements // 2
        assert {dtype for kind, dtype, _ in sent if kind == "scatter_sum"} == {torch.float32}


def test_gradients_are_reduced_and_consumed_without_a_copy(pool):
    assert pool.run_on(2, copies, ZERO) == [[], []]
    assert pool.run_on(2, copies, ZERO | {"reduce_in_bf16": True})[0]


def copies(sharding: dict) -> list[str]:
    """Operators that make a tensor as large as a bucket's shard while gradients are reduced."""
    optimizer = make(context(2), **sharding)
    flats = optimizer.grads.state.flats
    known, least = {flat.untyped_storage().data_ptr() for flat in flats}, max(flat.numel() for flat in flats) // 2
    optimizer.zero_grad(1)
    fill(optimizer, 0)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.numel() >= least]
            if not func.is_view and any(t.untyped_storage().data_ptr() not in known for t in tensors):
                seen.append(str(func))
            return out

    with Watch():
        optimizer.reduce_gradients()
    return seen


def break_rank(world: int, sharding: dict, rank: int) -> tuple[list[bool], int, Parts]:
    optimizer = make(context(world), **sharding)
    skipped = []
    for iteration in range(3):
        optimizer.zero_grad(1)
        fill(optimizer, iteration)
        if iteration == 1 and optimizer.parallel.rank == rank:
            optimizer.grads.state.views["b.weight"][129, 199] = torch.inf
        optimizer.reduce_gradients()
        before = parts_of(optimizer.state())
        stats = optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=10)
        skipped.append(bool(stats.skipped))
        if stats.skipped:
            after = parts_of(optimizer.state())
            del before["optimizer/skipped_steps"], after["optimizer/skipped_steps"]
            for name, parts in before.items():
                for a, b in zip(parts, after[name], strict=True):
                    assert torch.equal(a[2], b[2]), name
    return skipped, int(optimizer.step_count), parts_of(optimizer.state())


def test_all_ranks_skip_what_one_shard_cannot_make(pool):
    """CASES 31: the element is in one rank's shard only."""
    for world, rank in ((2, 0), (3, 2)):
        ranks = pool.run_on(world, break_rank, world, ZERO, rank)
        assert [(skipped, count) for skipped, count, _ in ranks] == [([False, True, False], 2)] * world


def save(directory: str, world: int, sharding: dict, steps: int) -> None:
    optimizer = make(context(world), **sharding)
    for iteration in range(steps):
        step(optimizer, iteration)
    items = {**optimizer.weights.state(), **optimizer.state()}
    save_checkpoint(directory, steps, items, {}, parallel=optimizer.parallel)


def load(directory: str, world: int, sharding: dict, steps: int) -> tuple[Parts, Parts, Parts]:
    """State as loaded, and state and weights some steps later."""
    optimizer = make(context(world), seed=2, **sharding)
    found = find_checkpoint(directory)
    tensors = load_found(found, {**optimizer.weights.state(), **optimizer.state()})
    for owner in (optimizer.weights, optimizer):
        owner.load_state(tensors)
    loaded = parts_of(optimizer.state())
    for iteration in range(found.iteration, found.iteration + steps):
        step(optimizer, iteration)
    return loaded, parts_of(optimizer.state()), parts_of(optimizer.weights.state())


def test_shards_are_saved_and_loaded_at_other_sizes(pool, tmp_path):
    """CASES 57, 76: every element is stored once; the continuation has the bits of the run that never stopped."""
    runs = [(1, {}), (3, ZERO), (2, {}), (4, ZERO)]
    whole_run = whole([pool.run_on(1, train_for, 8)[0]])
    for world, sharding in runs:
        directory = tmp_path / f"{world}{len(sharding)}"
        pool.run_on(world, save, str(directory), world, sharding, 5)
        stored = sum(file.stat().st_size for file in directory.glob("iter*/optimizer*"))
        assert stored < 1.1 * 12 * sum(torch.Size(shape).numel() for shape in SHAPES.values()) + 20000
        loads = [pool.run_on(w, load, str(directory), w, s, 3) for w, s in runs]
        first = whole([rank[0] for rank in loads[0]])
        for ranks in loads:
            for name, tensor in whole([rank[0] for rank in ranks]).items():
                assert torch.equal(tensor, first[name]), name
            later = whole([rank[1] for rank in ranks]) | whole([rank[2] for rank in ranks])
            for name, tensor in whole_run.items():
                assert torch.equal(later[name], tensor), name


def train_for(steps: int) -> Parts:
    optimizer = make(context(1))
    for iteration in range(steps):
        step(optimizer, iteration)
    return parts_of(optimizer.state()) | parts_of(optimizer.weights.state())
