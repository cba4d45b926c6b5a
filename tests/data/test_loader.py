"""Order of samples over ranks, micro-batches and resumes; worker processes."""

import multiprocessing
import os
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megafp8.data import MaskOptions, build_loader
from megafp8.data.loader import micro_batch_indices
from tests import forked

SEQ = 8


class Numbered:
    """Sample i is made of the id i."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return np.full(SEQ + 1, i)


def samples_of(loader, number=None):
    """First token of each row of each micro-batch."""
    return [batch.tokens[:, 0].tolist() for _, batch in zip(range(number or 10**9), loader, strict=False)]


def load(size=100, **options):
    return build_loader(Numbered(size), MaskOptions(), seq_length=SEQ, **options)


@pytest.mark.parametrize(
    ("micro_batch_size", "dp_size"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (3, 4), (12, 1)]
)
def test_global_batches_do_not_depend_on_the_layout(micro_batch_size, dp_size):
    """A global batch of 12 holds the next 12 samples, whatever micro-batch size and data-parallel size."""
    micro_batches = 12 // (micro_batch_size * dp_size)
    ranks = [
        list(
            micro_batch_indices(
                100, consumed_samples=24, micro_batch_size=micro_batch_size, dp_rank=rank, dp_size=dp_size
            )
        )
        for rank in range(dp_size)
    ]
    for step in range(6):
        mine = [micro for rank in ranks for micro in rank[step * micro_batches : (step + 1) * micro_batches]]
        assert sorted(i for micro in mine for i in micro) == list(range(24 + 12 * step, 36 + 12 * step))


def test_order_is_megatrons():
    """Rank r's micro-batch m is samples (m * dp_size + r) * micro_batch_size and on."""
    assert list(micro_batch_indices(20, consumed_samples=0, micro_batch_size=2, dp_rank=1, dp_size=3)) == [
        [2, 3],
        [8, 9],
        [14, 15],
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_continues_exactly(num_workers):
    whole = samples_of(load(micro_batch_size=3, num_workers=num_workers))
    assert whole == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(33)]
    for steps in (1, 7, 32):
        resumed = load(micro_batch_size=3, consumed_samples=3 * steps, num_workers=num_workers)
        assert samples_of(resumed) == whole[steps:]


def test_whole_pass_gives_every_rank_equally_many():
    """drop_last=False: all samples once, the rest rows without loss, the same number of batches on every rank."""
    seen = []
    for rank in range(2):
        batches = list(load(10, micro_batch_size=2, dp_rank=rank, dp_size=2, drop_last=False))
        assert len(batches) == 3
        seen += [int(b.tokens[row, 0]) for b in batches for row in range(2) if b.loss_mask[row].any()]
    assert sorted(seen) == list(range(10))
    assert len(list(load(10, micro_batch_size=2, dp_size=2))) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_random_state_is_untouched(num_workers):
    """CASES 15: building and reading a loader draws nothing from the global generators."""
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    samples_of(load(micro_batch_size=4, num_workers=num_workers), 5)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])


def test_errors():
    with pytest.raises(ValueError, match="has 3 samples, fewer than --micro-batch-size 2 on 2 data-parallel ranks"):
        load(3, micro_batch_size=2, dp_size=2)
    with pytest.raises(ValueError, match="101 samples were consumed but the data has 100"):
        load(100, micro_batch_size=1, consumed_samples=101)
    assert samples_of(load(100, micro_batch_size=4, consumed_samples=100)) == []


def test_workers_outlive_signals(tmp_path):
    """CASES 78: SIGTERM and SIGINT to the whole process group leave the workers reading, so that the trainer can save;
    and they are gone soon after the trainer."""
    script = textwrap.dedent("""
        import multiprocessing, os, signal, time
        import numpy as np
        from megafp8.data import MaskOptions, build_loader

        class Slow:
            def __len__(self): return 10000
            def __getitem__(self, i):
                time.sleep(0.01)
                return np.full(9, i % 200)

        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        batches = build_loader(Slow(), MaskOptions(), seq_length=8, micro_batch_size=2, num_workers=2)
        next(batches)
        workers = [w.pid for w in multiprocessing.active_children()]
        os.killpg(0, signal.SIGTERM)
        os.killpg(0, signal.SIGINT)
        for _ in range(60):
            next(batches)
        print(*workers, flush=True)
    """)
    root = Path(__file__).parents[2]
    output = tmp_path / "output"
    trainer = forked.start(["-c", script], output, cwd=root, session=True)
    trainer.join()
    assert trainer.exitcode == 0, output.read_text()
    workers = [int(pid) for pid in output.read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 120
    while any(_alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlived the trainer"
        time.sleep(0.1)


def test_close_ends_workers():
    before = len(multiprocessing.active_children())
    batches = load(micro_batch_size=1, num_workers=2)
    next(batches)
    assert len(multiprocessing.active_children()) == before + 2
    batches.close()
    assert len(multiprocessing.active_children()) == before
    batches = load(micro_batch_size=1, num_workers=2)
    del batches
    assert len(multiprocessing.active_children()) == before


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
