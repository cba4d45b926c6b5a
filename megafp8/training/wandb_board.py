"""A run in Weights & Biases: the numbers that TensorBoard gets, under the same tags.

Points are placed by their iteration and not by W&B's own step, which only grows: validation lines come between training
lines, and after a resume iterations are logged again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megafp8.config import Config
from megafp8.config.publish import publish
from megafp8.parallel import ParallelContext

RUN_ID_FILE = "wandb_run_id"
MOST_BINS = 512
"""Of a histogram in W&B."""
_log = logging.getLogger(__name__)


def wandb_directory(config: Config) -> Path:
    """Where W&B keeps its files: `--wandb-save-dir`, else `--log-dir`, else (as in Megatron-LM) `wandb` in `--save`."""
    log, save = config.logging, config.checkpoint.save
    if log.wandb_save_dir or log.log_dir:
        return Path(log.wandb_save_dir or log.log_dir)
    return Path(save) / "wandb"


class WandbBoard:
    """What `RunLog` uses of a TensorBoard writer, on W&B: numbers of one iteration are sent together."""

    def __init__(self, run: Any) -> None:
        """run: what `wandb.init` returned."""
        self._run, self._step, self._row = run, None, {}
        run.define_metric("iteration", hidden=True)
        run.define_metric("*", step_metric="iteration")

    @staticmethod
    def open(config: Config, first_iteration: int, parallel: ParallelContext) -> WandbBoard | None:
        """The first rank's board; None on others, and without `--wandb-project`. Every rank calls it.

        A run that goes on from a checkpoint goes on in W&B, too: its id lies in `--log-dir`, or beside W&B's files.
        Raises ValueError, in one line and on every rank, when W&B refuses.
        """
        if not config.logging.wandb_project:
            return None
        board, refusal = None, ""
        if parallel.is_first:
            try:
                board = WandbBoard._begin(config, first_iteration)
            except ValueError as error:
                refusal = str(error)
        if told := parallel.everyone.exchange(refusal)[0]:
            raise ValueError(told)
        return board

    @staticmethod
    def _begin(config: Config, first_iteration: int) -> WandbBoard:
        import wandb

        directory = wandb_directory(config)
        directory.mkdir(parents=True, exist_ok=True)
        kept = Path(config.logging.log_dir or directory) / RUN_ID_FILE
        known = kept.read_text(encoding="utf-8").strip() if first_iteration and kept.is_file() else ""
        name = known or secrets.token_hex(4)
        try:
            run = wandb.init(
                project=config.logging.wandb_project,
                name=config.logging.wandb_exp_name,
                entity=config.logging.wandb_entity or None,
                dir=str(directory),
                config=config.to_dict()["config"],
                id=name,
                resume="allow",
            )
        except (wandb.Error, OSError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"--wandb-project {config.logging.wandb_project}: W&B refuses ({reason}); log in with `wandb login`, "
                "set WANDB_MODE=offline, or leave the flag out"
            ) from None
        publish(kept, name + "\n")
        return WandbBoard(run)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._at(step)[tag] = value

    def add_histogram_raw(
        self, tag: str, *, min: float, bucket_limits: list[float], bucket_counts: list[int], global_step: int, **_: Any
    ) -> None:
        """As `SummaryWriter`'s; one with more bins than W&B takes is left out."""
        if len(bucket_counts) <= MOST_BINS:
            import wandb

            self._at(global_step)[tag] = wandb.Histogram(np_histogram=(bucket_counts, [min, *bucket_limits]))

    def _at(self, step: int) -> dict[str, Any]:
        """The numbers of an iteration; those of the one before are sent."""
        if step != self._step:
            self._send()
            self._step = step
        return self._row

    def _send(self) -> None:
        row, self._row = self._row, {}
        if row and self._run is not None:
            self._guarded(self._run.log, {"iteration": self._step, **row})

    def _guarded(self, call: Callable, *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - whatever ails W&B is no reason to end a training run
            self._run = None
            _log.warning("W&B takes no more numbers: %s", error)

    def close(self) -> None:
        self._send()
        run, self._run = self._run, None
        if run is not None:
            self._guarded(run.finish)
