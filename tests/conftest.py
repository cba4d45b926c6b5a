"""What holds for all tests: their order, and the collector's work."""

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The README's commands build on each other: they come first, where no idle worker takes the last of them over."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


def pytest_collection_finish() -> None:
    """What was imported so far stays: `gc.collect()` in tests of what is let go need not look at it each time."""
    gc.freeze()
