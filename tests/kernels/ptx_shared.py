"""Shared memory of the PTX emulator, with a log that tells races.

An access that touches bytes which another warp has touched since the last barrier, one of the two writing, is a race.
"""

from __future__ import annotations

import numpy as np

SEVERAL, ATOMIC = -2, -3  # in place of a warp's number


class SharedMemory:
    """Bytes of several programs, one after another, and who touched each of them last since which barrier."""

    def __init__(self, size: int, programs: int, warps: np.ndarray) -> None:
        self.size, self.warps, self.epoch = size, warps, 0
        self.data = np.random.default_rng(size).integers(0, 256, size * programs, dtype=np.uint8)
        # [epoch, warp] of the last access
        self.written, self.read = (np.full((2, size * programs), -1) for _ in range(2))

    def of(self, programs: np.ndarray, warps: np.ndarray) -> SharedMemory:
        """A copy for some of the programs."""
        part = SharedMemory.__new__(SharedMemory)
        part.size, part.warps, part.epoch = self.size, warps, self.epoch
        part.data = self.data.reshape(-1, self.size)[programs].ravel()
        part.written, part.read = (
            log.reshape(2, -1, self.size)[:, programs].reshape(2, -1) for log in (self.written, self.read)
        )
        return part

    def note(self, index: np.ndarray, active: np.ndarray, writes: bool) -> None:
        warp = np.broadcast_to(self.warps[active][:, None], index.shape)
        for (epoch, toucher), kind in ((self.written, "write"), (self.read, "read")):
            if (writes or kind == "write") and ((epoch[index] == self.epoch) & (toucher[index] != warp)).any():
                raise AssertionError(f"race: shared memory after a {kind} by another warp, no barrier between")
        (epoch, toucher) = self.written if writes else self.read
        others = (epoch[index] == self.epoch) & (toucher[index] != warp)
        epoch[index], toucher[index] = self.epoch, warp
        others |= toucher[index] != warp  # in this very access
        toucher[index[others]] = SEVERAL

    def write(self, index: np.ndarray, active: np.ndarray, data: np.ndarray) -> None:
        """Several warps may write the same bytes at once: compilers do so with what all of them hold."""
        self.note(index, active, writes=True)
        self.data[index] = data
        if (self.data[index] != data).any():
            raise AssertionError("race: several threads write to the same shared memory, no barrier between")

    def note_atomics(self, index: np.ndarray, active: np.ndarray) -> None:
        """Warps may add to the same bytes at once; whoever reads them otherwise, or wrote them, needs a barrier."""
        warp = np.broadcast_to(self.warps[active][:, None], index.shape)
        for epoch, toucher in (self.written, self.read):
            if ((epoch[index] == self.epoch) & (toucher[index] != warp) & (toucher[index] != ATOMIC)).any():
                raise AssertionError("race: an atomic to shared memory that another warp touches, no barrier between")
        self.written[0][index], self.written[1][index] = self.epoch, ATOMIC
