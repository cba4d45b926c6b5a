"""Labels, loss masks, positions and document borders of micro-batches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megafp8.data import Batch, MaskOptions, make_batch

EOD = 9
SEQ = 24


def random_samples(rng: np.random.Generator, number: int) -> list[np.ndarray]:
    """Ids 0..9, a third of them end-of-document ids; one sample begins and ends with it, one has none."""
    samples = [rng.choice([*range(9), EOD, EOD, EOD, EOD], size=SEQ + 1) for _ in range(number)]
    samples[0][[0, 1, SEQ - 1, SEQ]] = EOD
    samples[1][:] = 3
    return samples


def loop_reference(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions since the last document's start, and the document's number, token by token."""
    positions, documents = np.zeros_like(tokens), np.zeros_like(tokens)
    for row in range(tokens.shape[0]):
        position = document = 0
        for i in range(tokens.shape[1]):
            positions[row, i], documents[row, i] = position, document
            position += 1
            if tokens[row, i] == EOD:
                position, document = 0, document + 1
    return positions, documents


@pytest.mark.parametrize("seed", range(5))
def test_masks_against_a_loop(seed):
    samples = random_samples(np.random.default_rng(seed), 6)
    batch = make_batch(samples, SEQ, MaskOptions(EOD, True, True, True))
    stacked = np.stack(samples)
    np.testing.assert_array_equal(batch.tokens, stacked[:, :-1])
    np.testing.assert_array_equal(batch.labels, stacked[:, 1:])
    positions, documents = loop_reference(stacked[:, :-1])
    np.testing.assert_array_equal(batch.position_ids, positions)
    np.testing.assert_array_equal(batch.loss_mask, stacked[:, :-1] != EOD)
    assert [t.dtype for t in (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, batch.cu_seqlens)] == [
        torch.int64,
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int32,
    ]
    # cu_seqlens cuts the flattened tokens exactly where row or document change
    flat = (documents + 1000 * np.arange(6)[:, None]).reshape(-1)
    cuts = [0, *(np.flatnonzero(np.diff(flat)) + 1), len(flat)]
    assert batch.cu_seqlens.tolist() == cuts


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_flags_work_one_by_one(flag):
    samples = random_samples(np.random.default_rng(0), 3)
    plain, with_flag = (make_batch(samples, SEQ, MaskOptions(EOD, **options)) for options in ({}, {flag: True}))
    assert plain.cu_seqlens is None
    assert (plain.loss_mask == 1).all()
    assert (plain.position_ids == torch.arange(SEQ)).all()
    changed = {"reset_position_ids": "position_ids", "reset_attention_mask": "cu_seqlens", "eod_mask_loss": "loss_mask"}
    for name in ("tokens", "labels", "position_ids", "loss_mask"):
        assert torch.equal(getattr(plain, name), getattr(with_flag, name)) == (name != changed[flag])
    assert (with_flag.cu_seqlens is not None) == (flag == "reset_attention_mask")


def test_same_as_megatron():
    theirs = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed")
    samples = random_samples(np.random.default_rng(4), 5)
    batch = make_batch(samples, SEQ, MaskOptions(EOD, True, True, True))
    owner = torch.bucketize(torch.arange(5 * SEQ), batch.cu_seqlens[1:].long(), right=True).view(5, SEQ)
    for row, sample in enumerate(samples):
        attention, loss, positions = theirs._get_ltor_masks_and_position_ids(
            torch.from_numpy(sample[:-1]), EOD, True, True, True, True
        )
        assert torch.equal(batch.loss_mask[row], loss)
        assert torch.equal(batch.position_ids[row], positions)
        allowed = (owner[row][:, None] == owner[row][None, :]).tril()
        assert torch.equal(~attention[0], allowed)


def test_short_samples_are_filled_up_without_loss():
    batch = make_batch([np.array([1, 2, 3]), np.empty(0, np.int64), np.array([4])], 4, MaskOptions(EOD, True, True))
    assert batch.tokens.tolist() == [[1, 2, 3, 0], [0] * 4, [4, 0, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, 0, 0], [0] * 4, [0] * 4]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0], [0] * 4, [0] * 4]


def test_flags_need_an_eod():
    """CASES 73: a clear error at start, not late."""
    for flag in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')}: the tokenizer has no end-of-document token"):
            MaskOptions(None, **{flag: True})
    assert make_batch([np.arange(5)], 4, MaskOptions(None)).cu_seqlens is None


def test_batches_move():
    batch = make_batch(random_samples(np.random.default_rng(0), 2), SEQ, MaskOptions(EOD, reset_attention_mask=True))
    moved = batch.to("meta")
    assert isinstance(moved, Batch)
    assert all(t.device.type == "meta" for t in vars(SimpleNamespace(**vars(moved))).values())
    assert make_batch([np.arange(5)], 4, MaskOptions()).to("meta").cu_seqlens is None
