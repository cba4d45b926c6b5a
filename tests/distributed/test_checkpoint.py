"""Several ranks save one checkpoint: deduplicated, agreed on, loadable by any layout."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, tensor_file
from megafp8.checkpoint.ranks import Held, exchange, share_out
from megafp8.config import Config
from megafp8.parallel import ParallelContext, build_parallel
from megafp8.params import StateItem


@given(st.lists(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3))), min_size=1, max_size=4))
def test_every_part_is_written_once_by_a_rank_that_holds_it(ranks):
    held = [[Held(name, ((i, i + 1),), 10 * i + 1) for name, i in set(parts)] for parts in ranks]
    shares = share_out(held)
    everything = [key for share in shares for key in share]
    assert len(everything) == len(set(everything))
    assert set(everything) == {(p.name, p.box) for parts in held for p in parts}
    for share, parts in zip(shares, held, strict=True):
        assert share <= {(p.name, p.box) for p in parts}


def test_replicas_share_the_work():
    parts = [Held(f"w{i}", ((0, 8),), 100) for i in range(12)]
    assert [len(share) for share in share_out([parts] * 3)] == [4, 4, 4]


def context(world: int, tp: int = 1) -> ParallelContext:
    return build_parallel(Config().replace(world_size=world, tensor_model_parallel_size=tp), "cpu")


def whole_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"model/w{i}": torch.randn(6, 5, generator=generator) for i in range(4)} | {
        "optimizer/step": torch.tensor(7)
    }


def items_of(parallel: ParallelContext) -> dict[str, StateItem]:
    """Matrices cut by tensor-parallel rank, replicated over data-parallel ranks; a random state of the rank's own."""
    items = {}
    for name, tensor in whole_state().items():
        if tensor.dim() == 2:
            start, stop = parallel.tp.split(6)
            items[name] = StateItem(tensor[start:stop], (6, 5), ((start, stop), (0, 5)))
        else:
            items[name] = StateItem.whole(tensor)
    items[f"rng/{parallel.rank:05d}/torch"] = StateItem.whole(torch.tensor([parallel.rank]))
    return items


def save(directory: str, tp: int, world: int) -> str:
    parallel = context(world, tp)
    return str(save_checkpoint(directory, 3, items_of(parallel), {"rank": parallel.rank}, parallel=parallel))


def load(directory: str, tp: int, world: int) -> None:
    parallel = context(world, tp)
    items = items_of(parallel)
    wanted = {n: StateItem(torch.full_like(i.tensor, -7), i.shape, i.box) for n, i in items.items()}
    load_checkpoint(Path(directory), wanted, optional=("rng/",), ignored=("rng/",))
    for name, item in items.items():
        if not name.startswith("rng/"):
            assert torch.equal(wanted[name].tensor, item.tensor), name


@pytest.mark.parametrize(("world", "tp"), [(4, 2), (3, 3), (2, 1)])
def test_a_save_of_several_ranks_loads_in_any_layout(pool, tmp_path, world, tp):
    """CASES 57. Nothing is stored twice; each rank's random state is there under its own name (CASES 15)."""
    directories = pool.run_on(world, save, str(tmp_path), tp, world)
    assert directories == [str(tmp_path / "iter_0000003")] * world
    found = find_checkpoint(tmp_path)
    assert found.metadata["rank"] == 0
    index = json.loads((found.directory / "index.json").read_text())["index"]
    assert {f"rng/{rank:05d}/torch" for rank in range(world)} <= index["tensors"].keys()
    assert all(len(index["tensors"][f"model/w{i}"]["parts"]) == tp for i in range(4))
    stored = sum(f["size"] for name, f in index["files"].items() if name.startswith("model"))
    assert stored < 2 * 4 * 6 * 5 * 4 + world * 1000
    for ranks, cut in ((1, 1), (2, 2), (3, 1)):
        pool.run_on(ranks, load, directories[0], cut, ranks)


def exchanged() -> list:
    parallel = context(3)
    return exchange(parallel, {"rank": parallel.rank, "text": "é" * parallel.rank})


def test_exchange_gives_every_rank_the_values_of_all(pool):
    expected = [{"rank": r, "text": "é" * r} for r in range(3)]
    assert pool.run_on(3, exchanged) == [expected] * 3


def save_with_a_full_disk_on_rank_1(directory: str) -> str | None:
    parallel = context(2)
    if parallel.rank == 1:

        def full(_tensor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        blocks, tensor_file._blocks = tensor_file._blocks, full
    try:
        return save_checkpoint(directory, 4, items_of(parallel), {}, parallel=parallel)
    finally:
        if parallel.rank == 1:
            tensor_file._blocks = blocks


def test_a_full_disk_of_one_rank_ends_the_save_on_all(pool, tmp_path):
    pool.run_on(2, save, str(tmp_path), 1, 2)
    assert pool.run_on(2, save_with_a_full_disk_on_rank_1, str(tmp_path)) == [None, None]
    assert find_checkpoint(tmp_path).iteration == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000003", "latest"]
