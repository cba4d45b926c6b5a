"""What the ranks of a job tell each other during saves and loads: JSON as bytes, so no pickle between ranks either."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megafp8.checkpoint.tensor_file import DamagedFileError
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


def agreed(parallel: ParallelContext, action: Callable[[], Any]) -> Any:
    """Runs `action` on every rank and returns its own value; when one rank's failed, its ValueError on every rank.

    So no rank goes on with a checkpoint in which another has found damage (DamagedFileError).
    """
    value, error = None, None
    try:
        value = action()
    except ValueError as caught:
        error = caught
    if parallel.world_size == 1:
        if error is not None:
            raise error
        return value
    replies = exchange(parallel, None if error is None else [isinstance(error, DamagedFileError), str(error)])
    for reply in replies:
        if reply is not None:
            damaged, text = reply
            raise (DamagedFileError if damaged else ValueError)(text) from error
    return value


def known_to_any(parallel: ParallelContext, names: Sequence[str], known: Collection[str]) -> set[str]:
    """Those of `names` that are in `known` on some rank. names: the same on every rank."""
    if parallel.world_size == 1:
        return set(names) & set(known)
    everyone = parallel.everyone
    device = "cuda" if dist.get_backend(everyone.group) == "nccl" else "cpu"
    mask = torch.tensor([name in known for name in names], dtype=torch.int32, device=device)
    return {name for name, here in zip(names, everyone.max_(mask).tolist(), strict=True) if here}


def spread(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Names shared out over the ranks, about as many bytes for each. Pure."""
    loads, shares = [0] * ranks, [[] for _ in range(ranks)]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += sizes[name]
    return shares


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
