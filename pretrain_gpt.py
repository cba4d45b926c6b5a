#!/usr/bin/env python3
"""Pretrains a GPT model: flags -> configuration -> model, data, optimizer -> training.

    python pretrain_gpt.py --num-layers 4 --hidden-size 256 ... --bf16 --fp8-format e4m3 --fp8-recipe blockwise
    torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --sequence-parallel ...

`--help` explains the flags, `--dry-run` shows what a command line would run. Exit codes: 0 the run ended as it
should, 1 an error, or the last checkpoint could not be saved, 2 a mistake in the flags or files, 128 + N a signal N
ended it (after a save); 16, 17 and 18 a suspicious result or a job that hung (docs/trust.md), 19 no memory was left
(docs/working_day.md).
"""

from __future__ import annotations

import logging
import signal
import sys
from importlib.util import find_spec

from megafp8.config import Config, parse_args
from megafp8.config.mistakes import say_mistake


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    if find_spec("torch") is None:
        return mistake(ValueError(f"{sys.executable} has no torch; make venv, then source .venv/bin/activate"))
    try:
        config = parse_args(argv)
        # Imported after the flags are checked: a mistake is told before torch takes its seconds to load.
        if config.train.dry_run:
            from megafp8.parallel import ParallelContext
            from megafp8.plan.summary import dry_run
            from megafp8.training.going_on import going_on

            print(dry_run(going_on(config, ParallelContext())))
            return 0
    except ValueError as error:
        return mistake(error)
    from torch.distributed.elastic.multiprocessing.errors import record

    from megafp8.training.signals import ignored

    with ignored(signal.SIGUSR2):  # until the run can tell of its memory, and once it is over
        return record(train)(config)  # so that torchrun's last lines show the error of the rank that failed first


def train(config: Config) -> int:
    from megafp8.parallel import abandon_parallel, build_parallel, close_parallel
    from megafp8.training.build import build_parts, pick_device
    from megafp8.training.memory_watch import record_history
    from megafp8.training.restart import restarted
    from megafp8.training.trainer import Trainer

    try:
        if config.parallel.fake_process_group:
            from megafp8.training.one_rank import one_rank

            print("\n".join(one_rank(config, pick_device(config.train.device))))
            return 0
        config = restarted(config)
        device = pick_device(config.train.device)
        record_history(config, device)
        parallel = build_parallel(config, device)
        trainer = Trainer(build_parts(config, parallel, device))
    except ValueError as error:
        code = mistake(error)
        abandon_parallel()
        return code
    code = trainer.run()
    close_parallel(parallel)
    return code


def mistake(error: ValueError) -> int:
    say_mistake(f"pretrain_gpt.py: error: {error}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
