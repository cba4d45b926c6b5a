"""From a configuration to everything a run needs: tokenizer, data, model, optimizer, schedule.

What can be wrong with flags or files is found here, before the first step, as a ValueError in one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megafp8.config import Config, with_vocab_size
from megafp8.core.gpt import GPTModel, ModelChunks, build_model
from megafp8.data import Datasets, Tokenizer, build_datasets, build_tokenizer, sample_counts
from megafp8.fp8 import DelayedScaling, policy
from megafp8.optimizer import Optimizer, Schedule, build_optimizer, build_schedule
from megafp8.parallel import ParallelContext
from megafp8.params import named_specs, specs_in_order
from megafp8.plan.shapes import linears
from megafp8.training.going_on import going_on
from megafp8.training.memory_savings import savings
from megafp8.training.places import check_places
from megafp8.training.step import PipelinePlan
from megafp8.training.timed_axes import timed
from megafp8.training.timers import Timers


@dataclass(frozen=True)
class Parts:
    """What the trainer works with.

    model: in a pipeline, this rank's stages. scaling: delayed scaling's histories, None where no recipe has any.
    timers: mark the phases of an iteration.
    """

    config: Config
    parallel: ParallelContext
    device: torch.device
    tokenizer: Tokenizer
    datasets: Datasets
    model: GPTModel | ModelChunks
    optimizer: Optimizer
    scaling: DelayedScaling | None
    schedule: Schedule
    pipeline: PipelinePlan
    timers: Timers


def tokenizer_identity(tokenizer: Tokenizer) -> dict[str, str | int]:
    """What a checkpoint says of its tokenizer, so that no run goes on with another one unnoticed."""
    return {"type": tokenizer.name, "vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}


def pick_device(name: str) -> torch.device:
    """The device of `--device`; `auto` takes a GPU when there is one. Raises ValueError when there is none to take."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA GPU; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def set_determinism(config: Config, device: torch.device) -> None:
    """`--deterministic-mode`: only kernels that give the same bits again; others raise an error."""
    if config.train.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        # TF32 would break the tolerances of FP32 runs; BF16 and FP8 products do not go through it.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def lacks_memory(error: BaseException) -> bool:
    """Whether an error, or one behind it, says that there was no memory to be had."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = "can't allocate memory|not enough memory|CUDA (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    if isinstance(error, RuntimeError) and re.search(said, str(error)):  # PyTorch's, on CPUs, is a plain RuntimeError
        return True
    return error.__cause__ is not None and lacks_memory(error.__cause__)


@contextmanager
def memory_for(config: Config, device: torch.device) -> Iterator[None]:
    """Turns a lack of memory, while something big is built, into a ValueError of one line."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError) as error:
        if not lacks_memory(error) and not isinstance(error, OverflowError) and "overflow" not in str(error):
            raise
        found = [f"{saving.flags} ({saving.saves / 2**30:.1f} GiB)" for saving in savings(config, device)]
        mend = f"; most would save {', '.join(found)}" if found else ""
        raise ValueError(
            f"the model and its optimizer do not fit in the memory of {device} (--num-layers "
            f"{config.model.num_layers}, --hidden-size {config.model.hidden_size}): make it smaller or spread it over "
            f"more processes{mend}; --dry-run estimates its memory"
        ) from None


def build_parts(config: Config, parallel: ParallelContext, device: torch.device) -> Parts:
    """Builds everything, cheapest check first: tokenizer and data before the model takes memory.

    Raises ValueError, in one line, for what is wrong with flags or files, a model that memory doesn't hold included.
    """
    check_places(config, parallel)
    config = going_on(config, parallel)
    set_determinism(config, device)
    tokenizer = build_tokenizer(config.data)
    config = with_vocab_size(config, tokenizer.vocab_size)
    policy.check_gemms((linear.recipe for linear in linears(config)), config.fp8.fp8_gemm_backend, device)
    datasets = build_datasets(config.data, tokenizer, sample_counts(config), seed=config.train.seed)
    schedule = build_schedule(config)
    timers = Timers(device, config.logging.timing_log_level)
    parallel = timed(parallel, timers) if timers.level >= 2 else parallel
    with memory_for(config, device):
        model = build_model(config, parallel, device)
        ends = model.ends() if config.optimizer.decoupled_lr is not None else ()
        decoupled = frozenset(spec.name for module in ends for spec, _ in named_specs(module))
        scaling, plan = DelayedScaling.of(model), PipelinePlan.of(config, parallel)
        optimizer = build_optimizer(specs_in_order(model), config, parallel, decoupled=decoupled, scaling=scaling)
        if config.parallel.overlap_param_gather:
            optimizer.wait_before_use(model)
    return Parts(config, parallel, device, tokenizer, datasets, model, optimizer, scaling, schedule, plan, timers)
