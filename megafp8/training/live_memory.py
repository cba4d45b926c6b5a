"""What the memory of this rank holds now, by owner, in bytes: counted from the tensors themselves, each storage once.

Activations are what autograd's graph keeps for backward. The graph is walked from what the executor holds, and from
the frames of an error, so that a forward or backward that broke off in the middle counts too. A linear's function
knows its name; what lies between is named after the linear that reads it. Nothing that hooks put away is brought back:
what will be made again in backward is not there, and does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from megafp8.core.pipeline.executor import Executor
from megafp8.fp8.param import Weight
from megafp8.training.build import Parts

OWNERS = ("weights", "main gradients (fp32)", "master weights", "Adam moments", "FP8 copies of weights", "buffers")
"""Named as the plan names them (`plan.memory`)."""
COPIES = ("_owner", "_grouped")
"""Attributes of modules that hold FP8 copies: a linear's weight, and a layer's experts together."""
END = "the loss, or where it stopped"
AGAIN = "inputs of what is made again"
IN_HAND = "in hand where it stopped"


@dataclass
class LiveMemory:
    """owners: bytes by OWNERS. activations: by module, layers together. in_hand: of other tensors in the frames of the
    error. allocated: by PyTorch on a GPU, None on the CPU."""

    owners: dict[str, int]
    activations: dict[str, int] = field(default_factory=dict)
    in_hand: int = 0
    allocated: int | None = None

    @property
    def held(self) -> int:
        return sum(self.activations.values())

    @property
    def found(self) -> int:
        return sum(self.owners.values()) + self.held + self.in_hand


class _Storages:
    """Counts each storage once."""

    def __init__(self) -> None:
        self._seen: set[tuple[torch.device, int]] = set()

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages that were not counted before."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage.device, storage.data_ptr()
            if key not in self._seen and storage.nbytes():
                self._seen.add(key)
                total += storage.nbytes()
        return total


def live_memory(parts: Parts, error: BaseException | None = None) -> LiveMemory:
    """What is there now; after an `error`, also what its frames hold."""
    model, optimizer, storages = parts.model, parts.optimizer, _Storages()
    weights = list(model.parameters())
    copies = [vars(module).get(name) for module in model.modules() for name in COPIES]
    held = (
        [weights, [owner.primary for owner in copies if isinstance(owner, Weight)]],
        optimizer.grads.state,
        optimizer.masters,
        [optimizer.exp_avg, optimizer.exp_avg_sq],
        copies,
        [list(model.buffers()), parts.scaling],
    )
    owners = {name: storages.add(_tensors(what)) for name, what in zip(OWNERS, held, strict=True)}
    live = LiveMemory(owners)
    if error is not None:
        found = list(_frame_values(error.__traceback__))
        live.activations = graph_bytes((node for value in found for node in _nodes(value)), storages)
        live.in_hand = storages.add(tensor for value in found for tensor in _tensors(value, 2))
    if parts.device.type == "cuda":
        live.allocated = torch.cuda.memory_allocated(parts.device)
    return live


def graph_bytes(roots: Iterable[Node], storages: _Storages) -> dict[str, int]:
    """Bytes that the graph keeps, by module; each node once, from those that backward runs first."""
    sums: dict[str, int] = {}
    stack, seen = [(node, END) for node in roots], set()
    while stack:
        node, reader = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        own = _name_of(node)
        label = _all_layers(own) if own is not None else reader if reader == END else f"read by {_all_layers(reader)}"
        kept, again = _kept_by(node)
        if size := storages.add(kept):
            sums[label] = sums.get(label, 0) + size
        with suppress(RuntimeError):  # PyTorch 2.11: of a forward that an error has ended. Its inputs are in frames
            stack.extend((before, own or reader) for before, _ in node.next_functions)
        if size := storages.add(again):
            sums[AGAIN] = sums.get(AGAIN, 0) + size
    return sums


def _name_of(node: Node) -> str | None:
    """The name of the linear or embedding whose function a node is."""
    args = getattr(node, "args", None)
    spec = getattr(getattr(node, "weight", None), "spec", None)
    if names := getattr(args, "names", None):  # of a layer's experts
        return names[0]
    return getattr(args, "name", None) or (spec and spec.name.removesuffix(".weight"))


def _all_layers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)  # also of experts


def _kept_by(node: Node) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that a node saved, or that its function put on it; and the inputs of what will be made again."""
    tensors, again = list(_tensors(getattr(node, "__dict__", None), 2)), []
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with suppress(RuntimeError):  # its backward has run, or its forward is still running
                saved = getattr(node, name)
                for each in saved if isinstance(saved, tuple | list) else (saved,):
                    tensors += _put_away(each)
                    again += _inputs_again(getattr(each, "unpack_hook", None))
    return tensors, again


def _put_away(saved: object) -> Iterator[Tensor]:
    """What autograd saved, as hooks put it away: nothing is unpacked."""
    return _tensors(getattr(saved, "data", None))


def _inputs_again(hook: object) -> Iterator[Tensor]:
    """The inputs that `torch.utils.checkpoint` holds for a part that it runs again."""
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            part = cell.cell_contents
        except ValueError:  # empty
            continue
        for saved in getattr(part, "saved_args", None) or ():
            yield from _put_away(saved) if not isinstance(saved, Tensor) else (saved,)
        if isinstance(saver := getattr(part, "input_saver", None), Node):  # of earlier versions
            yield from _kept_by(saver)[0]


def _nodes(value: object, depth: int = 4) -> Iterator[Node]:
    """The graph's nodes that a value leads to."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, Tensor):
        if value.grad_fn is not None:
            yield value.grad_fn
    elif depth and (isinstance(value, Executor | GradientEdge | tuple | list | Mapping) or _is_held(value)):
        for part in _parts(value):
            yield from _nodes(part, depth - 1)


def _is_held(value: object) -> bool:
    return is_dataclass(value) and type(value).__module__ == Executor.__module__


def _tensors(value: object, depth: int = 6) -> Iterator[Tensor]:
    """The tensors in containers, dataclasses and this project's objects."""
    if isinstance(value, torch.nn.Parameter) or type(value) is Tensor:
        yield value
    elif isinstance(value, Tensor):  # bytes and scales of one that is quantized
        yield from _tensors(getattr(value, "quantized", None), depth)
    elif depth and not isinstance(value, torch.nn.Module | type):
        ours = str(getattr(type(value), "__module__", "")).split(".")[0] == "megafp8"  # a C type may have none
        if isinstance(value, tuple | list | Mapping) or ours:
            for part in _parts(value):
                yield from _tensors(part, depth - 1)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple | list):
        return value
    if is_dataclass(value):
        return [getattr(value, f.name, None) for f in fields(value)]
    return list(getattr(value, "__dict__", {}).values())


def _frame_values(traceback: TracebackType | None) -> Iterator[object]:
    while traceback is not None:
        yield from list(traceback.tb_frame.f_locals.values())
        traceback = traceback.tb_next
