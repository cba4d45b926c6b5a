"""The worker pool: one a pytest process, ended with it."""

import atexit

import pytest

from tests.distributed.pool import WorkerPool

_pool: WorkerPool | None = None


def shared_pool() -> WorkerPool:
    global _pool
    if _pool is None:
        _pool = WorkerPool()
        atexit.register(_pool.close)
    return _pool


@pytest.fixture
def pool() -> WorkerPool:
    """The shared worker processes; `pool.run_on(world, function, *args)`."""
    return shared_pool()


@pytest.fixture(scope="module")
def pool_of_module() -> WorkerPool:
    """The same pool, for fixtures of module scope."""
    return shared_pool()
