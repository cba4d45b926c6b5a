"""Global random states, under `rng/<rank>/`: of torch (CPU and this rank's GPU), NumPy and Python.

megafp8 draws its own random numbers from seeds that are functions of the step, so these matter to code that people
add. Each rank has names of its own: no rank can get another one's stream.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from megafp8.params import StateItem

PREFIX = "rng/"


class RandomState:
    """Owner of the process's random states."""

    def __init__(self, rank: int = 0):
        self._prefix = f"{PREFIX}{rank:05d}/"

    def seed(self, seed: int) -> None:
        """Starts all of them: the same flags give the same states, and each rank has others."""
        digest = hashlib.blake2b(f"{seed}/{self._prefix}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "little")
        random.seed(value)
        np.random.seed(value % 2**32)  # noqa: NPY002 (the global state is what is saved)
        torch.manual_seed(value >> 1)  # of the GPU too

    def state(self) -> dict[str, StateItem]:
        """Copies of the states as integer tensors."""
        tensors = {"torch": torch.get_rng_state(), "numpy": _numpy_state(), "python": _python_state()}
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        return {self._prefix + name: StateItem.whole(tensor) for name, tensor in tensors.items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `state()` gave; states that are not there (another device, another rank) stay."""
        setters = {"torch": torch.set_rng_state, "numpy": _set_numpy_state, "python": _set_python_state}
        if torch.cuda.is_available():
            setters["cuda"] = torch.cuda.set_rng_state
        for name, setter in setters.items():
            if self._prefix + name in tensors:
                setter(tensors[self._prefix + name])


def _bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _float(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def _numpy_state() -> Tensor:
    _, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 (the global state is what is saved)
    return torch.tensor([*keys.tolist(), position, has_gauss, _bits(gauss)])


def _set_numpy_state(state: Tensor) -> None:
    *keys, position, has_gauss, gauss = state.tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _float(gauss)))


def _python_state() -> Tensor:
    version, words, gauss = random.getstate()
    return torch.tensor([version, *words, gauss is not None, _bits(gauss or 0.0)])


def _set_python_state(state: Tensor) -> None:
    version, *words, has_gauss, gauss = state.tolist()
    random.setstate((version, tuple(words), _float(gauss) if has_gauss else None))
