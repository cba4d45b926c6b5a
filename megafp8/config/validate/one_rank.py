"""What a rank that is alone (`--fake-process-group`) can't do, or what would mean nothing there."""

from megafp8.config.config import Config, flag_of
from megafp8.config.validate.limits import plain

FLAG = "--fake-process-group"
REFUSED = {
    "save": "what one rank alone computes is no model",
    "load": "one rank alone starts from random weights",
    "log_dir": "no number of such a run means anything; the report goes to the console",
    "tensorboard_dir": "no number of such a run means anything; the report goes to the console",
    "skip_train": "it measures training",
    "profile": "the report is all that it writes",
    "timing_log_level": "the report is all that it writes",
    "record_memory_history": "the report is all that it writes",
    "fp8_monitor_interval": "the values that it sees mean nothing",
    "fp8_fallback_after": "the values that it sees mean nothing",
    "fp8_fallback_sqnr": "the values that it sees mean nothing",
}
"""Field -> why not."""


def alone(c: Config) -> str | None:
    p = c.parallel
    if not p.fake_process_group:
        return None
    for name, why in REFUSED.items():
        if c.is_given(name) and c.value(name):
            shown = flag_of(name) if c.value(name) is True else f"{flag_of(name)} {plain(c.value(name))}"
            return f"{shown} with {FLAG}: {why}; leave it out"
    if p.world_size == 1:
        return f"{FLAG} with one process: set WORLD_SIZE, and RANK, in the environment to those of the job"
    if p.moe_token_dispatcher_type == "flex" and p.expert_model_parallel_size > 1:
        return f"{FLAG} with --moe-token-dispatcher-type flex: the library needs the other ranks; use alltoall"
    return None
