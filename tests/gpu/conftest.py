"""Every test in this folder is marked `gpu`, and skipped where there is none."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NO_GPU = pytest.mark.skip(reason="needs a CUDA GPU")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available() and not getattr(item.module, "INTERPRETING", False):
                item.add_marker(NO_GPU)
