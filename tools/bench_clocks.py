"""A GPU's clock and power while something is measured: a power limit lowers the clock, and with it every figure."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from threading import Event, Thread
from typing import Any

import torch

INTERVAL_S = 0.1


class Clocks:
    """A context manager that asks `nvidia-smi` again and again, on a thread of its own, and changes nothing.

    found: medians {sm_mhz, watts} and the number of samples; None where there is no `nvidia-smi`, or no answer.
    """

    def __init__(self, device: torch.device) -> None:
        self.found: dict[str, Any] | None = None
        self._command = _command(device)
        self._samples: list[tuple[float, float]] = []
        self._done = Event()
        self._thread = Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Clocks:
        if self._command:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        if self._command:
            self._thread.join()
        if self._samples:
            mhz, watts = (statistics.median(column) for column in zip(*self._samples, strict=True))
            self.found = {"sm_mhz": mhz, "watts": watts, "samples": len(self._samples)}

    def _sample(self) -> None:
        while not self._done.wait(INTERVAL_S):
            try:
                answer = subprocess.run(self._command, capture_output=True, text=True, timeout=10, check=True).stdout
                mhz, watts = (float(number) for number in answer.split(","))
            except (OSError, subprocess.SubprocessError, ValueError):
                return
            self._samples.append((mhz, watts))


def _command(device: torch.device) -> list[str]:
    """The question; empty where nobody can be asked."""
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        return []
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = [] if uuid is None else ["-i", f"GPU-{str(uuid).removeprefix('GPU-')}"]
    return ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", *which]
