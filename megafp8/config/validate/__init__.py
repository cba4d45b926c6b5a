"""All cross-checks, in one place: what flags may say, alone and together.

Limits of single values are data (limits.py). A cross-check is a small function that returns None, or one line that
names the flag, its value and the mend; the checks run in the order of CHECKS and the first line becomes a ValueError.
Flags of Megatron-LM that do nothing in a combination are only noted (idle.py), since scripts carry them along; flags
of ours are errors.
"""

from collections.abc import Callable

from megafp8.config.config import Config
from megafp8.config.validate import (
    data,
    experts,
    fp8,
    graphs,
    latent,
    logging,
    model,
    one_rank,
    pipeline,
    schedule,
    training,
)
from megafp8.config.validate.files import check_files, require_checkpoints
from megafp8.config.validate.idle import idle_notes
from megafp8.config.validate.limits import check_limits

__all__ = ["CHECKS", "check", "check_files", "check_limits", "idle_notes", "require_checkpoints"]

CHECKS: tuple[Callable[[Config], str | None], ...] = (
    model.heads,
    model.query_groups,
    model.positions,
    model.rotary,
    model.activation,
    latent.latent_attention,
    latent.stretching,
    experts.patterns,
    experts.experts,
    experts.expert_layout,
    experts.router,
    experts.router_groups,
    experts.balancing,
    experts.capacity,
    experts.experts_and_contexts,
    fp8.fp8_on,
    fp8.fp8_recipe,
    fp8.fp8_axes,
    fp8.fp8_pairs,
    fp8.fp8_coverage,
    fp8.fp8_modules,
    fp8.fp8_backend,
    experts.dispatch,
    fp8.fp8_watching,
    training.layout,
    training.tensor_parallel,
    pipeline.pipeline,
    pipeline.context_parallel,
    training.batch_steps,
    training.batch,
    training.rampup,
    training.length,
    training.skipped_iterations,
    training.recompute,
    graphs.cuda_graphs,
    training.checkpoints,
    schedule.optimizer,
    schedule.precision,
    schedule.multiplied,
    schedule.schedule_units,
    schedule.warmup,
    schedule.wsd,
    data.sources,
    data.blends,
    data.split,
    data.validation_sets,
    data.dataloader,
    data.tokenizer,
    logging.profile,
    logging.snapshot,
    logging.wandb,
    one_rank.alone,
)


def check(config: Config) -> None:
    """Checks a resolved configuration for flags that contradict each other.

    Raises:
        ValueError: the first contradiction, in one line.
    """
    for rule in CHECKS:
        if message := rule(config):
            raise ValueError(message)
