#!/usr/bin/env python3
"""The variables that selftest_nccl.sh takes, as flags of selftest_nccl.py; a mistake is told as it was typed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from selftest_nccl import CASES, PARTS, RECIPES, check_gpus, check_parts

from megafp8.config.mistakes import say_mistake

LISTS = {"PARTS": PARTS, "RECIPES": RECIPES, "CASES": CASES}
NUMBERS = {"GPUS": int, "JOBS": int, "SECONDS_AT_MOST": float, "CHECK_SECONDS": float}
FLAGS = {"SECONDS_AT_MOST": "--seconds"}
"""Where the flag has another name."""
DEVICES = ("cuda", "cpu")


def as_variable(name: str, value: object = "") -> str:
    text = str(value)
    return name.upper() + (f'="{text}"' if " " in text else f"={text}" if text else "")


def read(env: Mapping[str, str]) -> dict[str, str | list[str] | int | float]:
    """Variable -> what it says, of those that are set and not empty. Raises ValueError."""
    found = {}
    for name, choices in LISTS.items():
        found[name] = env.get(name, "").split()
        for word in found[name]:
            if word not in choices:
                raise ValueError(f"{as_variable(name, env[name])}: no {word!r} there; give some of {' '.join(choices)}")
    for name, kind in NUMBERS.items():
        try:
            found[name] = kind(env[name]) if env.get(name) else None
        except ValueError:
            found[name] = 0
        if found[name] is not None and not found[name] >= 1:
            raise ValueError(f"{as_variable(name, env[name])}: give a number, 1 or more")
    found["DEVICE"] = env.get("DEVICE") or DEVICES[0]
    if found["DEVICE"] not in DEVICES:
        raise ValueError(f"{as_variable('DEVICE', found['DEVICE'])}: give {' or '.join(DEVICES)}")
    return {name: value for name, value in found.items() if value}


def flags(env: Mapping[str, str]) -> list[str]:
    """Flags of selftest_nccl.py. Raises ValueError."""
    import torch

    found = read(env)
    found.setdefault("GPUS", torch.cuda.device_count() or 2)
    check_parts(found.get("PARTS", PARTS), found.get("CASES"), found["GPUS"], as_variable)
    check_gpus(found["DEVICE"], found["GPUS"], as_variable)
    words = []
    for name, value in found.items():
        words.append(FLAGS.get(name, f"--{name.lower().replace('_', '-')}"))
        words += value if isinstance(value, list) else [str(value)]
    return words


def main() -> int:
    try:
        print(*flags(os.environ))
    except ValueError as error:
        say_mistake(f"selftest_nccl: error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
