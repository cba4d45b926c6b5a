"""Delayed scaling's state: for each quantized tensor a history of amaxes, and the scale made from it.

The only state of any recipe. Linears record amaxes in training passes and read scales in all of them; training
reduces `pending()` once a step over the ranks that hold the same tensors, and then calls `advance()`. So a recompute,
an evaluation or another number of microbatches changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from megafp8.fp8.formats import MAX_SCALE, power_of_two_floor
from megafp8.fp8.recipe import Delayed
from megafp8.parallel import Axis
from megafp8.params import StateItem

PREFIX = "fp8_scaling/"
_STEPS = PREFIX + "steps"


class DelayedScaling:
    """Histories of all tensors of a model, packed: `history [L, N]`, slot 0 collects this step's amaxes.

    fmax: global tensor name -> largest finite value of its format. experts: names of the experts' tensors, which other
    ranks share than the rest.
    Scales are FP32: `s = fmax * 2^-margin / amax`, where amax is the history's maximum or its latest entry.
    """

    def __init__(
        self,
        fmax: Mapping[str, float],
        recipe: Delayed,
        device: torch.device | str = "cpu",
        experts: Collection[str] = (),
    ):
        self.recipe = recipe
        self._index = {name: i for i, name in enumerate(sorted(fmax))}
        self._experts = torch.tensor([name in experts for name in self._index], dtype=torch.bool, device=device)
        count = len(self._index)
        self._fmax = torch.tensor([fmax[name] for name in self._index], dtype=torch.float32, device=device)
        self._history = torch.zeros(recipe.amax_history_len, count, dtype=torch.float32, device=device)
        self._columns: dict[tuple[str, ...], Tensor] = {}
        self._steps = 0
        self._scales = torch.empty(count, dtype=torch.float32, device=device)
        self._cut_slots()
        self._set_scales(torch.ones_like(self._scales))

    def __setstate__(self, state: dict) -> None:
        """A pickled view has memory of its own: what is written to it would not reach the history."""
        self.__dict__.update(state)
        self._cut_slots()
        self._set_scales(self._scales)

    def _cut_slots(self) -> None:
        self._slots = list(self._history[0].split(1))

    @classmethod
    def of(cls, model: nn.Module) -> DelayedScaling | None:
        """The state that a model's linears need; None if no recipe of theirs has a history."""
        linears = [m for m in model.modules() if getattr(m, "history_tensors", None) and m.history_tensors()]
        if not linears:
            return None
        recipes = {m.recipe for m in linears}
        assert len(recipes) == 1, "linears with a history must share one recipe"
        fmax = {name: value for m in linears for name, value in m.history_tensors().items()}
        of_experts = [m for m in linears if getattr(getattr(m.weight, "spec", None), "expert", False)]
        experts = {name for m in of_experts for name in m.history_tensors()}
        return cls(fmax, recipes.pop(), linears[0].weight.device, experts)

    def _set_scales(self, scales: Tensor) -> None:
        self._scales.copy_(scales)  # in place, as the history is rolled: CUDA graphs read and write them there
        self._views = list(self._scales.split(1))  # one object a step and tensor: Weight compares them by identity
        self._together: dict[tuple[str, ...], Tensor] = {}  # the same of several

    def names(self) -> Iterable[str]:
        """Global tensor names, in the order of `pending()`."""
        return self._index.keys()

    def scale(self, name: str) -> Tensor | None:
        """Scale in force, FP32, one element; None before the first `advance()`: current scaling then."""
        return self._views[self._index[name]] if self._steps else None

    def record(self, name: str, amax: Tensor) -> None:
        """Max-accumulates an amax (FP32, one element) of this step."""
        slot = self.slot(name)
        torch.maximum(slot, amax.view(1), out=slot)

    def slot(self, name: str) -> Tensor:
        """Where this step's amax is max-accumulated, FP32 [1], for kernels that do so themselves."""
        return self._slots[self._index[name]]

    def scales(self, names: tuple[str, ...]) -> Tensor | None:
        """`scale` of several tensors, FP32 [len(names)]: one object a step."""
        if self._steps and names not in self._together:
            self._together[names] = self._scales[self._columns_of(names)]
        return self._together.get(names)

    def record_all(self, names: tuple[str, ...], amaxes: Tensor) -> None:
        """`record` of several tensors; amaxes: FP32 [len(names)]."""
        columns, slot = self._columns_of(names), self._history[0]
        slot[columns] = torch.maximum(slot[columns], amaxes)

    def _columns_of(self, names: tuple[str, ...]) -> Tensor:
        if names not in self._columns:
            self._columns[names] = torch.tensor([self._index[name] for name in names], device=self._history.device)
        return self._columns[names]

    def pending(self) -> Tensor:
        """This step's amaxes, FP32 [N], contiguous: one packed max all-reduce, in place, before `advance()`."""
        return self._history[0]

    @torch.no_grad()
    def share(self, axes: Iterable[Axis], expert_axes: Iterable[Axis]) -> None:
        """The maxima of this step's amaxes over the ranks that hold the same tensors, the experts' over their own.

        Call it on all ranks, before `advance()`. Where both axes are the same all tensors go in one message an axis.
        """
        axes, expert_axes = tuple(axes), tuple(expert_axes)
        pending = self._history[0]
        if axes == expert_axes:
            for axis in axes:
                axis.max_(pending)
            return
        for mine, over in ((~self._experts, axes), (self._experts, expert_axes)):
            packed = torch.where(mine, pending, 0.0)
            for axis in over:
                axis.max_(packed)
            pending.copy_(torch.where(mine, packed, pending))

    @torch.no_grad()
    def advance(self) -> None:
        """Ends a step: new scales from the history, then roll it and clear slot 0. An amax of 0 keeps the scale."""
        recipe = self.recipe
        amax = self._history.amax(0) if recipe.amax_compute_algo == "max" else self._history[0]
        floored = amax.clamp(min=recipe.amax_epsilon)
        scales = torch.div(self._fmax * 2.0**-recipe.margin, floored).clamp_(max=MAX_SCALE)
        if recipe.power_of_two_scales:
            scales = power_of_two_floor(scales)
        self._set_scales(torch.where(amax == 0, self._scales, scales))
        self._history.copy_(self._history.roll(-1, 0))
        self._history[0] = 0
        self._steps += 1

    def state(self) -> dict[str, StateItem]:
        """History [L] and scale [1] under each tensor's global name, and the number of steps."""
        items = {_STEPS: StateItem.whole(torch.tensor([self._steps]))}
        for name, i in self._index.items():
            items[f"{PREFIX}{name}/amax_history"] = StateItem.whole(self._history[:, i].clone())
            items[f"{PREFIX}{name}/scale"] = StateItem.whole(self._scales[i : i + 1].clone())
        return items

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes `state()`'s tensors. From a checkpoint of another recipe, which has none, it starts afresh.

        Raises ValueError for a history of another length, or none of a tensor that is quantized now.
        """
        if _STEPS not in tensors:
            return
        needed = [f"{PREFIX}{name}/{part}" for name in self._index for part in ("amax_history", "scale")]
        if missing := [name for name in needed if name not in tensors]:
            raise ValueError(
                f"the checkpoint has no '{missing[0]}': the flags that say which linears run in FP8 "
                "(--keep-modules-in-bf16, --first-last-layers-bf16) must be those of the checkpoint, or use --finetune"
            )
        scales = self._scales.clone()
        for name, i in self._index.items():
            history = tensors[f"{PREFIX}{name}/amax_history"]
            if history.numel() != self.recipe.amax_history_len:
                raise ValueError(
                    f"--fp8-amax-history-len {self.recipe.amax_history_len}: the checkpoint's amax history has "
                    f"{history.numel()} steps: use that length"
                )
            self._history[:, i] = history.to(self._history)
            scales[i : i + 1] = tensors[f"{PREFIX}{name}/scale"].to(scales)
        self._steps = int(tensors[_STEPS])
        self._set_scales(scales)
