"""Messages between the stages of a pipeline: hidden states forward, their gradients backward, in the compute dtype.

A message is a whole hidden state of one microbatch, `[T, hidden]` of this rank's tokens, BF16 under `--bf16` whatever
the recipe: 2 T h bytes a stage border and direction, against the 24 T h^2 FLOPs of each layer in forward. Sends
never block; when receives are posted is said by `receives`.

gloo tells messages apart by their tag. NCCL has no tags and runs the messages of a communicator in the order in which
they were posted, sends and receives alike. So messages that could overtake each other go through groups of their own:
by direction, and whether they go around from the last rank to the first. These groups carry nothing else, and are
connected when they are made: a connection waits for the other side and for the device, which must not happen while
other messages are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megafp8.parallel import Axis


@dataclass(frozen=True)
class Message:
    """The output of `stage` (forward) or the gradient of its output, of one microbatch."""

    forward: bool
    stage: int
    microbatch: int

    def ends(self, ranks: int) -> tuple[int, int]:
        """The pipeline ranks that it comes from and goes to: stage s runs on rank s % ranks."""
        here, there = self.stage % ranks, (self.stage + 1) % ranks
        return (here, there) if self.forward else (there, here)

    def wraps(self, ranks: int) -> bool:
        """Whether it goes around, between the last rank and the first."""
        return (self.stage + 1) % ranks == 0

    def tag(self, microbatches: int) -> int:
        return (2 * self.stage + self.forward) * microbatches + self.microbatch

    def __str__(self) -> str:
        what = "hidden states" if self.forward else "gradient"
        return f"{what} of microbatch {self.microbatch} after stage {self.stage}"


class LostStageError(RuntimeError):
    """A neighbour in the pipeline is gone."""


@dataclass
class Links:
    """This rank's place between its neighbours: a message goes one rank on or back.

    groups: (forward, wraps) -> process group, where they must differ; otherwise the axis's own.
    """

    axis: Axis
    microbatches: int
    groups: dict[tuple[bool, bool], ProcessGroup] = field(default_factory=dict)
    _sent: list[tuple[Work, Tensor, Message]] = field(default_factory=list)

    def send(self, message: Message, x: Tensor, at_most: int | None = None) -> None:
        """Starts sending; `x` must not be written to. at_most: waits while more messages than that are on their way."""
        peer, group = self._peer(message, sending=True)
        x = x.contiguous()
        tag = self._tag(message)
        work = _guarded(lambda: self.axis.post_send(x, peer, group, tag), message, peer, "can't send")
        self._sent = [entry for entry in self._sent if not entry[0].is_completed()]
        self._sent.append((work, x, message))
        if at_most is not None:
            self._wait_until(at_most)

    def post_receive(self, message: Message, x: Tensor) -> Callable[[], Tensor]:
        """Starts receiving into `x`; returns a function that waits and gives it."""
        peer, group = self._peer(message, sending=False)
        work = _guarded(lambda: self.axis.post_receive(x, peer, group, self._tag(message)), message, peer, "waits for")

        def arrive() -> Tensor:
            _guarded(work.wait, message, peer, "waits for")
            return x

        return arrive

    def finish(self) -> None:
        """Waits until everything sent has been taken."""
        self._wait_until(0)

    def _wait_until(self, left: int) -> None:
        """Waits for the oldest sends until so many are left."""
        while len(self._sent) > left:
            work, _, message = self._sent.pop(0)
            _guarded(work.wait, message, self._peer(message, sending=True)[0], "can't send")

    def _tag(self, message: Message) -> int:
        return message.tag(self.microbatches)

    def _peer(self, message: Message, *, sending: bool) -> tuple[int, ProcessGroup | None]:
        """The other side's rank in the job, and the group to use."""
        source, target = message.ends(self.axis.size)
        assert self.axis.rank == (source if sending else target), (message, self.axis)
        group = self.groups.get((message.forward, message.wraps(self.axis.size)), self.axis.group)
        return dist.get_global_rank(group, target if sending else source), group


def _guarded(action, message: Message, peer: int, doing: str):
    try:
        return action()
    except RuntimeError as error:
        raise LostStageError(
            f"{doing} the {message}, and rank {peer} is gone or silent; its own error says why ({error})"
        ) from error


def message_groups(axis: Axis, chunks: int, timeout: timedelta) -> dict[tuple[bool, bool], ProcessGroup]:
    """The groups that `Links` needs beside the axis's own: none on gloo. Every rank of the job calls it, while nothing
    is on its way."""
    if axis.size == 1 or dist.get_backend(axis.group) != "nccl":
        return {}
    groups = groups_by_direction(axis, chunks, timeout)
    torch.cuda.synchronize()
    connect(axis, groups, torch.device("cuda"))
    torch.cuda.synchronize()
    return groups


def groups_by_direction(axis: Axis, chunks: int, timeout: timedelta) -> dict[tuple[bool, bool], ProcessGroup]:
    """New groups of the axis's ranks: (forward, wraps) -> group, for all that stages of `chunks` a rank send.

    Every rank of the job makes the groups of all pipelines, so that they are numbered alike. Groups named after their
    ranks, which only those have to make, would have old names when made again, and NCCL find the address of a
    communicator that is gone.
    """
    world = dist.get_world_size()
    pipelines = world // axis.size  # a pipeline's ranks are that far from each other
    found = {}
    for forward in (True, False):
        for wraps in (False, True) if chunks > 1 else (False,):
            groups = [dist.new_group(list(range(i, world, pipelines)), timeout=timeout) for i in range(pipelines)]
            found[forward, wraps] = groups[dist.get_rank() % pipelines]
    return found


def connect(axis: Axis, groups: Mapping[tuple[bool, bool], ProcessGroup], device: torch.device) -> None:
    """Sends a number along every link, one link of a rank after the other, all ranks in the same order."""
    x = torch.zeros(1, device=device)
    for (forward, wraps), group in groups.items():
        for source, target in _borders(axis.size, forward=forward, wraps=wraps):
            here, there = (dist.get_global_rank(axis.group, rank) for rank in (source, target))
            if axis.rank == source:
                dist.isend(x, there, group=group).wait()
            elif axis.rank == target:
                dist.irecv(x, here, group=group).wait()


def _borders(ranks: int, *, forward: bool, wraps: bool) -> Iterator[tuple[int, int]]:
    """(from, to) of neighbours, those first that are no neighbours of each other: they connect at the same time."""
    before = [ranks - 1] if wraps else [*range(0, ranks - 1, 2), *range(1, ranks - 1, 2)]
    for rank in before:
        after = (rank + 1) % ranks
        yield (rank, after) if forward else (after, rank)
