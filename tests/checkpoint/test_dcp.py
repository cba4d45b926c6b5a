"""Programs of torch.distributed.checkpoint read and write the format; planners refuse what can't be loaded again."""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megafp8.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    SaveJob,
    SavePlans,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from megafp8.checkpoint.planner import BoxLoadPlanner, BoxSavePlanner, Row, row_of, rows_of, shared_out
from megafp8.params import StateItem
from tests.checkpoint.helpers import assert_equal_items, make_items, poisoned

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*LeafSpec.*")


def test_dcp_saves_what_we_load(tmp_path):
    items = make_items()
    state = {name: item.tensor for name, item in items.items()}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path, 5, {"consumed_samples": 40}), no_dist=True)
    found = find_checkpoint(tmp_path)
    assert (found.iteration, found.metadata["consumed_samples"]) == (5, 40)
    wanted = poisoned(items)
    load_checkpoint(found.directory, wanted)
    assert_equal_items(wanted, items)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000005", "latest"]


def test_dcp_loads_what_we_save(tmp_path):
    items = make_items()
    directory = save_checkpoint(tmp_path, 5, items, {})
    state = {name: item.tensor for name, item in poisoned(items).items()}
    dcp.load(state, storage_reader=CheckpointReader(directory), no_dist=True)
    assert_equal_items({name: StateItem.whole(tensor) for name, tensor in state.items()}, items)


def test_nested_states_of_a_module_and_its_optimizer(tmp_path):
    """What DCP programs save: nested dictionaries, flattened by DCP's own planner."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    moments = {str(key): dict(value) for key, value in optimizer.state_dict()["state"].items()}
    state = {"model": model.state_dict(), "optimizer": moments}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path, 1), no_dist=True)
    again = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "optimizer": {key: {n: torch.zeros_like(v) for n, v in value.items()} for key, value in moments.items()},
    }
    dcp.load(again, storage_reader=CheckpointReader(tmp_path / "iter_0000001"), no_dist=True)
    assert torch.equal(again["model"]["weight"], model.weight)
    assert torch.equal(again["optimizer"]["0"]["exp_avg"], moments["0"]["exp_avg"])


def test_dcp_runs_our_planners(tmp_path):
    items = make_items()
    dcp.save(items, storage_writer=CheckpointWriter(tmp_path, 3), planner=BoxSavePlanner(), no_dist=True)
    directory = tmp_path / "iter_0000003"
    wanted = poisoned(items)
    reader, planner = CheckpointReader(directory), BoxLoadPlanner(directory)
    dcp.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
    assert_equal_items(wanted, items)


@pytest.mark.parametrize("value", [3, "text", {"step": 1.5}, [1, 2]])
def test_what_dcp_would_pickle_is_refused(tmp_path, value):
    with pytest.raises(CheckpointException, match="only tensors are stored"):
        dcp.save({"w": torch.ones(2), "x": value}, storage_writer=CheckpointWriter(tmp_path, 1), no_dist=True)
    assert find_checkpoint(tmp_path) is None


def test_nothing_is_pickled_or_unpickled(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    monkeypatch.setattr("torch.save", refuse)
    monkeypatch.setattr("torch.load", refuse)
    items = make_items()
    directory = save_checkpoint(tmp_path, 5, items, {})
    load_checkpoint(directory, poisoned(items))
    state = {name: item.tensor for name, item in items.items()}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path, 6), no_dist=True)
    dcp.load(state, storage_reader=CheckpointReader(directory), no_dist=True)


def test_dcp_meets_damage_before_anything_is_read(tmp_path):
    items = make_items()
    directory = save_checkpoint(tmp_path, 5, items, {})
    path = directory / "optimizer-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    state = {name: item.tensor for name, item in poisoned(items).items()}
    with pytest.raises(CheckpointException, match="optimizer-00000.safetensors is damaged"), warnings.catch_warnings():
        dcp.load(state, storage_reader=CheckpointReader(directory), no_dist=True)
    assert all(tensor.eq(-77).all() for tensor in state.values())


def item(shape, box, dtype=torch.float32):
    return StateItem(torch.zeros([b - a for a, b in box], dtype=dtype), shape, box)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([item((4, 2), ((0, 2), (0, 2)))], "hold 4 elements of 'w', which has 8"),
        ([item((4, 2), ((0, 3), (0, 2))), item((4, 2), ((2, 4), (0, 2)))], "hold 10 elements of 'w', which has 8"),
        ([item((4,), ((0, 2),)), item((4,), ((2, 4),), torch.bfloat16)], "disagree on the dtype"),
        ([item((4,), ((0, 2),)), item((5,), ((2, 5),))], "disagree on the dtype or the shape"),
    ],
)
def test_a_state_that_could_not_be_loaded_is_not_saved(ranks, words):
    """DCP's own planner lets holes of one process pass, and its loads leave them as they were."""
    planners = [BoxSavePlanner() for _ in ranks]
    for planner, part in zip(planners, ranks, strict=True):
        planner.set_up_planner({"w": part})
    with pytest.raises(ValueError, match=words):
        planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    with pytest.raises(ValueError, match=words):
        shared_out([list(rows_of({"w": part}).values()) for part in ranks])


def test_plans_travel_as_json():
    rows = list(rows_of(make_items()).values())
    assert [Row.from_json(row) for row in json.loads(json.dumps([row.to_json() for row in rows]))] == rows
    planner = BoxSavePlanner()
    planner.set_up_planner(make_items())
    assert [row.write_item() for row in rows] == planner.create_local_plan().items
    assert [row_of(item) for item in planner.create_local_plan().items] == rows


def test_dcp_and_runs_write_the_same_files(tmp_path):
    """Runs put the index together from what was planned, DCP from what was written."""
    items = {**make_items(), "optimizer/x": item((4, 3), ((0, 1), (0, 3)))}
    items["optimizer/x@1"] = item((4, 3), ((1, 4), (0, 3)))
    one = save_checkpoint(tmp_path / "a", 3, items, {})
    dcp.save(items, storage_writer=CheckpointWriter(tmp_path / "b", 3), planner=BoxSavePlanner(), no_dist=True)
    for path in one.iterdir():
        assert path.read_bytes() == (tmp_path / "b" / one.name / path.name).read_bytes(), path.name


def test_a_plan_is_made_once_and_anew_when_the_state_changes(tmp_path, monkeypatch):
    decided, decide = [], SavePlans._decide
    monkeypatch.setattr(SavePlans, "_decide", lambda self, rows: decided.append(len(rows)) or decide(self, rows))
    plans, items = SavePlans(), make_items()
    for iteration, more in enumerate(({}, {}, {"model/new": StateItem.whole(torch.ones(3))}, {}, {}), 1):
        expected = {**make_items(iteration), **more}
        directory = SaveJob(CheckpointWriter(tmp_path, iteration), plans).run(expected)
        wanted = poisoned(expected)
        load_checkpoint(directory, wanted)
        assert_equal_items(wanted, expected)
    assert decided == [len(items), len(items) + 1, len(items)]
