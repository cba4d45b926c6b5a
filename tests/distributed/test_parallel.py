"""ParallelContext: rank order, groups, collectives, layout errors, one-rank studies."""

import pytest
import torch

from megafp8.config import Config
from megafp8.config.parallel import layout_sizes
from megafp8.lone import fake_parallel
from megafp8.parallel import Axis, ParallelContext, build_parallel, close_parallel

AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "dp_cp")


def config_of(world_size: int, *, tp=1, pp=1, cp=1, ep=1, etp=None, sequence_parallel=False, minutes=10) -> Config:
    return Config().replace(
        world_size=world_size,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=sequence_parallel,
        distributed_timeout_minutes=minutes,
    )


def members(config: Config) -> dict[str, tuple[int, int, list[int]]]:
    """(size, rank, the job's ranks on it) of each axis."""
    parallel = build_parallel(config, "cpu")
    mine = torch.tensor([parallel.rank])
    found = {name: (a.size, a.rank, a.gather(mine).tolist()) for name in AXES for a in (getattr(parallel, name),)}
    close_parallel(parallel)
    assert not torch.distributed.is_initialized()
    return found


@pytest.mark.parametrize(
    ("sizes", "rank", "expected"),
    [
        ({"tp": 2}, 3, {"tp": (2, 1, [2, 3]), "dp": (2, 1, [1, 3]), "etp": (2, 1, [2, 3]), "dp_cp": (2, 1, [1, 3])}),
        ({"tp": 4}, 2, {"tp": (4, 2, [0, 1, 2, 3]), "dp": (1, 0, [2]), "ep": (1, 0, [2])}),
        ({"tp": 2, "pp": 2}, 1, {"tp": (2, 1, [0, 1]), "pp": (2, 0, [1, 3]), "dp": (1, 0, [1])}),
        ({"cp": 2}, 2, {"cp": (2, 0, [2, 3]), "dp": (2, 1, [0, 2]), "dp_cp": (4, 2, [0, 1, 2, 3])}),
        # Experts are folded on their own: ep 2 x etp 1 where attention has tp 2.
        ({"tp": 2, "ep": 2, "etp": 1}, 3, {"tp": (2, 1, [2, 3]), "ep": (2, 1, [2, 3]), "edp": (2, 1, [1, 3])}),
        ({"ep": 2}, 2, {"dp": (4, 2, [0, 1, 2, 3]), "ep": (2, 0, [2, 3]), "edp": (2, 1, [0, 2]), "etp": (1, 0, [2])}),
        ({"ep": 2, "etp": 2}, 1, {"ep": (2, 0, [1, 3]), "etp": (2, 1, [0, 1]), "edp": (1, 0, [1])}),
    ],
)
def test_groups_follow_megatrons_order(pool, sizes, rank, expected):
    found = pool.run_on(4, members, config_of(4, **sizes))[rank]
    assert {name: found[name] for name in expected} == expected


def collectives() -> dict[str, torch.Tensor]:
    parallel = build_parallel(config_of(3, tp=3), "cpu")
    tp, rank = parallel.tp, parallel.tp.rank
    ramp = torch.arange(6, dtype=torch.bfloat16).view(6, 1) * (rank + 1)
    found = {
        "sum": tp.sum_(torch.full((2,), rank + 1.0)),
        "max": tp.max_(torch.tensor([float(-rank), float(rank)])),
        "gather": tp.gather(torch.full((2, 2), float(rank))),
        "fp8": tp.gather(torch.full((1, 2), float(rank)).to(torch.float8_e4m3fn)).float(),
        "scatter_sum": tp.scatter_sum(ramp).float(),
    }
    try:
        tp.sum_(torch.zeros(2, dtype=torch.uint8))
    except AssertionError as error:
        found["refused"] = torch.tensor(len(str(error)))
    return found


def test_collectives_of_an_axis(pool):
    for rank, found in enumerate(pool.run_on(3, collectives)):
        assert found["sum"].tolist() == [6, 6]
        assert found["max"].tolist() == [0, 2]
        assert found["gather"].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2]]
        assert found["fp8"].tolist() == [[0, 0], [1, 1], [2, 2]]
        assert found["scatter_sum"].flatten().tolist() == [12 * rank, 6 * (2 * rank + 1)]
        assert "refused" in found  # bytes of FP8 are never reduced


def test_one_rank_posts_nothing():
    axis, x = Axis(), torch.ones(3)
    for collective in (axis.sum_, axis.max_, axis.gather, axis.scatter_sum):
        assert collective(x) is x
    parallel = build_parallel(config_of(1), "cpu")
    assert parallel == ParallelContext()
    parallel.barrier()
    close_parallel(parallel)


def test_sequence_parallel_needs_peers():
    with fake_parallel(config_of(2, tp=1, sequence_parallel=True)) as parallel:
        assert not parallel.sequence_parallel
    with fake_parallel(config_of(2, tp=2, sequence_parallel=True)) as parallel:
        assert parallel.sequence_parallel


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of(6, tp=4), "world size 6 = tp 4 x .*--tensor-model-parallel-size 4 .*start a multiple of 4"),
        (config_of(4, cp=3), "world size 4 = .*--context-parallel-size 3"),
        (config_of(6, tp=2, pp=2), "--pipeline-model-parallel-size 2 = 4"),
        (config_of(4, ep=3), "world size 4 = ep 3 .*--expert-model-parallel-size 3"),
        (config_of(4, tp=4, ep=2), "--expert-tensor-parallel-size 4.* = 8"),
    ],
)
def test_layout_errors_name_the_flags(config, message):
    with pytest.raises(ValueError, match=message):
        layout_sizes(config.parallel)
    with pytest.raises(ValueError, match=message):
        build_parallel(config, "cpu")


def test_number_of_processes_must_be_the_configurations():
    with pytest.raises(ValueError, match=r"for 4 process\(es\) and 1 were started"):
        build_parallel(config_of(4, tp=2), "cpu")


def test_fake_group_gives_any_rank_of_a_large_job():
    with fake_parallel(config_of(64, tp=4, pp=2, ep=8, etp=1), rank=37) as parallel:
        assert (parallel.tp.size, parallel.dp.size, parallel.pp.size) == (4, 8, 2)
        assert (parallel.tp.rank, parallel.dp.rank, parallel.pp.rank) == (1, 1, 1)
        assert (parallel.ep.rank, parallel.edp.rank) == (5, 0)
        assert parallel.tp.gather(torch.zeros(2, 3)).shape == (8, 3)
        assert parallel.tp.scatter_sum(torch.zeros(8, 3)).shape == (2, 3)
    assert not torch.distributed.is_initialized()


def timeouts() -> list[float]:
    parallel = build_parallel(config_of(4, tp=2, minutes=3), "cpu")
    backends = [axis.group._get_backend(torch.device("cpu")) for axis in (parallel.tp, parallel.dp)]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_timeout_holds_for_every_group(pool):
    """Groups other than the world's would have gloo's half hour."""
    assert pool.run_on(4, timeouts) == [[180.0, 180.0]] * 4
