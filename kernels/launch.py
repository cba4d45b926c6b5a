"""Kernels launched again and again with the same sizes: what a launch needs besides addresses is worked out once.

Triton looks at every argument of every launch, and the code here at sizes, strides and configurations before that. Both
come to the same each time a layer sees a microbatch of the same size, so a launch is remembered by what it follows
from, and from the second time on only addresses are put into it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

Work = Callable[[], tuple[tuple[int, ...], tuple, dict[str, Any]]]

MOST = 4096
"""Launches remembered. Where sizes never repeat, such as experts' rows, those are forgotten that were not asked for
while so many others were."""


class Known(NamedTuple):
    """A launch without its addresses. arguments: all of the kernel's, with anything where addresses go: places."""

    compiled: CompiledKernel
    grid: tuple[int, int, int]
    device: int
    arguments: list
    places: tuple[int, ...]


known: dict[tuple, Known] = {}
"""By (kernel, device, facts, dtypes and alignments of the tensors)."""
older: dict[tuple, Known] = {}
"""What was known when `MOST` were, and has not been asked for since."""


def recall(key: tuple, known: dict[tuple, Any], older: dict[tuple, Any]) -> Any | None:
    """What was kept under a key, if it has not been forgotten."""
    found = known.get(key)
    if found is None and (found := older.pop(key, None)) is not None:
        keep(key, found, known, older)
    return found


def keep(key: tuple, value: Any, known: dict[tuple, Any], older: dict[tuple, Any]) -> None:
    if len(known) >= MOST:
        older.clear()
        older.update(known)
        known.clear()
    known[key] = value


def launch(
    kernel: Any,
    facts: Hashable,
    tensors: tuple[Tensor | None, ...],
    work_out: Work,
    *,
    grid: tuple[int, int, int] | None = None,
    numbers: tuple[tuple[int, int], ...] = (),
) -> None:
    """Launches a jitted kernel.

    tensors: its pointers, in the order of its arguments; None: absent, which the first never is. work_out: gives (grid,
    all arguments but named ones, named ones), tensors among them as in `tensors` (bytes may be viewed as another
    dtype). facts: whatever these follow from besides the tensors' dtypes, and which of them there are.
    grid, numbers: the grid, and (place, value) of arguments, that differ from launch to launch of the same facts: of
    rows whose number depends on the tokens. Triton compiles for what `_kind` tells of a number.
    """
    addresses, kinds = [], []
    for x in tensors:
        if x is None:
            kinds.append(None)
        else:
            address = x.data_ptr()
            addresses.append(address)
            kinds += x.dtype, address & 15  # Triton tells 16-byte alignment apart
    device = tensors[0].get_device()
    for _, number in numbers:
        kinds.append(_kind(number))
    key = id(kernel), device, facts, *kinds
    found = known.get(key) or recall(key, known, older)
    if found is not None:
        arguments = found.arguments.copy()
        for place, address in zip(found.places, addresses, strict=True):
            arguments[place] = address
        for place, number in numbers:
            arguments[place] = number
        start(found.compiled, found.grid if grid is None else grid, device, arguments)
        return
    grid, arguments, named = work_out()
    assert all(arguments[place] == number for place, number in numbers), kernel.__name__
    places = tuple(place for place, value in enumerate(arguments) if isinstance(value, Tensor))
    assert [arguments[place].data_ptr() for place in places] == addresses, f"{kernel.__name__}: not in order"
    compiled = launch_first(kernel, grid, arguments, named)
    if isinstance(compiled, CompiledKernel):  # not so in Triton's interpreter
        values = [None if place in places else value for place, value in enumerate(arguments)]
        values += [named[name] for name in kernel.arg_names[len(arguments) :]]
        remember(key, Known(compiled, (*grid, 1, 1)[:3], device, values, places))


def launch_first(kernel: Any, grid: tuple[int, ...], arguments: tuple, named: dict[str, Any]) -> CompiledKernel | None:
    """Triton's own way to launch, which compiles. `torch.compile`, where it is in use, would fail if it looked in."""
    run = _unseen() if "torch._dynamo" in sys.modules else _run
    return run(kernel, grid, arguments, named)


def _run(kernel: Any, grid: tuple[int, ...], arguments: tuple, named: dict[str, Any]) -> CompiledKernel | None:
    return kernel[grid](*arguments, **named)


@cache
def _unseen() -> Callable[..., CompiledKernel | None]:
    return torch.compiler.disable(_run)


def _kind(number: int) -> tuple[bool, bool, bool]:
    """What Triton tells integers apart by: 1 is a constant of the kernel, multiples of 16 are known as such, and those
    past 32 bits are wide."""
    return number == 1, number % 16 == 0, number < 2**31


def remember(key: tuple, launch: Known) -> None:
    keep(key, launch, known, older)


def start(compiled: CompiledKernel, grid: tuple[int, int, int], device: int, arguments: list) -> None:
    """Launches a compiled kernel on all of its arguments; pointers may be addresses."""
    if _watched():
        compiled[grid](*arguments)
        return
    stream = driver.active.get_current_stream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def _watched() -> bool:
    """Whether a profiler of Triton's wants to be told of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
