"""Precision of masters and moments: what each choice stores, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass

MASTERS = {"fp32": 4.0, "remainder": 2.0}
"""Bytes a parameter; `remainder`: 16 bits beside the BF16 weight, whose bits are the master's upper half."""
MOMENTS = {"fp32": 4.0, "bf16": 2.0, "fp8": 1 + 5 / 64}
"""Bytes a parameter; `fp8` has an FP32 amax and a byte for each block of 64."""


@dataclass(frozen=True, order=True)
class Precision:
    """How a parameter's master and moments are stored. Keys of `MASTERS` and `MOMENTS`."""

    master: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"

    @property
    def master_bytes(self) -> float:
        """A parameter; the weight is not counted, also where a remainder lies beside it."""
        return MASTERS[self.master]

    @property
    def moment_bytes(self) -> float:
        """A parameter, both moments."""
        return MOMENTS[self.exp_avg] + MOMENTS[self.exp_avg_sq]


FP32_STATE = Precision()
"""The safe choice, and the default."""
