"""What a resumed run takes from its checkpoint before anything is built: which linears are too small for FP8.

They follow from sizes, which another microbatch or layout changes, and from a table that a later version may replace;
a run's numerics must not. Checkpoints of before the flag have none: all that their recipe covers stays in FP8.
"""

from __future__ import annotations

import dataclasses

from megafp8.checkpoint import Found, find_together
from megafp8.config import Config, FP8Config
from megafp8.config.crossover import FLAG
from megafp8.parallel import ParallelContext


def going_on(config: Config, parallel: ParallelContext) -> Config:
    """The configuration with the choices of the run that it resumes. Every rank calls it.

    Not where the flag is given, nor for what starts anew (--finetune) or in another recipe: flags decide there.
    """
    checkpoint = config.checkpoint
    if not config.fp8.enabled or checkpoint.load is None or checkpoint.finetune or config.is_given("fp8_small_linears"):
        return config
    found = find_together(parallel, checkpoint.load, checkpoint.ckpt_step, fallback=checkpoint.load_fallback)
    saved = found and _saved(found)
    if saved is None or saved.fp8_recipe != config.fp8.fp8_recipe:
        return config
    theirs = saved.small_linears_in_bf16
    again = [part for part in config.fp8.small_linears_in_bf16 if part not in theirs]
    goes_on = config.replace(fp8_small_linears=saved.fp8_small_linears, small_linears_in_bf16=theirs)
    note = f"{', '.join(again)} in FP8, as in the checkpoint ({FLAG} decides anew)"
    return dataclasses.replace(goes_on, notes=(*config.notes, note)) if again else goes_on


def _saved(found: Found) -> FP8Config | None:
    """None where run.json holds no run's arguments: loading tells."""
    try:
        return Config.from_dict(found.metadata["args"]).fp8
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
