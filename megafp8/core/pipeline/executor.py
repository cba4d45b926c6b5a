"""Runs one rank's list of actions of a schedule: the only loop over microbatches, in a pipeline and without one.

The executor knows nothing of models: a chunk is a function of the microbatch's number and the hidden states that came
from the stage before. It keeps what autograd needs between a microbatch's forward and backward: the input, and the
edge of the graph that made the output. The output itself is dropped when it has been sent.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megafp8.core.pipeline.p2p import Links, Message
from megafp8.core.pipeline.receives import Plan, awaited, one_ahead, produced
from megafp8.core.pipeline.schedules import Action, Kind, Schedule
from megafp8.core.pipeline.wgrad_queue import WgradQueue
from megafp8.step import Spans, no_spans


class Forward(Protocol):
    """Runs a chunk of the model on a microbatch.

    hidden: from the stage before, None on the first. Returns the hidden states for the next stage, or on the last the
    loss, a scalar; both with their graph in training.
    """

    def __call__(self, chunk: int, microbatch: int, hidden: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class HiddenStates:
    """What travels between stages. shape: [T, hidden] of a microbatch, from its number."""

    shape: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device


@dataclass
class _Held:
    """Between forward and backward."""

    hidden: Tensor | None
    output: GradientEdge


@dataclass
class Executor:
    """rank, links: this rank's place. wgrads: where the steps of a schedule that defers leave weight gradients.

    receives: when receives are posted, `one_ahead` or `once_sent`.
    ran: the actions in the order in which they ran, for tests and traces. spans: told of each backward, deferred
    weight gradient and wait for a message.
    """

    schedule: Schedule
    rank: int
    links: Links
    states: HiddenStates
    wgrads: WgradQueue
    spans: Spans = no_spans
    receives: Callable[[Schedule, int], Plan] = one_ahead
    ran: list[Action] = field(default_factory=list)
    _held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    _arriving: dict[Message, Callable[[], Tensor]] = field(default_factory=dict)
    _leaving: tuple[Message, Tensor, int | None] | None = None

    def run(self, forward: Forward, *, release: Callable[[int], None] = lambda microbatch: None) -> None:
        """Runs all actions. release: called when no chunk of this rank needs a microbatch's data again.

        An exception says at which stage and action it happened.
        """
        actions, receives = self.schedule.actions[self.rank], self.receives(self.schedule, self.rank)
        last_use = {action.microbatch: place for place, action in enumerate(actions)}
        for place, action in enumerate(actions):
            try:
                self._post(receives[place])
                self._run(action, forward)
            except Exception as error:
                error.add_note(self._where(action))
                raise
            self.ran.append(action)
            if last_use[action.microbatch] == place:
                release(action.microbatch)
        self._post(())
        self.links.finish()
        assert not self._held, "a forward without its backward"
        assert not self._arriving, "a message that nobody took"
        assert not len(self.wgrads), "weight gradients that nobody ran"

    def _where(self, action: Action) -> str:
        stage = self.schedule.stage(self.rank, action.chunk)
        return (
            f"pipeline stage {stage} of {self.schedule.stages} (pipeline rank {self.rank} of {self.schedule.ranks}), "
            f"{action.kind.name.lower()} of microbatch {action.microbatch}, schedule {self.schedule.name}"
        )

    def _run(self, action: Action, forward: Forward) -> None:
        if action.kind is Kind.FORWARD:
            self._forward(action, forward)
        elif action.kind is Kind.WEIGHT:
            with self._span("wgrad-compute", action):
                self.wgrads.run(action.chunk, action.microbatch)
        else:
            self._backward(action)

    def _forward(self, action: Action, forward: Forward) -> None:
        chunk, number = action.chunk, action.microbatch
        hidden = self._receive(action)
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()
        output = forward(chunk, number, hidden)
        if torch.is_grad_enabled():
            self._held[chunk, number] = _Held(hidden, get_gradient_edge(output))
        message = produced(self.schedule, self.rank, action)
        if message is not None:
            # Without backwards nothing holds the first stages back. A round's messages: no rank waits for one that
            # its receiver, still in the round before, could not take.
            at_most = None if torch.is_grad_enabled() else self.schedule.stages
            self._leaving = (message, output.detach(), at_most)

    def _backward(self, action: Action) -> None:
        held = self._held.pop((action.chunk, action.microbatch))
        grad = self._receive(action)
        with self._span("backward-compute", action):
            torch.autograd.backward((held.output,), (self._one() if grad is None else grad,))
        message = produced(self.schedule, self.rank, action)
        if message is not None:
            self._leaving = (message, held.hidden.grad, None)

    def _one(self) -> Tensor:
        """The gradient of the loss."""
        return torch.ones((), device=self.states.device)

    def _post(self, receives: tuple[Message, ...]) -> None:
        """Between two actions: starts to send what the last one has left, then to receive.

        Buffers come first: memory may have to be allocated, which can wait for all that is on its way.
        """
        states = self.states
        buffers = [torch.empty(states.shape(m.microbatch), dtype=states.dtype, device=states.device) for m in receives]
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            self.links.send(*leaving)
        for message, x in zip(receives, buffers, strict=True):
            self._arriving[message] = self.links.post_receive(message, x)

    def _receive(self, action: Action) -> Tensor | None:
        message = awaited(self.schedule, self.rank, action)
        if message is None:
            return None
        with self._span("forward-recv" if message.forward else "backward-recv", action):
            return self._arriving.pop(message)()

    def _span(self, name: str, action: Action) -> AbstractContextManager:
        stage = self.schedule.stage(self.rank, action.chunk)
        return self.spans(name, f"microbatch {action.microbatch} stage {stage}")
