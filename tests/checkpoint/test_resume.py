"""What the flags take from a checkpoint."""

import pytest
import torch

from megafp8.checkpoint import (
    DamagedFileError,
    check_tokenizer,
    find_checkpoint,
    load_found,
    save_checkpoint,
    select_saved,
)
from megafp8.params import StateItem
from tests.checkpoint.helpers import assert_equal_items, make_items, poisoned

SCALING = {"fp8_scaling/fc1/scale": StateItem.whole(torch.tensor([3.0]))}
RANDOM = {"rng/00000/torch": StateItem.whole(torch.arange(5))}


@pytest.fixture
def everything(tmp_path):
    items = {**make_items(), **SCALING, **RANDOM}
    save_checkpoint(tmp_path, 7, items, {"consumed_samples": 56})
    return find_checkpoint(tmp_path), items


def groups(tensors):
    return {name.split("/")[0] for name in tensors}


@pytest.mark.parametrize(
    ("flags", "loaded"),
    [
        ({}, {"model", "optimizer", "rng", "fp8_scaling"}),
        ({"no_load_optim": True}, {"model", "rng", "fp8_scaling"}),
        ({"no_load_rng": True}, {"model", "optimizer", "fp8_scaling"}),
        ({"finetune": True}, {"model"}),
    ],
)
def test_flags_choose_what_is_loaded(everything, flags, loaded):
    found, items = everything
    assert found.iteration == 7
    assert found.metadata["consumed_samples"] == 56
    wanted = poisoned(items)
    tensors = load_found(found, wanted, **flags)
    assert groups(tensors) == loaded
    for name, item in wanted.items():
        expected = items[name].tensor if name.split("/")[0] in loaded else torch.full_like(item.tensor, -77)
        assert torch.equal(item.tensor, expected), name


def test_fp8_state_is_optional_in_both_directions(tmp_path, everything):
    """CASES 60: a BF16 run loads an FP8 one's checkpoint and reverse."""
    found, items = everything
    plain = poisoned(make_items())
    load_found(found, plain)
    assert_equal_items(plain, make_items())
    save_checkpoint(tmp_path / "bf16", 7, make_items(), {})
    wanted = poisoned(items)
    tensors = load_found(find_checkpoint(tmp_path / "bf16"), wanted)
    assert groups(tensors) == {"model", "optimizer"}
    assert wanted["fp8_scaling/fc1/scale"].tensor == -77


def test_a_checkpoint_without_optimizer_names_the_flags(tmp_path):
    items = make_items()
    save_checkpoint(tmp_path, 7, select_saved(items, no_save_optim=True), {})
    found = find_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="--no-load-optim"):
        load_found(found, poisoned(items))
    assert groups(load_found(found, poisoned(items), no_load_optim=True)) == {"model"}


def test_select_saved():
    items = {**make_items(), **RANDOM}
    assert groups(select_saved(items)) == {"model", "optimizer", "rng"}
    assert groups(select_saved(items, no_save_optim=True)) == {"model", "rng"}
    assert groups(select_saved(items, no_save_rng=True)) == {"model", "optimizer"}


def tokenizer(size=256, fingerprint="ab12"):
    return {"type": "SentencePieceTokenizer", "vocab_size": size, "fingerprint": fingerprint}


def test_another_vocabulary_names_the_flags(tmp_path):
    save_checkpoint(tmp_path, 1, make_items(), {"tokenizer": tokenizer()})
    found = find_checkpoint(tmp_path)
    check_tokenizer(found, tokenizer())
    for other in (tokenizer(size=257), tokenizer(fingerprint="cd34")):
        with pytest.raises(ValueError, match=r"--load.*256 tokens.*--tokenizer-type, --tokenizer-model"):
            check_tokenizer(found, other)


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"iteration": "7"}'])
def test_a_changed_run_file_is_damage(tmp_path, content):
    directory = save_checkpoint(tmp_path, 1, make_items(), {})
    (directory / "run.json").write_bytes(content)
    with pytest.raises(DamagedFileError, match="run.json"):
        find_checkpoint(tmp_path)


def test_a_renamed_checkpoint_is_noticed(tmp_path):
    save_checkpoint(tmp_path, 1, make_items(), {}).rename(tmp_path / "iter_0000002")
    with pytest.raises(DamagedFileError, match="renamed"):
        find_checkpoint(tmp_path, 2)
