"""The order of all tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The README's commands build on each other: they come first, where no idle worker takes the last of them over."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")
