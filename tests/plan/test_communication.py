"""The planned traffic of a step is what a rank hands to collectives, byte for byte and message for message.

One rank is alone here (`megafp8.lone`), so every layout fits one process; tests/distributed/test_traffic.py counts in
real jobs.
"""

import pytest
import torch

from megafp8.config import build_config, with_vocab_size
from megafp8.config.parallel import layout_sizes
from megafp8.core.gpt import build_model
from megafp8.parallel import Axis, ParallelContext
from megafp8.params import specs_in_order
from megafp8.plan.communication import by_kind, step_traffic
from megafp8.plan.rank_parameters import rank_parameters
from megafp8.plan.traffic import Traffic
from megafp8.training.one_rank import measure_one_rank
from tests.cases import quick
from tests.plan.traffic_cases import BASE, CASES, VOCABULARY

QUICK = {
    "overlapped, BF16 gradients",
    "primary, cut",
    "BF16 where FP8 is slow",
    "contexts, ring",
    "pipeline, tied, last",
    "experts, apart",
    "experts, in place",
    "experts, gathered",
    "experts, all losses",
    "experts, uneven",
    "latent attention, contexts, prediction",
    "loss in parts",
    "sequence parallel, tensorwise",
    "in chunks, bf16",
    "layers with experts again, uniform",
    "DeepSeek-V3's kind, stage 3",
}


def config_of(world: int, flags: dict):
    config = build_config(env={"WORLD_SIZE": str(world)}, check_files=False, **BASE | flags)
    return with_vocab_size(config, VOCABULARY)


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_planned_traffic_is_what_is_counted(name):
    world, rank, flags = CASES[name]
    config = config_of(world, flags)
    measured = measure_one_rank(config, torch.device("cpu"), rank, steps=2)
    planned = step_traffic(config, measured.stage, rank % (world // config.parallel.pipeline_model_parallel_size))
    assert {key: (t.bytes, t.messages) for key, t in by_kind(planned).items()} == measured.sent
    assert measured.finite


@pytest.mark.parametrize(
    "name", quick(CASES, {"pipeline, tied, last", "BF16 where FP8 is slow", "DeepSeek-V3's kind, stage 3", "biases"})
)
def test_parameters_of_a_rank_are_those_that_the_model_makes(name):
    world, _, flags = CASES[name]
    config = config_of(world, flags)
    sizes = layout_sizes(config.parallel)
    for stage in range(sizes["pp"]):
        axes = {axis: Axis(size) for axis, size in sizes.items()} | {"pp": Axis(sizes["pp"], stage)}
        sequence_parallel = config.parallel.sequence_parallel and sizes["tp"] > 1
        parallel = ParallelContext(**axes, world_size=world, sequence_parallel=sequence_parallel)
        made = specs_in_order(build_model(config, parallel, "meta"))
        assert [(p.name, p.shape, p.expert, p.partial, p.decay) for p in rank_parameters(config, stage)] == [
            (s.name, s.local_shape, s.expert, bool(s.grad_sum_over), s.decay) for s, _ in made
        ]


def test_bytes_on_the_wire_are_a_rings():
    kinds = ("gather", "scatter_sum", "sum", "max", "deal", "send")
    assert [Traffic(kind, "tp", "", 800, 1, 4).wire_bytes for kind in kinds] == [2400, 600, 1200, 1200, 600, 800]


def test_nothing_is_sent_by_one_process():
    assert step_traffic(config_of(1, CASES["sequence parallel, bf16"][2] | {"tensor_model_parallel_size": 1})) == []
