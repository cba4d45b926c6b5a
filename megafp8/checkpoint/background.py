"""Saving in the background: the state is copied to host memory, training goes on, a thread writes the copy.

Planning and publishing are collective and stay in the main thread, between two steps; the thread talks to nobody but
the disk. There is one copy and one save at a time. Host memory for it is taken once, before training starts, and kept:
taking page-locked memory costs more than copying into it, and a new buffer each time would show as a leak.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megafp8.checkpoint.directory import sweep
from megafp8.checkpoint.save import ONE_RANK, SaveJob, SavePlans
from megafp8.checkpoint.storage import CheckpointWriter
from megafp8.parallel import ParallelContext
from megafp8.params import StateItem

ALIGNMENT = 64
"""Bytes: of each tensor's place in the buffer."""
log = logging.getLogger(__name__)


class HostCopy:
    """Copies of tensors in one buffer of host memory: page-locked where they come from a GPU, so that the copy runs
    beside the CPU's work."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._done: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def reserve(self, nbytes: int) -> None:
        """Takes a buffer of so many bytes, unless there is one."""
        if self.nbytes >= nbytes:
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)  # gives the old one back first
        self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        if self._pinned:
            _lock_pages(self._buffer)
        else:
            self._buffer.zero_()  # has the pages there before they are needed

    @torch.no_grad()
    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies, which may be read after `wait()`; of GPU tensors in the order of the current stream."""
        starts, nbytes = places_in_buffer(tensors)
        self.reserve(nbytes)
        copies = []
        for start, tensor in zip(starts, tensors, strict=True):
            place = self._buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(place.copy_(tensor, non_blocking=True))
        if self._pinned:
            self._done = torch.cuda.Event()
            self._done.record()
        return copies

    def wait(self) -> None:
        """Until the copies are there; from any thread."""
        if self._done is not None:
            self._done.synchronize()


def places_in_buffer(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor starts in a buffer, and how long that must be; bytes."""
    starts, stop = [], 0
    for tensor in tensors:
        starts.append(stop)
        stop += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
    return starts, stop


def _lock_pages(buffer: Tensor) -> None:
    """Page-locks a tensor's memory as it is: torch's allocator of such memory would round it up to a power of two."""
    if buffer.numel() == 0:
        return
    runtime, address = torch.cuda.cudart(), buffer.data_ptr()
    error = int(runtime.cudaHostRegister(address, buffer.numel(), 0))
    if error:
        log.warning(
            "--async-save: %d bytes could not be page-locked (CUDA error %d): copies will stall training", error
        )
        return
    weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False


class BackgroundSaver:
    """Saves one checkpoint at a time while the run goes on. All ranks call `prepare`, `start` and `finish` alike."""

    def __init__(self, parallel: ParallelContext = ONE_RANK, device: torch.device | str = "cpu") -> None:
        self._plans = SavePlans(parallel)
        self._host = HostCopy(pinned=torch.device(device).type == "cuda")
        self._job: SaveJob | None = None
        self._thread: threading.Thread | None = None
        self._sweeper: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save was started that isn't finished; the same on every rank."""
        return self._job is not None

    @property
    def written(self) -> bool:
        """Whether this rank's files of it are on the disk, or have failed, so that `finish` waits for others alone."""
        return self._thread is None or not self._thread.is_alive()

    def prepare(self, items: Mapping[str, StateItem]) -> int:
        """Takes the host memory that a save of such items needs; returns it in bytes."""
        planned = self._plans.of(items)
        self._host.reserve(places_in_buffer([items[key].tensor for key in planned.keys])[1])
        return self._host.nbytes

    def start(self, writer: CheckpointWriter, items: Mapping[str, StateItem]) -> bool:
        """Copies the items and starts to write the copy; False on every rank when the disk refused (logged).

        The items may change as soon as this returns.
        """
        assert not self.busy, "finish the save before"
        if self._sweeper is not None:
            self._sweeper.join()
        job = SaveJob(writer, self._plans)
        if not job.plan(items, self._host.copy):
            return False
        self._job = job
        self._thread = threading.Thread(target=job.write, args=(self._host.wait,), name="checkpoint", daemon=True)
        self._thread.start()
        return True

    def finish(self) -> Path | None:
        """Waits until every rank has written, publishes, and returns what `SaveJob.finish` returns."""
        job, self._job = self._job, None
        self._thread.join()
        self._thread = None
        directory = job.finish()
        if job.superseded:  # no daemon: the end of the program waits for it
            self._sweeper = threading.Thread(target=sweep, args=(job.superseded,), name="sweep")
            self._sweeper.start()
        return directory
