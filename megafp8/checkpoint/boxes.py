"""Boxes: half-open index ranges of a global tensor, and how saved ones fill wanted ones. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megafp8.params import Box

Slices = tuple[slice, ...]


def volume(box: Box) -> int:
    """Elements of a box; 1 for the box `()` of a scalar."""
    return math.prod(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    """The common part of two boxes with as many dimensions, None when no element is common."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def slices_within(inner: Box, outer: Box) -> Slices:
    """Slices that take `inner` out of a tensor that holds `outer`; both in global indices."""
    return tuple(slice(i0 - o0, i1 - o0) for (i0, i1), (o0, _) in zip(inner, outer, strict=True))


def pieces(wanted: Box, saved: Sequence[Box]) -> list[tuple[int, Box]]:
    """(number of the saved box, common part) of every saved box that holds some of `wanted`, each element once.

    Saved boxes that repeat an earlier one (replicas) are left out. Raises ValueError when elements are missing, or
    when boxes overlap otherwise, so that which one counts would be arbitrary.
    """
    if volume(wanted) == 0:
        return []
    found: dict[Box, int] = {}
    for number, box in enumerate(saved):
        common = intersection(wanted, box)
        if common is not None:
            found.setdefault(common, number)
    if _overlap(list(found)):
        raise ValueError("saved parts overlap")
    missing = volume(wanted) - sum(volume(common) for common in found)
    if missing:
        raise ValueError(f"{missing} of {volume(wanted)} elements are in none of the saved parts")
    return [(number, common) for common, number in found.items()]


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes have an element in common: swept along the dimension that they are cut in most often, so
    that thousands of shards are compared with their neighbours alone."""
    if len(boxes) < 2:
        return False
    dim = max(range(len(boxes[0])), key=lambda d: len({box[d][0] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        active = [other for other in active if other[dim][1] > box[dim][0]]
        if any(intersection(other, box) for other in active):
            return True
        active.append(box)
    return False


def is_box_of(box: Iterable[tuple[int, int]], shape: Sequence[int]) -> bool:
    """Whether `box` lies within a tensor of this shape."""
    box = tuple(box)
    return len(box) == len(shape) and all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True))
