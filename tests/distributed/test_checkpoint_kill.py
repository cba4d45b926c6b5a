"""A run of two ranks that is killed again and again in the middle of saves ends with the bits of one never stopped."""

from __future__ import annotations

import os
import random
import signal

import pytest

import pretrain_gpt
from megafp8.checkpoint import find_checkpoint
from megafp8.checkpoint.directory import saved_iterations
from tests.distributed.pool import WorkerError
from tests.training.runs import RECIPES, flags, write_corpus

SHORT = ("--train-iters", "12", "--eval-iters", "0", "--save-interval", "1", "--save-retain-interval", "5")
LAYOUT = ("--use-distributed-optimizer", "--overlap-param-gather", "--overlap-grad-reduce")
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
OPERATIONS = ("mkdir", "rename", "unlink", "rmdir", "fsync")


def run_and_die(argv: list[str], victim: int, count: int) -> int:
    """The run; rank `victim` kills itself at its `count`-th change of names or fsync, from whichever thread."""
    done = 0

    def counted(call):
        def run(*args, **kwargs):
            nonlocal done
            done += 1
            if done == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return run

    kept = {name: getattr(os, name) for name in OPERATIONS}
    try:
        if int(os.environ["RANK"]) == victim:
            for name, call in kept.items():
                setattr(os, name, counted(call))
        return pretrain_gpt.main(argv)
    finally:
        for name, call in kept.items():
            setattr(os, name, call)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_in_saves_and_resumed(pool, tmp_path):
    corpus, rng, kills = write_corpus(tmp_path), random.Random(8), 8

    def argv(directory, *extra):
        places = ("--log-dir", str(directory), "--save", str(directory / "c"), "--load", str(directory / "c"))
        return [*flags(corpus, *RECIPES["delayed"], *SHORT, *LAYOUT, *DROPOUT, *places), *extra]

    assert pool.run_on(2, run_and_die, argv(tmp_path / "whole"), 0, 0, timeout=120) == [0, 0]
    parts, deaths, newest = tmp_path / "parts", 0, 0
    for number in range(4 * kills + 4):
        more = ("--async-save",) if number % 2 == 0 else ()
        victim, count = (rng.randrange(2), rng.randint(1, 40)) if deaths < kills else (0, 0)
        try:
            assert pool.run_on(2, run_and_die, argv(parts, *more), victim, count, timeout=120) == [0, 0]
        except WorkerError as error:
            assert error.kind in ("WorkerDied", "RuntimeError", "DistBackendError"), error  # noqa: PT017
            deaths += 1
            found = find_checkpoint(parts / "c")
            assert found is not None or newest == 0
            assert (found.iteration if found else 0) >= newest, "a checkpoint was lost"
            newest = found.iteration if found else 0
            continue
        if deaths >= kills or saved_iterations(parts / "c")[-1:] == [12]:
            break
    assert deaths >= 1
    print(f"\n{deaths} ranks killed in the middle of saves")
    one, other = (directory / "c" / "iter_0000012" for directory in (tmp_path / "whole", parts))
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert {"rng-00001.safetensors", "optimizer-00001.safetensors"} <= set(files)
    assert files == sorted(path.name for path in other.glob("*.safetensors"))
    assert not [name for name in files if (one / name).read_bytes() != (other / name).read_bytes()]
    # One that was killed before it could delete the checkpoint before leaves that one.
    assert set(saved_iterations(parts / "c")) >= {5, 10, 12} == set(saved_iterations(tmp_path / "whole" / "c"))
