"""The batches of one iteration: fetched as the stages ask for them, and kept so that the iteration can run again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megafp8.data import Batch
from megafp8.step import Spans, no_spans
from megafp8.training.timers import DATA


@dataclass
class IterationBatches:
    """This rank's microbatches of an iteration; every `iter()` gives them from the first one on.

    source: where they come from, shared with the iterations after. first_sample, samples: of the global batch, in the
    order of the training data. waited: seconds spent on waiting for data. at: told (iteration, phase) of each wait.
    spans: told of each as well.
    """

    iteration: int
    source: Iterator[Batch]
    count: int
    first_sample: int
    samples: int
    waited: float = 0.0
    at: Callable[[int, str], None] = lambda iteration, phase: None
    spans: Spans = no_spans
    _kept: list[Batch] = field(default_factory=list)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.count):
            if number == len(self._kept):
                begin = time.perf_counter()
                self.at(self.iteration, "data")
                with self.spans(DATA, f"microbatch {number}"):
                    self._kept.append(next(self.source))
                self.at(self.iteration, "forward and backward")
                self.waited += time.perf_counter() - begin
            yield self._kept[number]

    def sample_numbers(self, microbatch: int, dp_rank: int, dp_size: int) -> range:
        """The samples of one microbatch of a data-parallel rank, as `tools/inspect_data.py` counts them."""
        size = self.samples // (self.count * dp_size)
        start = self.first_sample + (microbatch * dp_size + dp_rank) * size
        return range(start, start + size)
