"""A page on this rank's memory: planned against what is there, by owner, and which flags would save most."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator

import torch

from megafp8.config import Config
from megafp8.plan.activations import by_module
from megafp8.plan.memory import MemoryPlan, plan_memory
from megafp8.training.build import Parts
from megafp8.training.live_memory import IN_HAND, LiveMemory, live_memory
from megafp8.training.memory_savings import savings
from megafp8.training.throughput import GIB, max_memory_gib

ROWS = 12
"""Of a table by module: the largest."""
ACTIVATIONS, TEMPORARIES = "activations", "temporaries"


def memory_page(parts: Parts, error: BaseException | None = None) -> list[str]:
    """The lines: a table by owner, the device, activations by module, flags. error: that ran out of memory.

    A part that can't be made says why in its place: it must not hide the others, nor end a run that is well.
    """
    lines, live, plan, config = [], LiveMemory({}), None, parts.config
    try:
        live = live_memory(parts, error)
    except Exception as second:
        lines.append(_unknown("what is there now", second))
    try:
        config = config.replace(device=parts.device.type)  # "auto" may be a GPU's
        plan = plan_memory(config, parts.device, parts.parallel.pp.rank)
    except Exception as second:
        lines.append(_unknown("the plan", second))
    lines += _part("memory by owner", lambda: _owner_lines(plan, live))
    lines += _part("the device", lambda: _device_lines(parts.device))
    lines += _part("activations by module", lambda: _module_lines(plan, live))
    lines += _part("what would save most", lambda: _saving_lines(config, parts))
    return lines


def _part(what: str, make: Callable[[], Iterable[str]]) -> list[str]:
    try:
        return list(make())
    except Exception as second:
        return [_unknown(what, second)]


def _unknown(what: str, error: Exception) -> str:
    """A line for a bug report."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{what}: not known, {type(error).__name__} at {place.filename}:{place.lineno}: {error}"


def _owner_lines(plan: MemoryPlan | None, live: LiveMemory) -> Iterator[str]:
    planned, there = dict(plan.owners) if plan is not None else {}, dict(live.owners)
    there[ACTIVATIONS] = live.held
    there[TEMPORARIES] = live.in_hand
    if live.allocated is not None:
        there["in no tensor of Python's (workspaces are)"] = max(0, live.allocated - live.found)
    yield f"{'by owner':<44}{'planned peak':>16}{'now':>16}"
    for name in dict.fromkeys((*planned, *there)):
        if planned.get(name) or there.get(name):
            yield f"  {name:<42}{_size(planned.get(name, 0))}{_size(there.get(name, 0))}"
    total = live.found if live.allocated is None else max(live.allocated, live.found)
    yield f"  {'in all':<42}{_size(plan.total if plan is not None else 0)}{_size(total)}"


def _device_lines(device: torch.device) -> Iterator[str]:
    if device.type != "cuda":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield f"the process had {max_memory_gib(device):.2f} GiB at its peak, of the machine's {memory / GIB:.1f} GiB"
        return
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    yield (
        f"{device}: {total / GIB:.1f} GiB, {free / GIB:.2f} free; PyTorch has allocated {allocated / GIB:.2f} (peak "
        f"{max_memory_gib(device):.2f}) and reserved {reserved / GIB:.2f}"
    )
    if reserved - allocated > total / 10:
        yield "much of it is reserved, in pieces too small: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help"


def _module_lines(plan: MemoryPlan | None, live: LiveMemory) -> Iterator[str]:
    if plan is not None:
        yield f"activations planned, of one microbatch ({plan.pairs} in flight at the peak):"
        yield from _largest({f"{a.module}: {a.what}": a.bytes for a in by_module(plan.activations)})
    there = dict(live.activations) | ({IN_HAND: live.in_hand} if live.in_hand else {})
    if there:
        yield "activations now, of all microbatches in flight, by the linear that keeps or reads them:"
        yield from _largest(there)


def _largest(sizes: dict[str, int]) -> Iterator[str]:
    ordered = sorted((item for item in sizes.items() if item[1]), key=lambda item: -item[1])
    for name, size in ordered[:ROWS]:
        yield f"  {name:<58}{_size(size)}"
    if rest := ordered[ROWS:]:
        name = f"{len(rest)} other{'s' if len(rest) > 1 else ''}"
        yield f"  {name:<58}{_size(sum(size for _, size in rest))}"


def _saving_lines(config: Config, parts: Parts) -> Iterator[str]:
    found = savings(config, parts.device, parts.parallel.pp.rank)
    if not found:
        yield "no flag that could be changed alone would save memory: use a smaller model, or more GPUs"
        return
    yield "what would save most, each planned anew with that flag alone:"
    for saving in found:
        yield f"  {saving.flags}"
        yield f"      saves {saving.saves:,} bytes, the peak is then {_size(saving.total).strip()}; {saving.price}"


def _size(size: int) -> str:
    if size < 1 << 10:
        return f"{f'{size} B' if size else '-':>16}"
    unit = "KiB" if size < 1 << 20 else "MiB" if size < 10 << 30 else "GiB"
    return f"{size / {'KiB': 1 << 10, 'MiB': 1 << 20, 'GiB': 1 << 30}[unit]:>12,.1f} {unit}"
