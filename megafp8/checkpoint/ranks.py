"""What the ranks of a job tell each other during a save: JSON as bytes, so no pickle between ranks either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megafp8.parallel import ParallelContext
from megafp8.params import Box


class Held(NamedTuple):
    """A part of a tensor that a rank could write."""

    name: str
    box: Box
    size: int


def exchange(parallel: ParallelContext, value: Any) -> list[Any]:
    """The JSON value of every rank, in the order of ranks."""
    return parallel.everyone.exchange(value)


def together(parallel: ParallelContext, action: Callable[[], Any]) -> list[Any]:
    """Runs `action` on every rank and returns the JSON values of all; OSError on every rank when one failed."""
    try:
        reply = {"value": action()}
    except OSError as error:
        reply = {"error": str(error) if parallel.world_size == 1 else f"rank {parallel.rank}: {error}"}
    replies = exchange(parallel, reply)
    errors = [r["error"] for r in replies if "error" in r]
    if errors:
        raise OSError(errors[0])
    return [r["value"] for r in replies]


def share_out(held: Sequence[Sequence[Held]]) -> list[set[tuple[str, Box]]]:
    """Which (name, box) each rank writes: every one once, on a rank that holds it, the bytes spread evenly.

    held: by rank, what it could write. Pure, so every rank comes to the same answer.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    sizes: dict[tuple[str, Box], int] = {}
    for rank, parts in enumerate(held):
        for part in parts:
            holders.setdefault((part.name, part.box), []).append(rank)
            sizes[part.name, part.box] = part.size
    load = [0] * len(held)
    shares: list[set[tuple[str, Box]]] = [set() for _ in held]
    for key in sorted(holders, key=lambda k: (-sizes[k], k)):
        rank = min(holders[key], key=lambda r: (load[r], r))
        shares[rank].add(key)
        load[rank] += sizes[key]
    return shares
