"""Blends: shares, ranges, and the forms of --data-path."""

import numpy as np
import pytest

from megafp8.data.blend import BlendedDataset, blend_order, parse_blend


def random_weights(rng: np.random.Generator) -> list[np.ndarray]:
    """50 sets of weights: even, skewed, geometric, one giant among dwarfs, with zeros, with ties."""
    sets = [
        np.array([0.001, 0.999]),
        np.array([0.0, 1.0]),
        np.array([1.0]),
        np.array([1e-9, 1.0, 1e-9]),
        2.0 ** -np.arange(30),
        np.r_[np.full(100, 1e-3), 1.0],
        np.full(7, 1 / 3),
    ]
    while len(sets) < 50:
        weights = rng.random(int(rng.integers(1, 40))) ** rng.integers(1, 12)
        weights[rng.random(len(weights)) < 0.2] = 0.0
        if weights.sum() > 0:
            sets.append(weights * 10.0 ** rng.integers(-3, 4))
    return sets


def test_shares_follow_weights():
    """CASES 67: after any number of samples each set's share is within 2 of its weight, whatever the weights; a set's
    own samples are counted 0, 1, 2, ...; and a set of weight 0 is never drawn."""
    rng = np.random.default_rng(0)
    for weights in random_weights(rng):
        num_samples = int(rng.integers(1, 5000))
        data_set, index = blend_order(weights, num_samples)
        assert data_set.shape == index.shape == (num_samples,)
        assert index.dtype == np.int64
        drawn = np.cumsum(data_set[:, None] == np.arange(len(weights)), axis=0)
        expected = np.arange(1, num_samples + 1)[:, None] * (weights / weights.sum())
        assert np.abs(drawn - expected).max() < 2
        assert (drawn[-1][weights == 0] == 0).all()
        np.testing.assert_array_equal(index, drawn[np.arange(num_samples), data_set] - 1)


def test_same_everywhere_and_longer_runs_only_add():
    rng = np.random.default_rng(1)
    for weights in random_weights(rng)[:20]:
        whole = blend_order(weights, 3000)
        for n in (1, 2, 500, 2999):
            for part, full in zip(blend_order(list(weights), n), whole, strict=True):
                np.testing.assert_array_equal(part, full[:n])


@pytest.mark.parametrize("weights", [[0.001, 0.999], [0, 1], [3, 1], [1, 1, 1e-6]])
def test_no_index_out_of_range(weights):
    """CASES 67: parts as small as their shares serve every sample of the blend."""
    for num_samples in (1, 2, 3, 10, 100, 999, 1000, 1001, 5000):
        data_set, index = blend_order(weights, num_samples)
        sizes = np.bincount(data_set, minlength=len(weights))
        parts = [list(range(1000 * i, 1000 * i + n)) if n else None for i, n in enumerate(sizes)]
        blend = BlendedDataset(parts, data_set, index)
        assert sorted(blend[i] for i in range(len(blend))) == sorted(x for part in parts if part for x in part)


def test_blend_forms():
    assert parse_blend("--data-path", ["a"]).prefixes == ("a",)
    for entries in (["a", "b"], ["a", "b", "c"]):
        spec = parse_blend("--data-path", entries)
        assert (spec.prefixes, spec.weights) == (tuple(entries), None)
    spec = parse_blend("--data-path", ["0.3", "a", "70", " b "])
    assert (spec.prefixes, spec.weights) == (("a", "b"), (0.3, 70.0))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "no data sets given"),
        (["0.5", "a", "b"], "0.5 stands where a PREFIX is expected"),
        (["0.5", "a", "b", "c"], "'b' is no weight"),
        (["a", "0.5"], "0.5 stands where a PREFIX is expected"),
        (["-1", "a", "2", "b"], "'-1' is no weight"),
        (["nan", "a", "2", "b"], "'nan' is no weight"),
        (["inf", "a", "2", "b"], "'inf' is no weight"),
        (["0", "a", "0.0", "b"], "all weights are 0"),
        (["1"], "1 stands where a PREFIX is expected"),
    ],
)
def test_bad_blends_are_refused(entries, message):
    with pytest.raises(ValueError, match=f"^--data-path: .*{message}"):
        parse_blend("--data-path", entries)
