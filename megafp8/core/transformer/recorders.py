"""What records launches and replays them: CUDA graphs, and where there are none, calling again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch

from megafp8.meter import Meter

Run = Callable[[], object]


class Recorder(Protocol):
    """Records what is launched. One is for graphs that are replayed in the order in which they were recorded.

    Of messages between ranks a meter counts what is sent: not by what is only recorded, but by each replay.
    """

    def warm_up(self, run: Run) -> None:
        """Runs what will be recorded, so that kernels are loaded and libraries have what they need."""
        ...

    def record(self, run: Run) -> Run:
        """Returns what launches again what `run` does; `run` itself leaves its results only where it always does."""
        ...

    @property
    def held_bytes(self) -> int | None:
        """Of the pool, which nobody else can use; None: it records nothing."""
        ...

    def release(self) -> None:
        """Waits for what was replayed, and frees it all: nothing may be replayed after that."""
        ...


class CallAgain:
    """For devices without graphs: recording and replaying is calling."""

    held_bytes = None

    def __init__(self, device: torch.device, meter: Meter | None = None) -> None:
        pass  # calls count what they send

    def warm_up(self, run: Run) -> None:
        run()

    def record(self, run: Run) -> Run:
        run()
        return run

    def release(self) -> None:
        pass


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps the workspaces of every stream it has seen (66 MiB each on Hopper)."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """CUDA graphs on a stream that is not the training's, in a pool of their own.

    NCCL's messages are recorded with the rest: each leaves for its communicator's stream and is waited for, so in a
    graph it is a node between those of the work around it. Its communicator must be there, as it is after the warm-up,
    and is destroyed after the graphs: NCCL waits for that.
    """

    def __init__(self, device: torch.device, meter: Meter | None = None) -> None:
        self._device, self._stream, self._meter = device, _stream(device), meter or Meter()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._before = torch.cuda.memory_reserved(device)

    def warm_up(self, run: Run) -> None:
        gc.collect()  # graphs of before, and what autograd left
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(self._device)

    def record(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        # Other threads (those that load data, NCCL's watchdog) may do what a capture's own thread must not.
        mode = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with self._meter.aside() as sent, torch.cuda.graph(graph, **mode):
            run()
        self._graphs.append(graph)
        if not sent.messages:
            return graph.replay

        def replay() -> None:
            self._meter.include(sent)
            graph.replay()

        return replay

    @property
    def held_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device) - self._before

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()  # whoever else still knows of it
        self._graphs = []


def recorder_on(device: torch.device, meter: Meter | None = None) -> Recorder:
    """meter: counts this rank's messages, if anything does."""
    return CudaGraphs(device, meter) if device.type == "cuda" else CallAgain(device, meter)
