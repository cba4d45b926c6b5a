"""QuantizedTensor: a quantized operand that PyTorch sees as a tensor, for parameters, autograd and users.

It has the shape and the (nominal) dtype of the tensor it stands for. Operations fall in three kinds:
- those that only rearrange (`view`, `detach`, `t`, aligned slices and splits, `clone`, `to(device)`) keep the bytes:
  each orientation of the result is right or absent;
- those that write (`copy_`, `zero_`, `add_`, ...) quantize anew, and write bytes and scales of every orientation
  in place, so that aliases see them;
- all others, and slices that cut a tile's origin away, work on the dequantized values and return plain tensors.

Pickling is refused: saved state is plain tensors, so that loading it can run no code.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megafp8.fp8.formats import OperandSpec
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import Quantized, QuantizedStorage

aten = torch.ops.aten


class QuantizedTensor(Tensor):
    """Wraps `quantized` ([M, K], rowwise and/or colwise) as a tensor of shape `[..., K]` and dtype `dtype`.

    `.rowwise`, `.colwise` (None where absent) and `.dequantize()` are those of the storage. Leading dimensions are
    flattened in the storage.
    """

    quantized: Quantized
    writable: bool

    @staticmethod
    def __new__(
        cls,
        quantized: Quantized,
        dtype: torch.dtype = torch.bfloat16,
        shape: tuple[int, ...] | None = None,
        *,
        writable: bool = True,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        shape = tuple(quantized.shape if shape is None else shape)
        some = quantized.rowwise or quantized.colwise
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=some.data.device, requires_grad=requires_grad
        )
        self.quantized = quantized
        self.writable = writable
        return self

    @classmethod
    def from_tensor(
        cls, x: Tensor, quantizer: Quantizer, rowwise: bool = True, colwise: bool = False
    ) -> QuantizedTensor:
        """Quantizes `x [..., K]`."""
        quantized = quantizer.quantize(x.reshape(-1, x.shape[-1]), rowwise, colwise)
        return cls(quantized, x.dtype, tuple(x.shape))

    @property
    def rowwise(self) -> QuantizedStorage | None:
        return self.quantized.rowwise

    @property
    def colwise(self) -> QuantizedStorage | None:
        return self.quantized.colwise

    @property
    def quantizer(self) -> Quantizer:
        """Quantizes as this tensor is quantized (without an amax epsilon)."""
        some = self.rowwise or self.colwise
        return Quantizer(OperandSpec(some.format, some.tile, some.scale))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Plain tensor of the same shape."""
        return self.quantized.dequantize(dtype).view(self.shape)

    def __repr__(self) -> str:
        some = self.rowwise or self.colwise
        there = [o for o in ("rowwise", "colwise") if getattr(self, o) is not None]
        return (
            f"QuantizedTensor({tuple(self.shape)}, {some.format.name}, tile={some.tile.kind}, "
            f"scale={some.scale.value}, {'+'.join(there)}, dtype={self.dtype}, device={self.device})"
        )

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a QuantizedTensor is not pickled: save q.dequantize(), or data and scale_inv of q.rowwise (safetensors)"
        )

    def __deepcopy__(self, memo) -> QuantizedTensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        rearrange = _REARRANGE.get(func)
        if rearrange is not None and isinstance(args[0], QuantizedTensor):
            result = rearrange(*args, **kwargs)
            if result is not None:
                return result
        if func._schema.is_mutable:
            return _write(func, args, kwargs)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _plain(value):
    return value.dequantize(value.dtype) if isinstance(value, QuantizedTensor) else value


def _copy_of(quantized: Quantized, device: torch.device | None = None) -> Quantized:
    """A copy, on another device if asked: data contiguous, scales with their strides (GEMMs want them padded)."""

    def one(storage: QuantizedStorage | None) -> QuantizedStorage | None:
        if storage is None:
            return None
        target = storage.data.device if device is None else device
        raw, scale_inv = storage.data.view(torch.uint8), storage.scale_inv
        data = torch.empty(raw.shape, dtype=torch.uint8, device=target).copy_(raw).view(storage.data.dtype)
        scales = torch.empty_strided(scale_inv.shape, scale_inv.stride(), dtype=scale_inv.dtype, device=target)
        return replace(storage, data=data, scale_inv=scales.copy_(scale_inv))

    return Quantized(one(quantized.rowwise), one(quantized.colwise))


def _alias(q: QuantizedTensor, *_) -> QuantizedTensor:
    return QuantizedTensor(q.quantized, q.dtype, tuple(q.shape), writable=q.writable)


def _clone(q: QuantizedTensor, **_) -> QuantizedTensor:
    return QuantizedTensor(_copy_of(q.quantized), q.dtype, tuple(q.shape))


def _to_copy(q: QuantizedTensor, dtype=None, device=None, non_blocking=False, **_) -> Tensor:
    """Another device moves the bytes; another dtype asks for values."""
    if dtype is not None and dtype != q.dtype:
        return q.dequantize(dtype).to(device=device, non_blocking=non_blocking)
    return QuantizedTensor(_copy_of(q.quantized, device), q.dtype, tuple(q.shape))


def _view(q: QuantizedTensor, shape) -> QuantizedTensor | None:
    """Leading dimensions may be split or merged; a view through the last one is left to the values."""
    size = torch.empty(q.shape, device="meta").view(shape).shape
    if not size or size[-1] != q.shape[-1]:
        return None
    return QuantizedTensor(q.quantized, q.dtype, tuple(size), writable=q.writable)


def _transpose(q: QuantizedTensor, *dims) -> QuantizedTensor | None:
    """Rowwise of the transpose is colwise of the original, and the other way round."""
    if q.dim() != 2 or (dims and {d % 2 for d in dims} != {0, 1}):
        return None

    def turned(storage: QuantizedStorage | None, orientation: str) -> QuantizedStorage | None:
        return None if storage is None else replace(storage, orientation=orientation)

    swapped = Quantized(turned(q.colwise, "rowwise"), turned(q.rowwise, "colwise"))
    return QuantizedTensor(swapped, q.dtype, tuple(q.shape)[::-1], writable=q.writable)


def _slice(q: QuantizedTensor, dim=0, start=None, end=None, step=1) -> QuantizedTensor | None:
    """A view of the rows or columns `start:end`, of the orientations whose tiles start there."""
    if q.dim() != 2 or step != 1:
        return None
    dim %= 2
    start, end, _ = slice(start, end).indices(q.shape[dim])
    end = max(start, end)
    parts = [_slice_storage(s, dim, start, end) for s in (q.rowwise, q.colwise)]
    if all(part is None for part in parts):
        return None
    shape = list(q.shape)
    shape[dim] = end - start
    return QuantizedTensor(Quantized(*parts), q.dtype, tuple(shape), writable=False)


def _slice_storage(storage: QuantizedStorage | None, dim: int, start: int, end: int) -> QuantizedStorage | None:
    if storage is None or storage.counts is not None:
        return None
    stored_dim = dim if storage.orientation == "rowwise" else 1 - dim
    data = storage.data.narrow(stored_dim, start, end - start)
    if storage.tile.kind == "tensor":
        return replace(storage, data=data)
    step = storage.tile.shape(*storage.data.shape)[stored_dim]
    if start % step:
        return None
    scale_inv = storage.scale_inv.narrow(stored_dim, start // step, -(-(end - start) // step))
    return replace(storage, data=data, scale_inv=scale_inv)


def _split(q: QuantizedTensor, sizes, dim=0) -> list[Tensor]:
    length = q.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    parts, start = [], 0
    for size in sizes:
        part = _slice(q, dim, start, start + size)
        parts.append(q.dequantize(q.dtype).narrow(dim, start, size) if part is None else part)
        start += size
    return parts


def _write(func, args, kwargs):
    """An in-place operation: its value is computed plainly, then quantized into the target's own bytes."""
    target = args[0]
    if not isinstance(target, QuantizedTensor):
        return func(target, *tree_map(_plain, args[1:]), **tree_map(_plain, kwargs))
    if any(isinstance(v, QuantizedTensor) for v in kwargs.values()):
        raise ValueError("out= into a QuantizedTensor is not supported: use q.copy_(result)")
    if not target.writable:
        raise ValueError("a slice of a QuantizedTensor can't be written to: write to the whole tensor with copy_")
    if func is aten.copy_.default:
        source = args[1]
    else:
        source = func(_plain(target), *tree_map(_plain, args[1:]), **tree_map(_plain, kwargs))
    _fill(target.quantized, _quantized_like(target, source))
    return target


def _quantized_like(target: QuantizedTensor, source: Tensor) -> Quantized:
    """`source` as bytes in the target's format and orientations; its own bytes where they are in that format."""
    orientations = {"rowwise": target.rowwise is not None, "colwise": target.colwise is not None}
    given = source.quantized if isinstance(source, QuantizedTensor) else None
    same = given is not None and source.quantizer == target.quantizer and source.shape == target.shape
    values = source.dequantize() if given is not None else source
    values = values.to(target.device).expand(target.shape).reshape(target.quantized.shape)
    made = target.quantizer.quantize(values, **orientations)
    if not same:
        return made
    return Quantized(
        given.rowwise if given.rowwise is not None and made.rowwise is not None else made.rowwise,
        given.colwise if given.colwise is not None and made.colwise is not None else made.colwise,
    )


def _fill(target: Quantized, source: Quantized) -> None:
    for orientation in ("rowwise", "colwise"):
        ours, theirs = getattr(target, orientation), getattr(source, orientation)
        if ours is not None:
            ours.data.view(torch.uint8).copy_(theirs.data.view(torch.uint8))
            ours.scale_inv.copy_(theirs.scale_inv)


# What an operation makes of the bytes; a function that returns None leaves it to the dequantized values.
_REARRANGE = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
}
