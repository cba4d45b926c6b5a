"""Checks of what a run writes about itself."""

from os.path import basename

from megafp8.config.config import Config


def wandb(c: Config) -> str | None:
    """What Weights & Biases needs to be told."""
    log = c.logging
    if not log.wandb_project:
        return None
    if not log.wandb_exp_name:
        return f"--wandb-project {log.wandb_project} needs a name for the run; add --wandb-exp-name"
    if not (log.wandb_save_dir or log.log_dir or c.checkpoint.save):
        return f"--wandb-project {log.wandb_project} has nowhere to keep its files; add --log-dir"
    return None


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


def snapshot(c: Config) -> str | None:
    """The name of memory snapshots, into which the rank is put."""
    path = c.logging.memory_snapshot_path
    if basename(path) in ("", ".", ".."):
        return f"--memory-snapshot-path {path}: is a directory; give a file, e.g. snapshot.pickle"
    return None
