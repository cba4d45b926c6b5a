"""The directories that a run writes to, tried out before it trains: a run must not learn after days that it can't."""

from __future__ import annotations

from megafp8.config import Config
from megafp8.config.config import flag_of
from megafp8.config.publish import writable_directory
from megafp8.parallel import ParallelContext


def check_places(config: Config, parallel: ParallelContext) -> None:
    """Makes `--save`, `--log-dir` and other logs' directories where they are missing, and writes a file there a moment.

    Every rank writes checkpoints, the first one logs. Raises ValueError with the flag of the first place that refuses:
    on every rank, whichever found it.
    """
    saves = () if config.train.skip_train else ("save",)
    logs = ("log_dir", "tensorboard_dir", "wandb_save_dir") if parallel.is_first else ()
    places = {name: config.value(name) for name in (*saves, *logs)}
    refused = [name for name, directory in places.items() if directory and not writable_directory(directory)]
    for names in parallel.everyone.exchange(refused):
        for name in names:
            raise ValueError(f"{flag_of(name)} {config.value(name)}: can't write there; give another directory")
