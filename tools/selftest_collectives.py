"""The collectives that training uses, against expected values, with their bandwidth. Used by selftest_nccl.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.parallel import Axis

FP8 = torch.float8_e4m3fn


def numbers(n: int, rank: int, device: torch.device) -> Tensor:
    """n random bytes of a rank that every rank can make again, none of them NaN in E4M3; uint8."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 127, (n,), dtype=torch.uint8, generator=generator).to(device)


def gathers_fp8(axis: Axis, n: int, device: torch.device) -> tuple[bool, Callable[[], object]]:
    mine = numbers(n, axis.rank, device).view(FP8)
    expected = torch.cat([numbers(n, rank, device) for rank in range(axis.size)])
    return torch.equal(axis.gather(mine).view(torch.uint8), expected), lambda: axis.gather(mine)


def exchanges_fp8(axis: Axis, n: int, device: torch.device) -> tuple[bool, Callable[[], object]]:
    """All-to-all of unequal parts: rank r sends r + 1 shares to each other rank."""
    share = n // axis.size
    sent = [share * (axis.rank + 1)] * axis.size
    received = [share * (rank + 1) for rank in range(axis.size)]
    mine = numbers(sum(sent), axis.rank, device)
    out = torch.full((sum(received),), 255, dtype=torch.uint8, device=device)

    def run() -> object:
        return dist.all_to_all_single(out, mine, received, sent, group=axis.group)

    run()
    parts = []
    for rank in range(axis.size):
        theirs = numbers(share * (rank + 1) * axis.size, rank, device)
        parts.append(theirs.split(share * (rank + 1))[axis.rank])
    return torch.equal(out, torch.cat(parts)), run


def scatters_sums(axis: Axis, n: int, device: torch.device) -> tuple[bool, Callable[[], object]]:
    """BF16 reduce-scatter of small whole numbers, whose sums are exact."""
    values = [numbers(n, rank, device).remainder(16).bfloat16() for rank in range(axis.size)]
    expected = torch.stack(values).float().sum(0).bfloat16().chunk(axis.size)[axis.rank]
    mine = values[axis.rank].clone()
    return torch.equal(axis.scatter_sum(mine), expected), lambda: axis.scatter_sum(mine)


def takes_maxima(axis: Axis, n: int, device: torch.device) -> tuple[bool, Callable[[], object]]:
    """FP32 max all-reduce, with an Inf on one rank."""
    values = [numbers(n, rank, device).float() for rank in range(axis.size)]
    values[-1][0] = torch.inf
    expected = torch.stack(values).amax(0)
    mine = values[axis.rank].clone()
    return torch.equal(axis.max_(mine), expected), lambda: axis.max_(mine)


COLLECTIVES = {
    "all-gather, FP8 bytes": (gathers_fp8, 1),
    "all-to-all, FP8 bytes": (exchanges_fp8, 1),
    "reduce-scatter, BF16": (scatters_sums, 2),
    "max all-reduce, FP32": (takes_maxima, 4),
}
"""Name -> (check, bytes an element)."""


def collective_checks(axis: Axis, device: torch.device, elements: int) -> Iterator[tuple[str, Callable[[], dict]]]:
    """(name, what gives whether every rank saw the expected values, and GB/s of a rank's own buffer)."""

    def measure(check: Callable, size: int) -> dict:
        right, run = check(axis, elements, device)
        wrong = axis.sum_(torch.tensor([0.0 if right else 1.0], device=device)).item()
        seconds = _median_seconds(run, axis, device)
        return {"passed": wrong == 0, "gb_per_s": elements * size / seconds / 1e9}

    for name, (check, size) in COLLECTIVES.items():
        yield name, partial(measure, check, size)


def _median_seconds(run: Callable[[], object], axis: Axis, device: torch.device, repeats: int = 10) -> float:
    times = []
    for _ in range(repeats):
        axis.sum_(torch.zeros(1, device=device))  # all ranks start together
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
