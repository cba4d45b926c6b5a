"""In what form tokens travel to experts on other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.fp8.quantizer import Quantizer


@dataclass(frozen=True)
class Wire:
    """What travels in FP8, each row once quantized, its scales behind it; None: in the compute dtype.

    tokens: to the experts. gradients: of the experts' outputs, in backward. What comes back from the experts, and the
    gradient of what went to them, are always in the compute dtype.
    """

    tokens: Quantizer | None = None
    gradients: Quantizer | None = None
