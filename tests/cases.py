"""Which cases of a parametrized test run in `make test`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest


def quick(cases: Iterable, chosen: Container | Callable[[Any], bool], *, id: Callable | None = None) -> list:  # noqa: A002
    """`pytest.param`s of all cases; those that are not `chosen` are slow.

    A case is a value, or a tuple of values for several arguments. Choose so that each feature, and each value of each
    argument, has a case that would notice its fault.
    """
    is_chosen = chosen if callable(chosen) else lambda case: case in chosen
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if is_chosen(case) else pytest.mark.slow,
            id=None if id is None else id(case),
        )
        for case in cases
    ]
