"""A function in a process of its own, with a CUDA context and an allocator of its own: nothing of other tests is there.

Measures of memory need that: models that an earlier test let go are freed some time, cuBLAS's workspaces never.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def fresh(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)`, of a module's top level, returns; its exceptions come through."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
