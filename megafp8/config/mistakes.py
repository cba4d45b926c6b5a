"""A user's mistake on stderr: one line, once, though all processes of a job have made it."""

import os
import sys
import zlib


def say_mistake(line: str) -> None:
    """Prints it, unless another process does.

    Before a process has joined the job, a mistake is one of flags and files, which all processes of a machine share:
    the first of each machine tells it. Then the first of those that tell the same does: the job's store counts them.
    """
    if _is_first(line):
        print(line, file=sys.stderr, flush=True)


def _is_first(line: str) -> bool:
    distributed = sys.modules.get("torch.distributed")  # a mistake in flags is told before torch is loaded
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    # torchrun's store may outlive processes that it starts again.
    key = f"mistake/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{zlib.crc32(line.encode())}"
    try:
        return distributed.distributed_c10d._get_default_store().add(key, 1) == 1
    except Exception:  # whatever a store raises whose process has ended: said twice is better than not at all
        return True
