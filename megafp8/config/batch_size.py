"""How the global batch changes, in a ramp or in steps: functions of the consumed samples, so a resume restores nothing.

`--rampup-batch-size START INCREMENT SAMPLES`, as in Megatron-LM: the batch starts at START and grows by INCREMENT at
equal distances of SAMPLES / steps consumed samples, so that it is `--global-batch-size` once SAMPLES are consumed.

`--step-batch-size-schedule "0:768 250B:1536"`, as in Megatron-LM: 768 samples at first, 1536 once 250 billion tokens
are consumed. Tokens are whole samples of `--seq-length`; K, M, B, T stand for 10^3, 10^6, 10^9, 10^12.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megafp8.config.train import TrainConfig

SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSize:
    """final: samples of a step in the end. start, increment, samples: of the ramp; samples 0 is none.

    steps: instead of a ramp, (consumed samples, samples of a step from there on), ascending.
    """

    final: int
    start: int = 0
    increment: int = 1
    samples: int = 0
    steps: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(train: TrainConfig) -> BatchSize:
        """Of a resolved configuration."""
        if train.batch_size_steps:
            steps = tuple(zip(train.batch_size_steps[::2], train.batch_size_steps[1::2], strict=True))
            return BatchSize(steps[-1][1], samples=steps[-1][0], steps=steps)
        return BatchSize(train.global_batch_size, *(train.rampup_batch_size or ()))

    def at(self, consumed_samples: int) -> int:
        """Samples of the step that comes after `consumed_samples` samples."""
        if self.steps:
            return max((start, size) for start, size in self.steps if start <= consumed_samples)[1]
        steps = (self.final - self.start) // self.increment
        if consumed_samples >= self.samples or steps == 0:
            return self.final
        return self.start + consumed_samples * steps // self.samples * self.increment

    def samples_of(self, iterations: int) -> int:
        """Samples that the first `iterations` steps consume."""
        consumed = 0
        while iterations > 0 and consumed < self.samples:
            consumed += self.at(consumed)
            iterations -= 1
        return consumed + iterations * self.final

    def iterations(self, total_samples: int) -> int:
        """Steps that it takes to consume at least `total_samples` samples from the start."""
        consumed = count = 0
        while consumed < min(self.samples, total_samples):
            consumed += self.at(consumed)
            count += 1
        return count + math.ceil(max(0, total_samples - consumed) / self.final)


def parse_steps(texts: Sequence[str], seq_length: int) -> tuple[tuple[int, int], ...]:
    """`("0:768 250B:1536",)` as (consumed samples, samples of a step).

    Raises ValueError for what is no such list, or doesn't begin at 0 and ascend.
    """
    steps = []
    for text in " ".join(texts).split():
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", text, re.ASCII)
        if match is None or int(match.group(3)) == 0:
            raise ValueError(f"{text} is no TOKENS:SAMPLES, such as 0:768 or 250B:1536")
        tokens = float(match.group(1)) * SUFFIXES[match.group(2)]
        steps.append((int(tokens) // seq_length, int(match.group(3))))
    if not steps or steps[0][0] != 0:
        raise ValueError("the first step must begin at 0 tokens")
    if any(a >= b for (a, _), (b, _) in zip(steps, steps[1:], strict=False)):
        raise ValueError(f"thresholds must ascend, by {seq_length} tokens (a sample) at least")
    return tuple(steps)
