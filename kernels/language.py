"""What the quantization kernels are written in: Gluon, Triton's lower level, where layouts are explicit.

Under `TRITON_INTERPRET=1` the same source runs in Triton's interpreter on the CPU: `gl` is then `triton.language` with
layouts ignored. Imported before any kernel is defined, so set the variable first.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language._core import builtin


class _InterpretedMemory:
    """Shared memory that was written once."""

    def __init__(self, value: tl.tensor) -> None:
        self.value = value

    def load(self, layout: Any) -> tl.tensor:
        return self.value


class _Interpreted:
    """`triton.language` under Gluon's names. Looked up at every call, since the interpreter replaces its functions."""

    BlockedLayout = gluon_language.BlockedLayout
    DistributedLinearLayout = gluon_language.DistributedLinearLayout
    SwizzledSharedLayout = gluon_language.SwizzledSharedLayout
    SliceLayout = staticmethod(lambda dim, parent: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(tl, name)

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> tl.tensor:
        return tl.arange(start, end)

    @staticmethod
    def zeros(shape: Any, dtype: tl.dtype, layout: Any = None) -> tl.tensor:
        return tl.zeros(shape, dtype)

    @staticmethod
    def allocate_shared_memory(dtype: tl.dtype, shape: Any, layout: Any, value: tl.tensor) -> _InterpretedMemory:
        return _InterpretedMemory(value)

    @staticmethod
    def convert_layout(x: tl.tensor, layout: Any) -> tl.tensor:
        return x


def _interpreted_jit(fn: Any) -> Any:
    fn.__globals__.setdefault("tl", tl)  # where the interpreter looks for what it replaces
    return triton.jit(fn)


@builtin
def _layout_of(x: tl.tensor, _semantic: Any = None) -> tl.constexpr:
    """The layout of a tensor, as a compile-time value."""
    return tl.constexpr(x.type.layout)


INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
if triton.knobs.runtime.interpret:
    gl: Any = _Interpreted()
    jit = _interpreted_jit
    layout_of = lambda x: None  # noqa: E731
    constexpr_function = lambda fn: fn  # noqa: E731
else:
    gl = gluon_language
    jit = gluon.jit
    layout_of = _layout_of
    constexpr_function = gluon.constexpr_function
