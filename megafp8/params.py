"""What the rest of the code needs to know of a parameter: its global name, shape, this rank's box, decay, init.

`core` attaches a `ParamSpec` to every parameter it makes (`param.spec`). Initialization, optimizer, gradient norm,
checkpoints, converters and the planner read it; nobody parses names or classes.

Same seed, same weights: `initial_value` depends on the seed and the global name alone. A parameter's global tensor is
cut into chunks of whole rows, each drawn from a generator seeded by (seed, name, chunk), so a rank draws only the
chunks that its box touches, in any layout, and padded vocabulary rows change nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 20
"""Smallest number of elements drawn from one generator; part of the definition of an initial value."""

DRAWING_THREADS = 8
"""Chunks that are drawn beside each other. The values don't depend on it; ranks may share their cores."""

Box = tuple[tuple[int, int], ...]
"""Half-open ranges `(start, stop)`, one a dimension of the global tensor."""


@dataclass(frozen=True)
class Init:
    """How a parameter starts: `normal` (mean 0, `std`), `zeros`, or `ones`."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class ParamSpec:
    """A parameter as the whole job sees it.

    name: global name, the same in every layout (layer and expert numbers are global).
    shape: logical global shape, without vocabulary padding. It may have more dimensions than the local tensor:
        SwiGLU's fc1 is `(2, ffn, hidden)`, so that a tensor-parallel cut of both halves is one box.
    box: the part of `shape` that this rank holds.
    local_shape: shape of the local tensor; more elements than the box only where dimension 0 is padded.
    replicated_over: names of the parallel axes over which every rank holds the same values ("tp", "cp", "dp", "pp").
    grad_sum_over: axes over which each rank's gradient is only a part (replicated parameters that see a shard of
        the tokens, e.g. norms under sequence parallelism), to be summed before use. Data parallelism is not listed.
    expert: belongs to an expert, so it is reduced over the expert-data-parallel group.
    decay: weight decay applies (matrices yes; norms, biases and other 1-D parameters no).
    stack: (name, number) of a parameter that is multiplied together with others of the same name: they lie side by
        side in the optimizer's buffers, by number, and their gradients get ready together.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    decay: bool
    box: Box = ()
    local_shape: tuple[int, ...] = ()
    replicated_over: frozenset[str] = frozenset()
    grad_sum_over: frozenset[str] = frozenset()
    expert: bool = False
    stack: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        if not self.box:
            object.__setattr__(self, "box", tuple((0, n) for n in self.shape))
        if not self.local_shape:
            object.__setattr__(self, "local_shape", self.box_shape)
        assert len(self.box) == len(self.shape), self
        assert all(0 <= a <= b <= n for (a, b), n in zip(self.box, self.shape, strict=True)), self

    @property
    def box_shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in self.box)

    @property
    def numel(self) -> int:
        """Elements of the logical global tensor."""
        return math.prod(self.shape)


def attach_spec(param: nn.Parameter, spec: ParamSpec) -> nn.Parameter:
    """Marks `param` (local shape must be the spec's) and returns it."""
    assert tuple(param.shape) == spec.local_shape, (spec.name, tuple(param.shape), spec.local_shape)
    param.spec = spec
    return param


def spec_of(param: Tensor) -> ParamSpec:
    """The spec of a parameter made by `core`; AttributeError for tensors that have none."""
    return param.spec


def named_specs(module: nn.Module) -> Iterator[tuple[ParamSpec, nn.Parameter]]:
    """(spec, parameter) of a module, each parameter once, in the order of global names."""
    params = {spec_of(p).name: p for p in module.parameters()}
    for name in sorted(params):
        yield spec_of(params[name]), params[name]


def specs_in_order(module: nn.Module) -> Iterator[tuple[ParamSpec, nn.Parameter]]:
    """The same in the order in which modules were made, which is about that of their use."""
    for param in module.parameters():
        yield spec_of(param), param


def unpadded(tensor: Tensor, spec: ParamSpec) -> Tensor:
    """The local tensor without padding, a view in the shape of the spec's box."""
    if tensor.numel() == math.prod(spec.box_shape):
        return tensor.view(spec.box_shape)
    return tensor[: spec.box_shape[0]]


def range_boxes(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """The flat range `start:stop` of a row-major tensor as boxes, in order: of a matrix at most three."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # within one row
        rows = last
        return [((rows, rows + 1), *box) for box in range_boxes(start - rows * inner, stop - rows * inner, shape[1:])]
    head = range_boxes(start - (first - 1) * inner, inner, shape[1:]) if start % inner else []
    tail = range_boxes(0, stop - last * inner, shape[1:])
    boxes = [((first - 1, first), *box) for box in head]
    if first < last:
        boxes.append(((first, last), *((0, n) for n in shape[1:])))
    return boxes + [((last, last + 1), *box) for box in tail]


def _chunk_seed(seed: int, name: str, chunk: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{chunk}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch seeds are signed 64-bit


def _normal_box(spec: ParamSpec, seed: int) -> Tensor:
    """Standard normal values of the spec's box: FP32 on the CPU, in the box's shape."""
    if not spec.shape:
        return torch.randn((), generator=torch.Generator().manual_seed(_chunk_seed(seed, spec.name, 0)))
    width = spec.shape[-1]
    rows = math.prod(spec.shape[:-1])
    rows_per_chunk = max(1, CHUNK_ELEMENTS // max(1, width))
    wanted = torch.arange(rows).view(spec.shape[:-1])[tuple(slice(a, b) for a, b in spec.box[:-1])].reshape(-1)
    columns = slice(*spec.box[-1])
    with torch.inference_mode(False):  # a mode of this thread: others couldn't write to its tensors
        out = torch.empty(wanted.numel(), columns.stop - columns.start)

    def draw(chunk: int, rows_here: Tensor, here: Tensor) -> None:
        start = chunk * rows_per_chunk
        generator = torch.Generator().manual_seed(_chunk_seed(seed, spec.name, chunk))
        block = torch.randn(min(rows_per_chunk, rows - start), width, generator=generator)
        here.copy_(block[rows_here - start, columns])

    chunks, counts = torch.unique_consecutive(wanted // rows_per_chunk, return_counts=True)
    parts = counts.tolist()
    jobs = list(zip(chunks.tolist(), wanted.split(parts), out.split(parts), strict=True))
    if len(jobs) == 1:
        draw(*jobs[0])
        return out.view(spec.box_shape)
    with ThreadPoolExecutor(DRAWING_THREADS) as pool:  # a chunk at a time would take a rank of an 8B model a minute
        list(pool.map(draw, *zip(*jobs, strict=True)))  # after an error the chunks that wait are not drawn
    return out.view(spec.box_shape)


InitialValues = Callable[[ParamSpec, int], Tensor]
"""(spec, seed) -> FP32 values in the local shape, such as `initial_value`."""


def initial_value(spec: ParamSpec, seed: int) -> Tensor:
    """The initial FP32 value of this rank's part of a parameter, in its local shape, on the CPU.

    Masters are seeded from it and weights are its rounding, so an FP8 or BF16 weight never seeds a master.
    Padding rows are zero.
    """
    if spec.init.kind == "normal":
        value = _normal_box(spec, seed).mul_(spec.init.std)
    else:
        value = torch.full(spec.box_shape, float(spec.init.kind == "ones"))
    if value.numel() == math.prod(spec.local_shape):
        return value.view(spec.local_shape)
    padded = torch.zeros(spec.local_shape)
    padded[: value.shape[0]] = value
    return padded


class GradSink(Protocol):
    """Where weight gradients go: the optimizer's buffers, seen from below."""

    def buffer(self, param: Tensor) -> Tensor:
        """The FP32 view, in the parameter's local shape, that a wgrad is added into."""
        ...

    def target(self, param: Tensor) -> tuple[Tensor, bool]:
        """The same view, and whether to add. If not, nothing of this step is there yet: it may hold anything, and the
        caller writes all of it."""
        return self.buffer(param), True

    def ready(self, param: Tensor) -> None:
        """Says that this microbatch's gradient of `param` is in its buffer."""
        ...


@dataclass(frozen=True)
class StateItem:
    """A tensor of some owner's state: this rank's part and its place in the global tensor.

    tensor: in the shape of `box`; shape: global shape; box: `()` means the whole tensor.
    replica: other ranks hold, and save, the same elements, perhaps in other boxes.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    box: Box = ()
    replica: bool = False

    def __post_init__(self) -> None:
        if not self.box:
            object.__setattr__(self, "box", tuple((0, n) for n in self.shape))
        assert tuple(self.tensor.shape) == tuple(b - a for a, b in self.box), (self.tensor.shape, self.box)

    @staticmethod
    def whole(tensor: Tensor) -> StateItem:
        return StateItem(tensor, tuple(tensor.shape))


PART = "@"


def part_key(name: str, number: int) -> str:
    """The key in a state of part `number` of what a rank holds of the tensor `name`: 0 has the name itself."""
    return name if number == 0 else f"{name}{PART}{number}"


def name_of(key: str) -> str:
    """The global name of a tensor, from the key of a part."""
    return key.partition(PART)[0]
