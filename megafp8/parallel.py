"""ParallelContext: every parallel axis of the job, passed as an argument, never a global.

An axis is a size, this rank's place on it and its process group (None where the size is 1). Its collectives do nothing
at size 1, so the same code serves one process. Ranks are numbered as in Megatron-LM, tensor parallelism fastest:

    attention, norms, ...   rank = tp + TP * (cp + CP * (dp + DP * pp))
    experts                 rank = etp + ETP * (ep + EP * (edp + EDP * pp))

Both are foldings of the same ranks, independent of each other within a pipeline stage, cut from one `DeviceMesh`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megafp8.config import Config
from megafp8.config.parallel import ParallelConfig, layout_sizes
from megafp8.meter import Meter

_UNREDUCIBLE = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


class Pending(Protocol):
    """A collective on its way: its result may be read after `wait()`."""

    def wait(self) -> Any: ...


class _Done:
    def wait(self) -> None: ...


DONE: Pending = _Done()
"""What a collective over one rank returns."""


@dataclass(frozen=True)
class Axis:
    """One dimension of the layout. Tensors given to collectives must be contiguous.

    A maximum of NaN is not NaN on every backend, so non-finite values must not be told by `max_`: reduce a 0/1 flag.
    name, meter: under which name its traffic is counted, and by whom.
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None
    name: str = field(default="", compare=False, kw_only=True)
    meter: Meter | None = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, self

    def count(self, kind: str, *parts: Tensor) -> None:
        """Notes a message that this rank takes part in."""
        if self.meter is not None:
            self.meter.add(kind, self.name, *parts)

    def split(self, n: int) -> tuple[int, int]:
        """This rank's half-open part of `n` equal shares; `n` must divide (checked by the configuration)."""
        assert n % self.size == 0, (n, self.size)
        share = n // self.size
        return self.rank * share, (self.rank + 1) * share

    def sum_(self, x: Tensor) -> Tensor:
        """`x`, overwritten with its sum over the ranks."""
        self.post_sum_(x).wait()
        return x

    def max_(self, x: Tensor) -> Tensor:
        """`x`, overwritten with its maximum over the ranks."""
        if self.size > 1:
            _check_reducible(x)
            self.count("max", x)
            dist.all_reduce(x, ReduceOp.MAX, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[n, ...] of each rank as [size * n, ...], in the order of ranks."""
        out, pending = self.post_gather(x)
        pending.wait()
        return out

    def scatter_sum(self, x: Tensor) -> Tensor:
        """This rank's part [n, ...] of the sum over the ranks of `x` [size * n, ...]."""
        out, pending = self.post_scatter_sum(x)
        pending.wait()
        return out

    def exchange(self, value: Any) -> list[Any]:
        """The JSON value of every rank, in the order of ranks: bytes, so no pickle between ranks. Waits for them."""
        text = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(text)]
        device = torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        lengths = self.gather(torch.tensor([len(text)], device=device)).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self.gather(padded.to(device)).view(self.size, -1).cpu()
        return [json.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, lengths, strict=True)]

    def post_deal(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Pending]:
        """Starts to send each rank its rows of `x`, those of rank 0 first (all-to-all).

        sent, received: rows to and from each rank; no rows are fine. The result [sum(received), ...], by sender, may
        be read after `wait()`, and `x` must not change before. Any dtype: bytes travel.
        """
        if self.size == 1:
            return x, DONE
        self.count("deal", x)
        out = x.new_empty(sum(received), *x.shape[1:])
        raw = [t.view(torch.uint8) if t.dim() > 1 else t for t in (out, x)]
        return out, _posted(dist.all_to_all_single(*raw, list(received), list(sent), group=self.group, async_op=True))

    def swap(self, peer: int, x: Tensor) -> Tensor:
        """What rank `peer` of the axis gives for `x`, of the same shape and dtype; it must swap with this one."""
        self.count("send", x)
        out = torch.empty_like(x)
        there = dist.get_global_rank(self.group, peer)
        sides = [dist.P2POp(dist.isend, x, there, self.group), dist.P2POp(dist.irecv, out, there, self.group)]
        for work in dist.batch_isend_irecv(sides):
            work.wait()
        return out

    def post_shift(self, x: Tensor) -> tuple[Tensor, list[Work]]:
        """Starts to send `x` to the next rank of the ring; the result, the rank before's, may be read once all works
        are waited for."""
        self.count("send", x)
        out = torch.empty_like(x)
        there, before = (dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1))
        sides = [dist.P2POp(dist.isend, x, there, self.group), dist.P2POp(dist.irecv, out, before, self.group)]
        return out, dist.batch_isend_irecv(sides)

    def post_send(self, x: Tensor, target: int, group: ProcessGroup, tag: int) -> Work:
        """Starts to send `x` to rank `target` of the job; it must not be written to until the work is completed."""
        self.count("send", x)
        return dist.isend(x, target, group=group, tag=tag)

    def post_receive(self, x: Tensor, source: int, group: ProcessGroup, tag: int) -> Pending:
        """Starts to receive `x` from rank `source` of the job: it holds the message after `wait()`."""
        return dist.irecv(x, source, group=group, tag=tag)

    def post_sum_(self, x: Tensor) -> Pending:
        """Starts `sum_`: `x` holds the sum after `wait()`."""
        if self.size == 1:
            return DONE
        _check_reducible(x)
        self.count("sum", x)
        return _posted(dist.all_reduce(x, ReduceOp.SUM, group=self.group, async_op=True))

    def post_gather(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Starts `gather`: the result may be read after `wait()`. FP8 travels as bytes."""
        if self.size == 1:
            return x, DONE
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        return out, self.post_gather_into(out, x)

    def post_gather_into(self, out: Tensor, x: Tensor) -> Pending:
        """Starts to gather the ranks' `x` in `out`, which may hold `x` in its place already."""
        if self.size == 1:
            return DONE
        self.count("gather", x)
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return _posted(collective(_as_bytes(out), _as_bytes(x), group=self.group, async_op=True))

    def post_gathers(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], Pending]:
        """`post_gather` of several tensors as one message, on more than one rank; they are kept until it is there."""
        self.count("gather", *parts)
        if parts[0].is_cuda and dist.get_backend(self.group) != "nccl":  # gloo's can't read a GPU's memory
            return [replace(self, meter=None).gather(x) for x in parts], DONE
        outs = [x.new_empty(self.size * x.shape[0], *x.shape[1:]) for x in parts]
        raw = ([x.view(torch.uint8) for x in side] for side in (outs, parts))  # what travels together has one dtype
        # PyTorch's coalescing manager does this; on NCCL it is one launch of all of them, with one work.
        return outs, _posted(self.group.allgather_into_tensor_coalesced(*raw))

    def post_scatter_sum(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Starts `scatter_sum`: the result may be read after `wait()`, and `x` must not change before."""
        if self.size == 1:
            return x, DONE
        _check_reducible(x)
        assert x.shape[0] % self.size == 0, (tuple(x.shape), self.size)
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        return out, self.post_scatter_sum_into(out, x)

    def post_scatter_sum_into(self, out: Tensor, x: Tensor) -> Pending:
        """Starts to sum `x` over the ranks into this rank's part `out`, which may be that part of `x` itself."""
        if self.size == 1:
            return DONE
        _check_reducible(x)
        self.count("scatter_sum", x)
        collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return _posted(collective(out, x, op=ReduceOp.SUM, group=self.group, async_op=True))


def _posted(work: Work | None) -> Pending:
    return DONE if work is None else work


def _check_reducible(x: Tensor) -> None:
    assert x.dtype not in _UNREDUCIBLE, f"{x.dtype} is bytes of FP8: gather it, never reduce it"


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype in _UNREDUCIBLE else x


@dataclass(frozen=True)
class ParallelContext:
    """tp: tensor, cp: context, dp: data, pp: pipeline; ep, etp, edp: experts, and tensor and data parallelism of
    an expert's weights. dp_cp: the ranks whose gradients of a parameter outside the experts are summed. ep_etp: the
    ranks that hold a layer's experts together, rank = etp + ETP * ep.

    `rank` and `world_size` are the job's. `sequence_parallel`: between the linears each tensor-parallel rank holds a
    part of the tokens; False when there is one rank. `meter` counts what this rank sends.
    """

    tp: Axis = field(default_factory=Axis)
    cp: Axis = field(default_factory=Axis)
    dp: Axis = field(default_factory=Axis)
    pp: Axis = field(default_factory=Axis)
    ep: Axis = field(default_factory=Axis)
    etp: Axis = field(default_factory=Axis)
    edp: Axis = field(default_factory=Axis)
    dp_cp: Axis = field(default_factory=Axis)
    ep_etp: Axis = field(default_factory=Axis)
    rank: int = 0
    world_size: int = 1
    sequence_parallel: bool = False
    meter: Meter | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what only one rank writes."""
        return self.rank == 0

    @property
    def everyone(self) -> Axis:
        """All ranks of the job, in one axis."""
        group = dist.group.WORLD if self.world_size > 1 else None
        return Axis(self.world_size, self.rank, group, name="world", meter=self.meter)

    def barrier(self) -> None:
        """Waits for every rank of the job."""
        if self.world_size > 1:
            _barrier()


DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")


def build_parallel(config: Config, device: torch.device | str, *, meter: Meter | None = None) -> ParallelContext:
    """Joins the job's other processes (MASTER_ADDR, RANK, ... as torchrun sets them) and makes every group.

    gloo on the CPU; on GPUs `--distributed-backend`, and the process takes GPU number LOCAL_RANK. A default process
    group that is there already is used. One process joins nothing. Call `close_parallel` when done. Raises ValueError,
    before any communication, when the sizes don't fit the number of processes.

    meter: counts what this rank sends from now on.
    """
    sizes, device = layout_sizes(config.parallel), torch.device(device)
    _check_world(config.parallel)
    if config.parallel.world_size == 1:
        return ParallelContext()
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if config.train.cuda_graph_impl != "none":  # NCCL can't register what lies in PyTorch's expandable segments
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    backend = config.parallel.distributed_backend if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timeout)
    return context_of(config.parallel, sizes, device.type, backend, timeout, meter)


def close_parallel(parallel: ParallelContext) -> None:
    """Leaves the job: every rank waits for the others, then the groups are gone. Not for the way out of an error."""
    if parallel.world_size > 1 and dist.is_initialized():
        _barrier()
        dist.destroy_process_group()


def _barrier() -> None:
    """NCCL's is a kernel, and wants to know on which device; gloo wants to know of none."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def abandon_parallel() -> None:
    """For the way out of a mistake: waits for nobody. A process that ends while gloo's threads work may hang or abort;
    NCCL's groups may wait for others, and are left."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _check_world(p: ParallelConfig) -> None:
    started = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if started != p.world_size:
        raise ValueError(
            f"the configuration is for {p.world_size} process(es) and {started} were started (WORLD_SIZE); "
            f"start {p.world_size}, with torchrun"
        )


def context_of(
    p: ParallelConfig,
    sizes: dict[str, int],
    device_type: str,
    backend: str,
    timeout: timedelta | None,
    meter: Meter | None,
) -> ParallelContext:
    """Makes every group of a job whose processes have joined."""
    world = init_device_mesh(device_type, (p.world_size,), mesh_dim_names=("world",))
    dense = _fold(world, DENSE, sizes, backend, timeout)
    axes = {name: _axis(dense, name) for name in DENSE}
    dp_cp = _joint(dense, axes, ("dp", "cp"), backend, timeout)
    if sizes["ep"] == 1 and sizes["etp"] == sizes["tp"]:  # the same groups: no second set of them
        axes |= {"ep": Axis(), "etp": axes["tp"], "edp": dp_cp}
        ep_etp = axes["tp"]
    else:
        experts = _fold(world, EXPERT, sizes, backend, timeout)
        axes |= {name: _axis(experts, name) for name in EXPERT if name != "pp"}
        ep_etp = _joint(experts, axes, ("ep", "etp"), backend, timeout)
    axes |= {"dp_cp": dp_cp, "ep_etp": ep_etp}
    return ParallelContext(
        **{name: replace(axis, meter=meter) for name, axis in axes.items()},
        meter=meter,
        rank=dist.get_rank(),
        world_size=p.world_size,
        sequence_parallel=p.sequence_parallel and sizes["tp"] > 1,
    )


def _fold(
    world: DeviceMesh, names: tuple[str, ...], sizes: dict[str, int], backend: str, timeout: timedelta | None
) -> DeviceMesh:
    """The ranks as a mesh of those axes that have more than one rank."""
    names = tuple(name for name in names if sizes[name] > 1)
    shape = tuple(sizes[name] for name in names)
    assert math.prod(shape) == world.size(), (names, shape)
    override = {name: _group_options(backend, timeout) for name in names}
    return world._unflatten(0, shape, names, backend_override=override)


def _joint(
    mesh: DeviceMesh, axes: dict[str, Axis], names: tuple[str, str], backend: str, timeout: timedelta | None
) -> Axis:
    """Two neighbouring axes of a mesh as one, the first slower."""
    first, second = (axes[name] for name in names)
    if first.size == 1 or second.size == 1:
        return first if second.size == 1 else second
    name = "_".join(names)
    return _axis(mesh[names]._flatten(name, backend_override=_group_options(backend, timeout)), name)


def _group_options(backend: str, timeout: timedelta | None):
    """What a group is made with. Without it, groups other than the world would have the backend's default timeout."""
    if backend == "fake" or timeout is None:
        return backend
    options = dist.ProcessGroupNCCL.Options() if backend == "nccl" else dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    return backend, options


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    if name not in mesh.mesh_dim_names:
        return Axis()
    return Axis(mesh.size(mesh.mesh_dim_names.index(name)), mesh.get_local_rank(name), mesh.get_group(name), name=name)
