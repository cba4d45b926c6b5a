"""Proof that a stretch of code never waits for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, whatever waits for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
