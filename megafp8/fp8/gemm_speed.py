"""Which backend is the fastest for a GEMM: looked up in a table of measurements, never measured while training.

`gemm_speed.json`, written by `tools/bench_gemm.py --write-table`: device name -> kind of GEMM -> list of
`[M, N, K, {backend: TFLOPS}]`. Kinds are those of `triton_gemm.kind`, with "+=" for a sum into an FP32 buffer. A GEMM
takes what won for the weight that is nearest in the logarithms of its sizes. The number of tokens has no say: a part of
the rows must be multiplied as the whole is. A win by less than `TIE` is none: two runs differ by as much, and at the
power limit, which these measurements keep away from and training does not, cuBLASLt loses less of its speed.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

TIE = 0.01
TABLE = Path(__file__).with_name("gemm_speed.json")


@cache
def table() -> dict[str, dict[str, list]]:
    return json.loads(TABLE.read_text())


@cache
def fastest(device: str, kind: str, weight: tuple[int, int], backends: tuple[str, ...]) -> str:
    """One of `backends` for a GEMM with a weight, or a weight's gradient, of two sizes; the first in a tie, or if none
    was measured.

    device: as `torch.cuda.get_device_name` says. Others go by the first device's figures.
    """
    kinds = table().get(device) or next(iter(table().values()), {})
    measured = [row for row in kinds.get(kind, []) if set(backends) <= set(row[3])]
    if len(backends) == 1 or not measured:
        return backends[0]

    def distance(row: list) -> float:
        sizes = row[:2] if kind.endswith("+=") else row[1:3]
        return sum((math.log2(ours) - math.log2(theirs)) ** 2 for ours, theirs in zip(weight, sizes, strict=True))

    tflops = min(measured, key=distance)[3]
    best = max(backends, key=tflops.__getitem__)
    return best if tflops[best] > tflops[backends[0]] * (1 + TIE) else backends[0]
