"""Random states."""

import random

import numpy as np
import torch

from megafp8.checkpoint import RandomState


def draw():
    return [random.random(), random.gauss(0, 1), *np.random.randn(3), *torch.randn(3).tolist()]  # noqa: NPY002


def test_states_come_back_bit_for_bit():
    """CASES 15. Odd numbers of Gaussian draws leave a cached value in NumPy and in Python."""
    draw()
    owner = RandomState()
    saved = {name: item.tensor for name, item in owner.state().items()}
    expected = [draw() for _ in range(2)]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    owner.load_state(saved)
    assert [draw() for _ in range(2)] == expected


def test_a_rank_never_takes_the_stream_of_another():
    """CASES 15."""
    saved = {name: item.tensor for name, item in RandomState(rank=1).state().items()}
    assert all(name.startswith("rng/00001/") for name in saved)
    before = draw_state()
    torch.manual_seed(5)
    changed = draw_state()
    RandomState(rank=0).load_state(saved)
    assert torch.equal(draw_state(), changed)
    assert not torch.equal(before, changed)


def draw_state():
    return torch.get_rng_state()


def test_the_seed_starts_all_of_them_and_every_rank_otherwise():
    def drawn(seed, rank):
        RandomState(rank).seed(seed)
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002

    first = drawn(7, 0)
    assert drawn(7, 0) == first
    for other in (drawn(8, 0), drawn(7, 1)):
        assert all(a != b for a, b in zip(first, other, strict=True))
