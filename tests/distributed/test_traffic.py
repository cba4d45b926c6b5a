"""What ranks of real jobs hand to collectives is what is planned, byte for byte and message for message (gloo)."""

from __future__ import annotations

import pytest
import torch

from megafp8.config import build_config
from megafp8.config.parallel import layout_sizes
from megafp8.meter import Meter
from megafp8.parallel import build_parallel
from megafp8.plan.communication import by_kind, step_traffic
from megafp8.training.build import build_parts
from megafp8.training.trainer import Trainer
from tests.plan.traffic_cases import (
    APART,
    BASE,
    BLOCKWISE,
    CP,
    EP,
    FP8_WIRE,
    LLAMA,
    MLA,
    MOE,
    PP,
    SHARED,
    SP,
    TENSORWISE,
    TP,
    ZERO,
    selective,
)
from tests.training.recorded_ops import RecordedOps

BRIEF = {"global_batch_size": 2, "num_workers": 0}
TWO = {
    "sequence parallel, blockwise": SP | LLAMA | BLOCKWISE,
    "sequence parallel, tensorwise": SP | LLAMA | TENSORWISE,
    "pipeline, tied": PP,
    "sharded optimizer": ZERO | LLAMA | TENSORWISE | {"fp8_param_gather": True},
    "experts, FP8 dispatch": MOE | EP | BLOCKWISE | FP8_WIRE,
    "contexts": CP | LLAMA,
}
RECORDED = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}
GRAPHS = {
    "whole tokens": TP | LLAMA | RECORDED,
    "sequence parallel, blockwise": SP | LLAMA | BLOCKWISE | RECORDED,
    "sequence parallel, tensorwise": SP | LLAMA | TENSORWISE | RECORDED,
    "in chunks": SP | LLAMA | BLOCKWISE | RECORDED | {"tp_comm_overlap": True},
}
FOUR = {
    "pipeline of experts": MOE | PP | EP | BLOCKWISE | {"moe_per_layer_logging": True, "moe_layer_freq": "[0,1]"},
    "everything but contexts": MLA | MOE | SP | EP | APART | SHARED | ZERO | BLOCKWISE | selective("moe"),
}
MORE = {
    "replicas": LLAMA | {"global_batch_size": 4, "overlap_grad_reduce": True, "grad_reduce_in_bf16": True},
    "whole tokens": TP | CP | TENSORWISE | {"cp_comm_type": ("p2p",)},
    "interleaved": SP | PP | LLAMA | {"num_layers_per_virtual_pipeline_stage": 1, "num_layers": 4},
    "experts, gathered": MOE | EP | PP | {"moe_token_dispatcher_type": "allgather"},
    "experts one by one": MOE | SP | EP | TENSORWISE,
    "prediction": MLA | MOE | PP | TP | {"mtp_num_layers": 1, "sequence_parallel": True, "num_layers": 2},
    "uneven experts": MOE | EP | SP | APART | {"num_experts": 6, "moe_router_topk": 3},
}


class Marked(Trainer):
    """Notes what has been sent when an iteration begins."""

    def _iteration(self, batches):
        self.marks = [*getattr(self, "marks", []), self.parts.parallel.meter.copy()]
        return super()._iteration(batches)

    def _build_runner(self):
        runner = super()._build_runner()
        if runner._graphs is not None:
            runner._graphs._recorder = RecordedOps
        return runner


def count(jobs: dict[str, dict], world: int, iteration: int = 2) -> dict[str, tuple[dict, dict]]:
    """Name -> (what this rank sent in an iteration of the trainer, what is planned)."""
    found = {}
    for name, flags in jobs.items():
        values = BASE | BRIEF | {"train_iters": iteration + 1} | flags
        config = build_config(env={"WORLD_SIZE": str(world)}, check_files=False, **values)
        parallel = build_parallel(config, "cpu", meter=Meter())
        trainer = Marked(build_parts(config, parallel, torch.device("cpu")))
        assert trainer.run() == 0
        ranks_a_stage = world // layout_sizes(config.parallel)["pp"]
        planned = by_kind(step_traffic(trainer.parts.config, parallel.pp.rank, parallel.rank % ranks_a_stage))
        sent = trainer.marks[iteration].since(trainer.marks[iteration - 1])
        found[name] = sent, {key: (t.bytes, t.messages) for key, t in planned.items()}
    return found


@pytest.mark.parametrize(
    ("world", "jobs"),
    [
        pytest.param(2, TWO, id="two"),
        pytest.param(4, FOUR, id="four"),
        pytest.param(4, MORE, id="more", marks=pytest.mark.slow),
    ],
)
def test_counted_is_planned(pool, world, jobs):
    for rank, found in enumerate(pool.run_on(world, count, jobs, world, timeout=240)):
        for name, (sent, planned) in found.items():
            assert sent == planned, f"{name}, rank {rank} of {world}"
            assert sent, name


def test_replays_count_as_calls_do(pool):
    """The iteration after the one in which layers are recorded, which sends more: it warms up."""
    for rank, found in enumerate(pool.run_on(2, count, GRAPHS, 2, 3, timeout=240)):
        for name, (sent, planned) in found.items():
            assert sent == planned, f"{name}, rank {rank}"
