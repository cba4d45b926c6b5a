"""Box arithmetic, against a mask of every element."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.checkpoint.boxes import _overlap, intersection, is_box_of, pieces, slices_within, volume


@st.composite
def shape_and_cuts(draw):
    """A small shape, and a grid that cuts it into boxes."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    return tuple(shape), cuts


def grid(cuts):
    boxes = [()]
    for points in cuts:
        boxes = [box + ((a, b),) for box in boxes for a, b in zip(points, points[1:], strict=False)]
    return boxes


@st.composite
def box_in(draw, shape):
    box = []
    for n in shape:
        a, b = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
        box.append((a, b))
    return tuple(box)


def mask(box, shape):
    out = np.zeros(shape, bool)
    out[tuple(slice(a, b) for a, b in box)] = True
    return out


@given(st.data())
def test_intersection_is_that_of_the_masks(data):
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple))
    a, b = data.draw(box_in(shape)), data.draw(box_in(shape))
    common = intersection(a, b)
    both = mask(a, shape) & mask(b, shape)
    assert both.any() == (common is not None)
    if common is not None:
        assert np.array_equal(mask(common, shape), both)
        assert volume(common) == both.sum()


@given(st.data())
def test_any_box_is_filled_from_any_layout(data):
    shape, cuts = data.draw(shape_and_cuts())
    saved = grid(cuts)
    saved += data.draw(st.lists(st.sampled_from(saved), max_size=2))  # replicas
    saved = data.draw(st.permutations(saved))
    whole = np.arange(np.prod(shape)).reshape(shape)
    stored = [whole[tuple(slice(a, b) for a, b in box)] for box in saved]
    wanted = data.draw(box_in(shape))
    target = np.full([b - a for a, b in wanted], -1)
    written = np.zeros(target.shape, int)
    for number, common in pieces(wanted, saved):
        target[slices_within(common, wanted)] = stored[number][slices_within(common, saved[number])]
        written[slices_within(common, wanted)] += 1
    assert np.array_equal(target, whole[tuple(slice(a, b) for a, b in wanted)])
    assert (written == 1).all()


@given(st.data())
def test_a_missing_part_is_noticed(data):
    shape, cuts = data.draw(shape_and_cuts())
    saved = grid(cuts)
    gone = data.draw(st.sampled_from(saved))
    rest = [box for box in saved if box != gone]
    with pytest.raises(ValueError, match="none of the saved parts"):
        pieces(tuple((0, n) for n in shape), rest)


def test_overlapping_parts_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        pieces(((0, 10),), [((0, 6),), ((4, 10),)])


def test_a_scalar_is_one_piece():
    assert pieces((), [(), ()]) == [(0, ())]


@pytest.mark.parametrize("box", [((0, 4),), ((0, 3), (0, 2)), ((2, 1),), ((-1, 2),)])
def test_boxes_outside_a_shape(box):
    assert not is_box_of(box, (3,))


def _boxes(dims):
    ranges = st.tuples(st.integers(0, 5), st.integers(1, 4)).map(lambda r: (r[0], r[0] + r[1]))
    return st.lists(st.tuples(*[ranges] * dims), max_size=8, unique=True)


@given(st.integers(1, 3).flatmap(_boxes))
def test_the_sweep_finds_what_comparing_all_pairs_finds(boxes):
    assert _overlap(boxes) == any(intersection(a, b) for a, b in combinations(boxes, 2))
