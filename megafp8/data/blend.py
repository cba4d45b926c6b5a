"""Blends: several data sets read as one, in proportion to weights.

The order of a blend is a fixed, deterministic function of the weights: no random numbers, the same on every rank, and
a longer run's order starts with a shorter one's.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BlendSpec:
    """What a `--data-path` asks for: prefixes, and their weights or None for "in proportion to their tokens"."""

    flag: str  # as the user knows it, for messages
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def parse_blend(flag: str, entries: Sequence[str]) -> BlendSpec:
    """Megatron's forms: `PREFIX ...` (in proportion to size), or `WEIGHT PREFIX WEIGHT PREFIX ...`.

    Raises ValueError naming `flag` for a weight that is negative or no number, or weights that are all zero.
    """
    entries = tuple(str(entry).strip() for entry in entries)
    if not entries:
        raise ValueError(f"{flag}: no data sets given; give a PREFIX, or WEIGHT PREFIX pairs")
    weights = [_number(entry) for entry in entries[0::2]]
    if len(entries) % 2 or all(weight is None for weight in weights):
        numbers = [entry for entry in entries if _number(entry) is not None]
        if numbers:
            raise ValueError(
                f"{flag}: {numbers[0]} stands where a PREFIX is expected; give WEIGHT PREFIX pairs, or prefixes only"
            )
        return BlendSpec(flag, entries)
    for weight, entry in zip(weights, entries[0::2], strict=True):
        if weight is None or not math.isfinite(weight) or weight < 0:
            raise ValueError(
                f"{flag}: {entry!r} is no weight; give WEIGHT PREFIX pairs with weights >= 0, or prefixes only"
            )
    if sum(weights) == 0:
        raise ValueError(f"{flag}: all weights are 0; give at least one data set a weight above 0")
    return BlendSpec(flag, entries[1::2], tuple(weights))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def blend_order(weights: Sequence[float], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Which data set gives each sample of a blend, and which of that set's own samples it is.

    The sets are leaves of a Huffman tree over the weights. At each inner node the samples that reach it are dealt to
    its two children so that after k of them the left child has round(k * p), p being its part of the node's weight.
    Two successive levels of a Huffman tree shrink a node's weight by half or more, hence the errors of 1/2 a level
    add up to less than 2: after any number n of samples a set of weight w has given w * n of them within 2.

    Args:
        weights: >= 0, not all zero; any scale. A set of weight 0 gives no samples.
    Returns:
        data set int32 [num_samples], index in that set int64 [num_samples] (0, 1, 2, ... within each set).
    """
    data_set = np.empty(num_samples, dtype=np.int32)
    index = np.empty(num_samples, dtype=np.int64)
    pending = [(_huffman_tree(weights), np.arange(num_samples, dtype=np.int64))]
    while pending:
        node, positions = pending.pop()
        if node.children is None:
            data_set[positions] = node.leaf
            index[positions] = np.arange(len(positions), dtype=np.int64)
            continue
        left, right = node.children
        quota = np.floor(np.arange(len(positions) + 1) * (left.weight / node.weight) + 0.5)
        to_left = np.diff(quota) > 0
        pending += [(left, positions[to_left]), (right, positions[~to_left])]
    return data_set, index


@dataclass(frozen=True)
class _Node:
    weight: float
    leaf: int | None = None
    children: "tuple[_Node, _Node] | None" = None


def _huffman_tree(weights: Sequence[float]) -> _Node:
    assert min(weights) >= 0, weights
    assert sum(weights) > 0, weights
    serial = itertools.count()  # breaks ties, so that the tree depends on nothing but the weights
    heap = [(w, next(serial), _Node(float(w), leaf=i)) for i, w in enumerate(weights) if w > 0]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, right), (_, _, left) = heapq.heappop(heap), heapq.heappop(heap)
        node = _Node(left.weight + right.weight, children=(left, right))
        heapq.heappush(heap, (node.weight, next(serial), node))
    return heap[0][2]


class BlendedDataset:
    """Samples of several data sets in blend order. Indexing gives what the parts give."""

    def __init__(self, datasets: Sequence, data_set: np.ndarray, index: np.ndarray):
        self.datasets = list(datasets)  # None where a part gives no sample
        self.data_set, self.index = data_set, index

    def __len__(self) -> int:
        return len(self.data_set)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.datasets[self.data_set[i]][int(self.index[i])]
