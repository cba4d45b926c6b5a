"""One rank of a large job on one device (`--fake-process-group`): its real step, with the real shapes of its part.

WORLD_SIZE and RANK say which rank. Other ranks are not there (`megafp8.lone`): collectives answer at once, hidden
states and gradients of other stages are made up, tokens are random, experts are dealt as many tokens as others. So the
memory and the time of the rank's own work are what they would be in the job; what it waits for others, and every loss,
are not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megafp8.config import Config, with_vocab_size
from megafp8.config.parallel import layout_sizes
from megafp8.data import build_tokenizer
from megafp8.lone import Copying, lone_parallel, nothing
from megafp8.meter import Key, Meter
from megafp8.plan.communication import means_of_stage
from megafp8.plan.measured import baseline
from megafp8.plan.rank_parameters import RankParameter, held_layers, rank_parameters
from megafp8.training.bare_job import BareJob
from megafp8.training.build import memory_for, set_determinism

STEPS = 3
"""Of a study: the first makes what stays (FP8 copies, kernels), the last is the one that is measured."""


@dataclass(frozen=True)
class Measured:
    """One rank's step. rank: of the job; stage: its place in the pipeline.

    seconds: of the last step, without `copying`, what stands for communication. static: bytes that are there when its
    backward is over; peak: most in it; both None on the CPU. sent: bytes and messages by kind and group. finite:
    whether its gradients were.
    """

    rank: int
    stage: int
    seconds: float
    copying: float
    static: int | None
    peak: int | None
    sent: dict[Key, tuple[int, int]]
    finite: bool


def rank_of(env: Mapping[str, str], config: Config) -> int:
    """The rank to be. Raises ValueError for one that the job hasn't got."""
    text, world = env.get("RANK", "0"), config.parallel.world_size
    if not text.isascii() or not text.isdigit() or int(text) >= world:
        raise ValueError(
            f"--fake-process-group: RANK={text!r} in the environment is no rank of a job of WORLD_SIZE={world}; set "
            f"RANK from 0 to {world - 1}"
        )
    return int(text)


def measure_one_rank(config: Config, device: torch.device, rank: int, steps: int = STEPS) -> Measured:
    """Builds the rank's part of the job, and takes `steps` steps.

    Args:
        config: resolved, with the vocabulary known.
    """
    meter = Meter()
    set_determinism(config, device)
    start = baseline(device) if device.type == "cuda" else 0
    stages = partial(_stage_says, config, _stage_of(config, rank), _first_expert(config, rank))
    with lone_parallel(config, rank, device.type, meter=meter, stages=stages) as parallel:
        with memory_for(config, device):
            job = BareJob(config, parallel, device)
        for number in range(1, steps + 1):
            before, watch = meter.copy(), _Watch(device, parallel.copying)
            finite = job.step(number)
            seconds, copying = watch.stop()
        sent, on_gpu = meter.since(before), device.type == "cuda"
        static, peak = (job.static - start, watch.peak - start) if on_gpu else (None, None)
        return Measured(rank, parallel.pp.rank, seconds, copying, static, peak, sent, bool(finite))


def _stage_of(config: Config, rank: int) -> int:
    return rank // (config.parallel.world_size // config.parallel.pipeline_model_parallel_size)


def _first_expert(config: Config, rank: int) -> int:
    """The first that this rank, and its counterparts on other stages, hold."""
    sizes = layout_sizes(config.parallel)
    return rank // sizes["etp"] % sizes["ep"] * ((config.model.num_experts or 0) // sizes["ep"])


def _name(p: RankParameter, first_expert: int) -> str:
    """Its global name, of a rank that is not the first of those that experts are dealt to."""
    return p.name.replace(f".experts.{p.number}.", f".experts.{first_expert + p.number}.", 1) if p.expert else p.name


def _stage_says(config: Config, own: int, first_expert: int, rank: int, value: Any) -> Any:
    """What pipeline rank `rank` says where this stage, `own`, says `value`: its parameters, the means that it reports,
    or its layers with experts, whichever it is that this stage has named."""
    names = (
        lambda stage: sorted(_name(p, first_expert) for p in rank_parameters(config, stage)),
        lambda stage: sorted(means_of_stage(config, stage, loads=True)),
    )
    if isinstance(value, list):  # of layers, whose loads are logged
        return sorted(f"{layer.name}.mlp" for layer in held_layers(config, rank) if layer.experts)
    for of_stage in names:
        if list(value) == of_stage(own):
            return of_stage(rank)
    return nothing(rank, value)


class _Watch:
    """Time and peak memory from now on."""

    def __init__(self, device: torch.device, copying: Copying) -> None:
        self._device, self._copying, self.peak = device, copying, 0
        copying.take()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        self._begin = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        """(seconds without what stands for communication, seconds of that)."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.peak = torch.cuda.max_memory_allocated(self._device)
        seconds, copying = time.perf_counter() - self._begin, self._copying.take()
        return seconds - copying, copying


def one_rank(config: Config, device: torch.device, env: Mapping[str, str] = os.environ) -> list[str]:
    """Runs the study that the flags ask for; lines of text: the rank's place, measured beside the plan.

    Raises ValueError for a RANK that isn't there.
    """
    from megafp8.training.one_rank_report import report_lines

    rank = rank_of(env, config)
    config = with_vocab_size(config, build_tokenizer(config.data).vocab_size)
    return report_lines(config, device, measure_one_rank(config, device, rank))
