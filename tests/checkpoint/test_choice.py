"""Loading by choice: the checkpoint before a damaged one, names on one side alone, rounding."""

import logging

import pytest
import torch

from megafp8.checkpoint import (
    STRICTNESS,
    DamagedFileError,
    find_checkpoint,
    find_together,
    load_checkpoint,
    load_found,
    save_checkpoint,
)
from megafp8.parallel import ParallelContext
from megafp8.params import StateItem
from tests.checkpoint.helpers import assert_equal_items, make_items, poisoned


@pytest.fixture
def three(tmp_path):
    """Checkpoints 10, 20 and 30."""
    for iteration in (10, 20, 30):
        save_checkpoint(tmp_path, iteration, make_items(iteration), {})
    return tmp_path


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["index.json", "run.json"])
def test_the_one_before_a_damaged_one(three, caplog, file):
    flip(three / "iter_0000030" / file, 10)
    with pytest.raises(DamagedFileError, match=file):
        find_checkpoint(three)
    assert find_checkpoint(three, fallback=True).iteration == 20
    assert "taking iteration 20" in caplog.text
    (three / "iter_0000020" / "run.json").unlink()
    assert find_checkpoint(three, fallback=True).iteration == 10
    flip(three / "iter_0000010" / file, 10)
    with pytest.raises(DamagedFileError, match="iter_0000030"):
        find_checkpoint(three, fallback=True)


def test_the_one_before_the_one_that_was_asked_for(three):
    flip(three / "iter_0000020" / "index.json", 10)
    assert find_checkpoint(three, 20, fallback=True).iteration == 10
    assert find_checkpoint(three, before=30, fallback=True).iteration == 10
    assert find_checkpoint(three, before=10) is None
    assert find_checkpoint(three / "iter_0000030", before=30) is None
    assert find_together(ParallelContext(), three, before=30, fallback=True).iteration == 10


def with_more(items):
    """A run that has a layer more than the checkpoint."""
    more = {
        "model/new.weight": StateItem.whole(torch.full((4, 4), 2.0, dtype=torch.bfloat16)),
        "optimizer/master/new.weight": StateItem.whole(torch.full((4, 4), 3.0)),
    }
    return {**items, **more}


@pytest.mark.parametrize("strictness", STRICTNESS)
def test_names_on_one_side_alone(tmp_path, caplog, strictness):
    """Megatron's "unexpected" are those that the checkpoint lacks; "all" takes in those without a place in the run."""
    rule = STRICTNESS[strictness]
    items = make_items()
    few = {name: item for name, item in items.items() if "fc1" not in name}
    save_checkpoint(tmp_path / "few", 1, few, {})
    save_checkpoint(tmp_path / "all", 1, items, {})
    caplog.set_level(logging.WARNING)

    def load(save, wanted):
        return load_found(find_checkpoint(tmp_path / save), wanted, strictness=rule)

    wanted = poisoned(items)
    if rule.lacks == "raise":
        with pytest.raises(ValueError, match="lacks 'model/fc1.weight'; --dist-ckpt-strictness"):
            load("few", wanted)
        assert_equal_items(wanted, poisoned(items))
    else:
        assert load("few", wanted).keys() == items.keys(), "owners are given all their names"
        assert wanted["model/fc1.weight"].tensor.eq(-77).all()
        assert torch.equal(wanted["model/norm.weight"].tensor, items["model/norm.weight"].tensor)
    assert ("lacks 'model/fc1.weight'" in caplog.text) == (rule.lacks == "log")
    wanted = poisoned(few)
    if rule.extra == "raise":
        with pytest.raises(ValueError, match="holds 'model/fc1.weight', for which this run has no place"):
            load("all", wanted)
    else:
        assert load("all", wanted).keys() == few.keys()
        assert_equal_items(wanted, few)
    assert ("for which this run has no place" in caplog.text) == (rule.extra == "log")


def test_a_missing_master_starts_from_its_weight(tmp_path):
    """CASES 33: else the first step would bring the random start back."""
    items = make_items()
    saved = {**items, "model/w": StateItem.whole(torch.full((3, 5), 1.5, dtype=torch.bfloat16))}
    save_checkpoint(tmp_path, 1, saved, {})
    wanted = poisoned({**saved, "optimizer/master/w": StateItem.whole(torch.zeros(3, 5))})
    tensors = load_found(find_checkpoint(tmp_path), wanted, strictness=STRICTNESS["log_all"])
    assert tensors["optimizer/master/w"].eq(1.5).all()
    assert tensors["optimizer/master/w"].dtype == torch.float32


def test_rounding_by_flag(tmp_path):
    items = make_items()
    save_checkpoint(tmp_path, 1, items, {})
    name = "optimizer/master/embedding.weight"
    narrow = {**poisoned(items), name: StateItem.whole(torch.zeros(33, 16, dtype=torch.bfloat16))}
    with pytest.raises(ValueError, match="--load-narrowing"):
        load_found(find_checkpoint(tmp_path), narrow)
    load_found(find_checkpoint(tmp_path), narrow, allow_narrowing=True)
    assert torch.equal(narrow[name].tensor, items[name].tensor.bfloat16())


BYTES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32),
    *(torch.uint16, torch.uint8, torch.bool),
)


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_any_dtype_is_kept_and_cut(tmp_path, dtype):
    """Also moments in FP8 with their scales, and the 16 bits of a master that its BF16 weight lacks."""
    content = torch.arange(64 * dtype.itemsize, dtype=torch.uint8)
    whole = (content > 99 if dtype == torch.bool else content.view(dtype)).reshape(8, 8)
    parts = [StateItem(whole[:, :5].contiguous(), (8, 8), ((0, 8), (0, 5)))]
    parts += [StateItem(whole[:, 5:].contiguous(), (8, 8), ((0, 8), (5, 8)))]
    directory = save_checkpoint(tmp_path, 1, {"optimizer/x": parts[0], "optimizer/x@1": parts[1]}, {})
    wanted = {"optimizer/x": StateItem(torch.empty(4, 6, dtype=dtype), (8, 8), ((2, 6), (1, 7)))}
    load_checkpoint(directory, wanted)
    found, expected = wanted["optimizer/x"].tensor, whole[2:6, 1:7].contiguous()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
