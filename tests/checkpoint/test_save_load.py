"""Round trips, other layouts, and everything a load must refuse."""

import json
import random

import pytest
import torch

from megafp8.checkpoint import CheckpointWriter, DamagedFileError, load_checkpoint, save_checkpoint
from megafp8.checkpoint.index import Index, read_index
from megafp8.checkpoint.planner import BoxSavePlanner
from megafp8.params import StateItem
from tests.checkpoint.helpers import SHAPES, assert_equal_items, make_items, poisoned


@pytest.fixture
def saved(tmp_path):
    items = make_items()
    return save_checkpoint(tmp_path, 100, items, {"consumed_samples": 800}), items


def test_round_trip_keeps_every_bit(saved):
    directory, items = saved
    assert directory.name == "iter_0000100"
    wanted = poisoned(items)
    tensors = load_checkpoint(directory, wanted)
    assert_equal_items(wanted, items)
    assert all(tensors[name] is wanted[name].tensor for name in items)


def test_layout_on_disk(saved):
    """What the README promises: files a group and rank, run.json, index.json with box, dtype, shape and checksum."""
    directory, items = saved
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["index.json", "model-00000.safetensors", "optimizer-00000.safetensors", "run.json"]
    run = json.loads((directory / "run.json").read_text())
    assert run["iteration"] == 100
    assert run["consumed_samples"] == 800
    assert run["versions"]["torch"] == torch.__version__
    index = json.loads((directory / "index.json").read_text())["index"]
    assert set(index["tensors"]) == set(items)
    assert index["tensors"]["model/fc1.weight"] == {
        "dtype": "BF16",
        "shape": [2, 24, 16],
        "parts": [{"file": "model-00000.safetensors", "key": "model/fc1.weight", "box": [[0, 2], [0, 24], [0, 16]]}],
    }
    assert set(index["files"]) == set(names) - {"index.json"}


def test_moments_keep_their_low_bits(tmp_path):
    """CASES 76."""
    value = torch.full((7,), 1 + 2**-20)
    directory = save_checkpoint(tmp_path, 1, {"optimizer/exp_avg/w": StateItem.whole(value)}, {})
    wanted = poisoned({"optimizer/exp_avg/w": StateItem.whole(value)})
    load_checkpoint(directory, wanted)
    assert torch.equal(wanted["optimizer/exp_avg/w"].tensor, value)


def cut(n, parts, rng):
    points = sorted([0, n, *(rng.randint(0, n) for _ in range(parts - 1))])
    return list(zip(points, points[1:], strict=False))


def shard(items, ranks, rng):
    """The items cut along a random dimension each, for so many ranks, unevenly."""
    layouts = [{} for _ in range(ranks)]
    for name, item in items.items():
        if not item.shape:
            layouts[0][name] = item
            continue
        dim = rng.randrange(len(item.shape))
        for rank, (start, stop) in enumerate(cut(item.shape[dim], ranks, rng)):
            box = tuple((start, stop) if d == dim else (0, n) for d, n in enumerate(item.shape))
            part = item.tensor[tuple(slice(a, b) for a, b in box)]
            layouts[rank][name] = StateItem(part, item.shape, box)
    return layouts


def save_as_ranks(save, layouts):
    """What so many ranks would save together, written by one process after the other."""
    writer, planners = CheckpointWriter(save, 1), [BoxSavePlanner() for _ in layouts]
    writer.set_up_storage_writer(is_coordinator=True)
    for planner, items in zip(planners, layouts, strict=True):
        planner.set_up_planner(items)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    plans = writer.prepare_global_plan(plans)
    results = [writer.write_data(plan, planner).wait() for plan, planner in zip(plans, planners, strict=True)]
    writer.finish(metadata, results)
    return writer.directory


@pytest.mark.parametrize(("saving", "loading"), [(1, 3), (2, 1), (2, 3), (4, 2), (3, 4)])
def test_any_layout_loads_any_other(tmp_path, saving, loading):
    """CASES 57: uneven cuts along different dimensions; masters and weights are equal by name."""
    rng = random.Random(saving * 10 + loading)
    items = make_items()
    directory = save_as_ranks(tmp_path, shard(items, saving, rng))
    for part in shard(items, loading, rng):
        wanted = poisoned(part)
        load_checkpoint(directory, wanted, ignored=("optimizer/step",))
        assert_equal_items(wanted, part)


def test_missing_and_unexpected_names_are_errors_unless_allowed(saved):
    """CASES 57: missing state is an error."""
    directory, items = saved
    more = {**items, "fp8_scaling/fc1/scale": StateItem.whole(torch.ones(1))}
    with pytest.raises(ValueError, match="lacks 'fp8_scaling/fc1/scale'"):
        load_checkpoint(directory, poisoned(more))
    wanted = poisoned(more)
    tensors = load_checkpoint(directory, wanted, optional=("fp8_scaling/",))
    assert "fp8_scaling/fc1/scale" not in tensors
    assert wanted["fp8_scaling/fc1/scale"].tensor == -77
    fewer = {name: item for name, item in items.items() if name.startswith("model/")}
    with pytest.raises(ValueError, match="holds 'optimizer/master/embedding.weight'.*no place"):
        load_checkpoint(directory, poisoned(fewer))
    load_checkpoint(directory, poisoned(fewer), ignored=("optimizer/",))


def test_files_of_what_is_not_wanted_are_not_touched(saved):
    directory, items = saved
    (directory / "optimizer-00000.safetensors").unlink()
    weights = poisoned({name: item for name, item in items.items() if name.startswith("model/")})
    load_checkpoint(directory, weights, ignored=("optimizer/",))
    assert torch.equal(weights["model/norm.weight"].tensor, items["model/norm.weight"].tensor)


def test_another_shape_is_an_error(saved):
    directory, items = saved
    items = {**items, "model/norm.weight": StateItem.whole(torch.zeros(17, dtype=torch.bfloat16))}
    with pytest.raises(ValueError, match=r"'model/norm.weight' has the shape \[16\].*\[17\]"):
        load_checkpoint(directory, items)


def test_widening_is_exact_and_narrowing_needs_permission(saved):
    directory, items = saved
    name, master = "model/norm.weight", "optimizer/master/embedding.weight"
    wide = {**items, name: StateItem.whole(torch.zeros(16))}
    load_checkpoint(directory, wide)
    assert torch.equal(wide[name].tensor, items[name].tensor.float())
    narrow = {**poisoned(items), master: StateItem.whole(torch.zeros(33, 16, dtype=torch.bfloat16))}
    with pytest.raises(ValueError, match="would be rounded"):
        load_checkpoint(directory, narrow)
    assert narrow[name].tensor.eq(-77).all()
    load_checkpoint(directory, narrow, allow_narrowing=True)
    assert torch.equal(narrow[master].tensor, items[master].tensor.bfloat16())
    integer = {**items, "optimizer/step": StateItem.whole(torch.zeros(()))}
    with pytest.raises(ValueError, match="optimizer/step"):
        load_checkpoint(directory, integer, allow_narrowing=True)


@pytest.mark.parametrize("file", ["model-00000.safetensors", "optimizer-00000.safetensors", "index.json"])
@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
def test_a_damaged_file_is_named_and_nothing_is_written(saved, file, fault):
    directory, items = saved
    path = directory / file
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(1 if fault == "remove" else 12):
        at = rng.randrange(len(content))
        if fault == "flip":
            path.write_bytes(content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :])
        elif fault == "truncate":
            path.write_bytes(content[:at])
        else:
            path.unlink()
        wanted = poisoned(items)
        with pytest.raises(DamagedFileError, match=file) as error:
            load_checkpoint(directory, wanted)
        assert "\n" not in str(error.value)
        assert_equal_items(wanted, poisoned(items))


def forge(directory, change):
    """Rewrites the index with a correct checksum, as an attacker would."""
    import zlib

    body = json.loads((directory / "index.json").read_text())["index"]
    change(body)
    crc = zlib.crc32(json.dumps(body, separators=(",", ":"), sort_keys=True).encode())
    (directory / "index.json").write_text(json.dumps({"crc32": f"{crc:08x}", "index": body}))


def set_shape(shape):
    def change(body):
        body["tensors"]["model/norm.weight"]["shape"] = shape

    return change


def set_box(box):
    def change(body):
        body["tensors"]["model/norm.weight"]["parts"][0]["box"] = box

    return change


def set_file(name):
    def change(body):
        body["files"][name] = body["files"]["model-00000.safetensors"]
        body["tensors"]["model/norm.weight"]["parts"][0]["file"] = name

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_shape([10**30]),
        set_shape([-16]),
        set_shape([16.0]),
        set_shape("16"),
        set_shape([1 << 40, 1 << 40, 0]),
        set_shape([1] * 20),
        set_box([[0, 17]]),
        set_box([[-1, 16]]),
        set_box([[8, 4]]),
        set_box([[0, 16], [0, 1]]),
        set_box([[0, True]]),
        set_box([]),
        set_file("../model-00000.safetensors"),
        set_file("/etc/passwd"),
        set_file("a/b.safetensors"),
        set_file(".."),
        set_file(""),
        set_file("x\0y"),
        lambda body: body.update(version=99),
        lambda body: body.update(format="other"),
        lambda body: body.update(tensors=[]),
        lambda body: body["tensors"]["model/norm.weight"].pop("parts"),
        lambda body: body["tensors"]["model/norm.weight"].update(dtype="OBJECT"),
        lambda body: body["files"]["model-00000.safetensors"].update(crc32="zz"),
    ],
)
def test_an_absurd_index_is_refused(saved, change):
    directory, items = saved
    forge(directory, change)
    with pytest.raises(DamagedFileError, match="index.json"):
        load_checkpoint(directory, poisoned(items))


@pytest.mark.parametrize("box", [[[0, 8]], [[0, 0]]])
def test_an_index_that_differs_from_the_files_is_refused(saved, box):
    directory, items = saved
    forge(directory, set_box(box))
    wanted = poisoned(items)
    with pytest.raises(DamagedFileError, match="model/norm.weight"):
        load_checkpoint(directory, wanted)
    assert_equal_items(wanted, poisoned(items))


def test_links_are_not_followed(saved, tmp_path):
    directory, items = saved
    target = tmp_path / "elsewhere.safetensors"
    (directory / "model-00000.safetensors").rename(target)
    (directory / "model-00000.safetensors").symlink_to(target)
    with pytest.raises(DamagedFileError, match="links are not followed"):
        load_checkpoint(directory, poisoned(items))


def test_nothing_is_pickled(saved):
    """No file holds a pickle, and loading needs neither torch.load nor pickle."""
    directory, _ = saved
    for path in directory.iterdir():
        content = path.read_bytes()
        assert not content.startswith((b"PK", b"\x80")), path
    assert isinstance(read_index(directory), Index)
    assert set(SHAPES) == set(read_index(directory).tensors)
