"""The worker pool: one a pytest process, ended with it."""

import atexit

import pytest

from tests.distributed.pool import WorkerPool

_pool: WorkerPool | None = None


@pytest.fixture
def pool() -> WorkerPool:
    """The shared worker processes; `pool.run_on(world, function, *args)`."""
    global _pool
    if _pool is None:
        _pool = WorkerPool()
        atexit.register(_pool.close)
    return _pool
