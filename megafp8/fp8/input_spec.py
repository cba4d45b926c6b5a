"""How an operand of a linear is quantized: by its consumer's wishes, and with scales from its amax or a history.

Where ranks hold parts of the operand they share the scales that the whole one has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from megafp8.fp8.comm import ALONE, CommPlan, Cut
from megafp8.fp8.feature_grid import FeatureGrid, quantize_features
from megafp8.fp8.producer import Want
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.shards import quantize_rows
from megafp8.fp8.storage import Quantized
from megafp8.parallel import Axis
from megafp8.step import ScalingHistory, StepContext


@dataclass(frozen=True)
class Scaling:
    """How one tensor of one linear gets its scale: from its own amax, or from a history under its global name.

    Decided once for a linear; the step that is running comes with each call. cut: how the tensor lies over the ranks of
    `axis`; None: this rank has the whole. grid: of features whose cut goes through tiles; the rowwise copy is padded
    then. place: "<linear>/<role>", for the step's observer.
    """

    quantizer: Quantizer
    name: str | None
    axis: Axis = Axis()
    cut: Cut | None = None
    grid: FeatureGrid | None = None
    place: str | None = None

    def history(self, step: StepContext | None) -> ScalingHistory | None:
        return step.scaling if self.name is not None else None

    def scale(self, step: StepContext | None) -> Tensor | None:
        history = self.history(step)
        return history.scale(self.name) if history is not None else None

    @cached_property
    def _share(self) -> Callable[[Tensor], Tensor] | None:
        """Makes the amax of this rank's part the whole tensor's, where the scale is taken from that."""
        cut = self.cut is not None and self.quantizer.spec.tile.kind == "tensor"
        return self.axis.max_ if cut else None

    @cached_property
    def _plain_wants(self) -> dict[tuple[bool, bool], Want]:
        """The wishes without a history, by orientations."""
        pairs = ((rowwise, colwise) for rowwise in (False, True) for colwise in (False, True))
        return {pair: Want(self.quantizer, *pair, share=self._share) for pair in pairs}

    def want(self, rows: int, rowwise: bool, colwise: bool, step: StepContext | None, *, record: bool) -> Want | None:
        """The wish for a value of `rows` rows to be quantized where it is made, a tensor of which ranks hold parts with
        its amax shared on the way. None where 1D tiles lie across ranks, and for such a tensor in a history's first
        step."""
        if self.grid is not None:
            return None
        tile, history = self.quantizer.spec.tile, self.history(step)
        scale = None if history is None else history.scale(self.name)
        if tile.kind == "tensor":
            local = self.cut is None or history is None or scale is not None  # a history's are shared once a step
        else:
            local = self.cut != "rows" or rows % tile.block == 0
        if not local:
            return None
        if history is None:
            return self._plain_wants[rowwise, colwise]
        if scale is None:  # a history's first step
            note = partial(history.record, self.name) if record else None
            return Want(self.quantizer, rowwise, colwise, record=note)
        return Want(self.quantizer, rowwise, colwise, scale=scale, amax_out=history.slot(self.name) if record else None)

    def measures(self, step: StepContext | None) -> bool:
        """Whether the scale comes from the tensor's own amax: then it can be kept, once ranks have shared it."""
        return self.quantizer.spec.tile.kind == "tensor" and self.history(step) is None

    def quantize(
        self,
        x: Tensor,
        rowwise: bool,
        colwise: bool,
        step: StepContext | None,
        *,
        record: bool,
        amax: Tensor | None = None,
        amax_out: Tensor | None = None,
    ) -> Quantized:
        """record: whether this is the step's first look at the tensor: for the history, and for the observer. Where it
        `measures`: amax, FP32 [1], that was kept; amax_out, which receives it."""
        if amax is None and amax_out is None:
            quantized = self._quantize(x, rowwise, colwise, step, record)
        else:
            share = self._share if amax is None else None
            quantized = self.quantizer.quantize(x, rowwise, colwise, amax=amax, amax_out=amax_out, share=share)
        observer = step.observer if record and step is not None else None
        if observer is not None and self.place is not None:
            padded = self.cut == "features" and self.grid is not None and rowwise
            observer.see(self.place, self.grid.pad(x, 1) if padded else x, quantized)
        return quantized

    def _quantize(self, x: Tensor, rowwise: bool, colwise: bool, step: StepContext | None, record: bool) -> Quantized:
        if self.quantizer.spec.tile.kind != "tensor":
            if self.cut == "rows":
                return quantize_rows(self.quantizer, x, self.axis, rowwise, colwise)
            if self.cut == "features" and self.grid is not None:
                return quantize_features(self.quantizer, x, self.grid, rowwise, colwise)
            return self.quantizer.quantize(x, rowwise, colwise)
        history, scale = self.history(step), self.scale(step)
        if scale is not None:  # amaxes are shared once a step, all of them together
            slot = history.slot(self.name) if record else None
            return self.quantizer.quantize(x, rowwise, colwise, scale=scale, amax_out=slot)
        if not record or history is None:
            return self.quantizer.quantize(x, rowwise, colwise, share=self._share)
        amax = self.quantizer.amax(x)
        if self._share is not None:
            self._share(amax)
        history.record(self.name, amax)
        return self.quantizer.quantize(x, rowwise, colwise, amax=amax)


@dataclass(frozen=True)
class InputSpec:
    """What a linear wants from the producer of its input.

    dtype: of the high-precision values. quantizer: None for high precision. colwise: backward needs that copy.
    requantizes: backward quantizes the high-precision input again, which somebody else keeps anyway; the linear then
    holds no copy of it, and the producer hands it over unquantized. comm: how the values lie over the ranks. place:
    "<linear>/input", for the step's observer.
    """

    dtype: torch.dtype
    quantizer: Quantizer | None = None
    rowwise: bool = True
    colwise: bool = False
    requantizes: bool = False
    history_name: str | None = None
    comm: CommPlan = ALONE
    place: str | None = None

    def quantize(self, x: Tensor, step: StepContext | None) -> Quantized:
        """`x [M, K]` quantized as the consumer would."""
        comm = self.comm
        scaling = Scaling(self.quantizer, self.history_name, comm.axis, comm.cut("input"), comm.grid, self.place)
        return scaling.quantize(x, self.rowwise, self.colwise, step, record=step is not None and step.records)
