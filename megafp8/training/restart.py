"""A job that torchrun starts again goes on from its own checkpoints, whatever its first start was told to load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megafp8.checkpoint.directory import latest_iteration
from megafp8.config import Config

RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def restarted(config: Config, env: Mapping[str, str] = os.environ) -> Config:
    """The configuration of this start: after a restart that of a resume from `--save`, once there is a checkpoint.

    The first start's `--load`, `--finetune`, `--ckpt-step` and `--no-load-*` have had their effect by then.
    """
    save, count = config.checkpoint.save, int(env.get(RESTARTS, "0"))
    if not count or save is None or latest_iteration(Path(save)) is None:
        return config
    first_start = {"ckpt_step": None, "finetune": False, "no_load_optim": False, "no_load_rng": False}
    return config.replace(load=save, **first_start)
