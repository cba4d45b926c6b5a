"""Several ranks save one checkpoint: deduplicated, agreed on, loadable by any layout."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megafp8.checkpoint import (
    BackgroundSaver,
    CheckpointReader,
    CheckpointWriter,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    tensor_file,
)
from megafp8.checkpoint.ranks import Held, exchange, share_out
from megafp8.config import Config
from megafp8.parallel import ParallelContext, build_parallel
from megafp8.params import StateItem
from megafp8.training.agreement import Agreement
from megafp8.training.saving import BUSY, DONE


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
    """After a barrier: a rank that is done and gone before the others have connected to it would make them fail."""
    parallel = build_parallel(Config().replace(world_size=world, tensor_model_parallel_size=tp), "cpu")
    parallel.barrier()
    return parallel


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
    load_checkpoint(Path(directory), wanted, optional=("rng/",), ignored=("rng/",), parallel=parallel)
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


def save_in_the_background(directory: str, slow_rank: int | None, fails: bool) -> tuple[list[bool], str | None]:
    """One rank's disk is slow; the others go on. Returns what each poll saw, and the directory."""
    parallel = context(3)
    gate, blocks = threading.Event(), tensor_file._blocks

    def held(tensor):
        assert gate.wait(300)
        if fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return blocks(tensor)

    if parallel.rank == slow_rank:
        tensor_file._blocks = held
    try:
        saver, agreement, polls = BackgroundSaver(parallel), Agreement(parallel, "cpu"), []
        items = items_of(parallel)
        saver.prepare(items)
        assert saver.start(CheckpointWriter(directory, 5), items)
        for item in items.values():
            item.tensor.zero_()
        while not polls or polls[-1] != DONE:
            polls += agreement.agree([DONE if saver.written else BUSY])
            if len(polls) == 4:
                gate.set()
            time.sleep(0.01)
        return polls, None if (done := saver.finish()) is None else str(done)
    finally:
        tensor_file._blocks = blocks


def test_a_save_in_the_background_ends_on_all_ranks_at_the_same_step(pool, tmp_path):
    """One rank's disk holds out for four steps: nobody waits, and all finish in the same one."""
    replies = pool.run_on(3, save_in_the_background, str(tmp_path), 2, False)
    polls, directory = replies[0]
    assert replies == [(polls, directory)] * 3
    assert polls[0] == 0
    assert polls[1:4] == [BUSY] * 3
    assert set(polls[4:-1]) <= {BUSY}
    assert directory == str(tmp_path / "iter_0000005")
    pool.run_on(2, load, directory, 2, 2)


def test_a_full_disk_in_the_background_of_one_rank_ends_the_save_on_all(pool, tmp_path):
    replies = pool.run_on(3, save_in_the_background, str(tmp_path), 1, True)
    assert [directory for _, directory in replies] == [None] * 3
    assert list(tmp_path.iterdir()) == []


def load_damaged(directory: str, world: int) -> tuple[str, str, bool]:
    parallel = context(world)
    items = {name: item for name, item in items_of(parallel).items() if not name.startswith("rng/")}
    wanted = {n: StateItem(torch.full_like(i.tensor, -7), i.shape, i.box) for n, i in items.items()}
    try:
        load_checkpoint(Path(directory), wanted, ignored=("rng/",), parallel=parallel)
    except ValueError as error:
        return type(error).__name__, str(error), all(item.tensor.eq(-7).all() for item in wanted.values())
    return "", "", False


@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
def test_damage_that_one_rank_finds_is_told_by_all(pool, tmp_path, fault):
    """Each file is summed up by one rank; no rank writes anything."""
    pool.run_on(3, save, str(tmp_path), 1, 3)
    path = tmp_path / "iter_0000003" / "model-00001.safetensors"
    content = bytearray(path.read_bytes())
    if fault == "remove":
        path.unlink()
    else:
        content[-1] ^= 1
        path.write_bytes(content[:-3] if fault == "truncate" else content)
    replies = pool.run_on(3, load_damaged, str(path.parent), 3)
    assert [(kind, untouched) for kind, _, untouched in replies] == [("DamagedFileError", True)] * 3
    assert {text for _, text, _ in replies} == {replies[0][1]}
    assert "model-00001.safetensors" in replies[0][1]


def load_with_a_name_of_its_own(directory: str) -> str:
    """Rank 1 wants a tensor that the checkpoint lacks."""
    parallel = context(2)
    items = {name: item for name, item in items_of(parallel).items() if not name.startswith("rng/")}
    if parallel.rank == 1:
        items["model/of_rank_1"] = StateItem.whole(torch.zeros(2))
    try:
        load_checkpoint(Path(directory), items, ignored=("rng/",), parallel=parallel)
    except ValueError as error:
        return str(error)
    return ""


def test_a_name_that_one_rank_lacks_is_told_by_all(pool, tmp_path):
    pool.run_on(2, save, str(tmp_path), 1, 2)
    first, second = pool.run_on(2, load_with_a_name_of_its_own, str(tmp_path / "iter_0000003"))
    assert first == second
    assert "lacks 'model/of_rank_1'" in first


def distributed_tensor(world: int, length: int) -> DTensor:
    mesh = init_device_mesh("cpu", (world,))
    return distribute_tensor(torch.arange(3.0 * length).view(length, 3), mesh, [Shard(0)])


def dcp_saves(directory: str) -> None:
    parallel = context(2)
    dcp.save({"model/w": distributed_tensor(2, 7)}, storage_writer=CheckpointWriter(directory, 1))
    assert parallel.world_size == 2


def dcp_loads(directory: str, world: int, length: int) -> list:
    context(world)
    state = {"model/w": distributed_tensor(world, length) * 0}
    dcp.load(state, storage_reader=CheckpointReader(directory))
    return state["model/w"].full_tensor().tolist()


def test_sharded_tensors_of_dcp_programs(pool, tmp_path):
    """Saved on 2 ranks, of uneven rows; loaded on 3, and by our own loads."""
    pool.run_on(2, dcp_saves, str(tmp_path))
    expected = torch.arange(21.0).view(7, 3)
    wanted = {"model/w": StateItem(torch.zeros(4, 2), (7, 3), ((2, 6), (1, 3)))}
    load_checkpoint(tmp_path / "iter_0000001", wanted)
    assert torch.equal(wanted["model/w"].tensor, expected[2:6, 1:])
    assert pool.run_on(3, dcp_loads, str(tmp_path / "iter_0000001"), 3, 7) == [expected.tolist()] * 3
