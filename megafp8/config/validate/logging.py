"""Checks of what a run writes about itself."""

from megafp8.config.config import Config


def profile(c: Config) -> str | None:
    """Which iterations and ranks are traced, and where to."""
    log, world = c.logging, c.parallel.world_size
    if not log.profile:
        return None
    if log.profile_step_end <= log.profile_step_start:
        return (
            f"--profile-step-end {log.profile_step_end} is not after --profile-step-start {log.profile_step_start}: "
            "iterations start + 1 to end are profiled; raise the end"
        )
    for rank in log.profile_ranks:
        if rank >= world:
            return f"--profile-ranks {rank}: the job's ranks are 0 to {world - 1}"
    if log.log_dir is None and log.tensorboard_dir is None:
        return "--profile has nowhere to write its traces; add --log-dir"
    return None
