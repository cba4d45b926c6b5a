"""How the global batch grows: `--rampup-batch-size START INCREMENT SAMPLES`, as in Megatron-LM.

The batch starts at START and grows by INCREMENT at equal distances of SAMPLES / steps consumed samples, so that it is
`--global-batch-size` once SAMPLES are consumed. A pure function of the consumed samples: a resume restores no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megafp8.config.train import TrainConfig


@dataclass(frozen=True)
class BatchSize:
    """final: samples of a step after the ramp. start, increment, samples: of the ramp; samples 0 is none."""

    final: int
    start: int = 0
    increment: int = 1
    samples: int = 0

    @staticmethod
    def of(train: TrainConfig) -> BatchSize:
        return BatchSize(train.global_batch_size, *(train.rampup_batch_size or ()))

    def at(self, consumed_samples: int) -> int:
        """Samples of the step that comes after `consumed_samples` samples."""
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
