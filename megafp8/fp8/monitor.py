"""The monitor: statistics of every quantized tensor of a training step, by linear and role, over all ranks.

A step that is looked at gets `watch()` as its `StepContext.observer`; inputs and output gradients are seen as they are
quantized, weights at the end of the step (`see_weights`). Then `totals()` adds up over the ranks, on the device, and
`report()` makes one line an operand of what the host has read of that: the one thing that it waits for, and the device
may have something else to do meanwhile. Looking changes no bit of the run, and a step that nobody looks at costs
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megafp8.fp8.linear import Linear
from megafp8.fp8.operand_stats import COLUMNS, OperandStats, describe, drift
from megafp8.fp8.recipe import ROLES
from megafp8.fp8.storage import Quantized
from megafp8.parallel import ParallelContext
from megafp8.step import ScalingHistory

Piece = tuple[str, int, Tensor]
"""Of an FP8 primary weight: the parameter's name, first element, and masters of this rank's shard (FP32, flat)."""


def quantized_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Global name -> module, of everything that quantizes its operands now."""
    found = {}
    for module in model.modules():
        name = getattr(module, "name", None)
        if name is not None and getattr(module, "recipe", None) is not None:
            found[name] = module
    return found


class Watch:
    """One step's observer: stats by place, "<linear>/<role>".

    places: and whether each is an expert's. Their rows come last, so that either kind's are together.
    """

    def __init__(self, places: dict[str, bool], device: torch.device):
        self.index = {place: row for row, place in enumerate(sorted(places, key=lambda place: (places[place], place)))}
        self.stats = OperandStats.empty(len(self.index), device)
        self._experts = sum(places.values())

    def kinds(self) -> tuple[slice, slice]:
        """Rows of what is no expert's, and of what is."""
        border = len(self.index) - self._experts
        return slice(0, border), slice(border, len(self.index))

    def see(self, place: str, x: Tensor | None, quantized: Quantized) -> None:
        if place in self.index:
            self.stats.add(self.index[place], x, quantized)


class Monitor:
    """Makes a step's observer, and its lines.

    model: its modules are asked for their recipe in each step that is looked at, so that those that run in BF16, from
    the start or since a while, are left out.
    """

    def __init__(self, model: nn.Module, parallel: ParallelContext, device: torch.device):
        self._model, self._parallel, self._device = model, parallel, device
        self._before: dict[str, dict[int, int]] = {}

    def watch(self) -> Watch:
        """The observer of a step to look at."""
        modules = quantized_modules(self._model)
        places = {f"{name}/{role}": _is_expert(module) for name, module in modules.items() for role in ROLES}
        return Watch(places, self._device)

    @torch.no_grad()
    def see_weights(self, watch: Watch, scaling: ScalingHistory | None, masters: Iterable[Piece] = ()) -> None:
        """Adds the weights of the step in hand: before the optimizer moves them, and delayed scaling its scales.

        masters: of FP8 primary weights, which have no other high-precision value.
        """
        linears = {n: m for n, m in quantized_modules(self._model).items() if isinstance(m, Linear)}
        owners = {f"{name}.weight": (f"{name}/weight", module._own_weight()) for name, module in linears.items()}
        for place, owner in owners.values():
            scale = scaling.scale(owner.history_name) if scaling is not None and owner.history_name else None
            storage = owner.operand("fprop", scale)
            value = None if owner.primary is not None else owner.param.detach()
            if owner.grid is not None:
                value = owner.grid.pad(value, owner.grid_dim)
            pair = Quantized(storage) if storage.orientation == "rowwise" else Quantized(None, storage)
            watch.see(place, value, pair)
        for name, start, values in masters:
            place, owner = owners.get(name, (None, None))
            if owner is not None and owner.primary is not None:
                scale = scaling.scale(owner.history_name) if scaling is not None and owner.history_name else None
                row, values = watch.index[place], values.to(owner.param.dtype)
                watch.stats.add_errors(row, values, owner.operand("fprop", scale), start)

    def totals(self, watch: Watch) -> Tensor:
        """The stats over the ranks that hold the same modules, int64 [places, 9 + bins], on the device; nothing waits.

        Bits of FP64 numbers: sums and largest ones; then the histogram's counts.
        """
        p, stats = self._parallel, watch.stats
        for rows, axes in zip(watch.kinds(), ((p.tp, p.dp_cp), (p.etp, p.edp)), strict=True):
            sums, largest, histogram = stats.sums[rows], stats.largest[rows], stats.histogram[rows]
            for axis in axes if len(sums) else ():
                axis.sum_(sums)
                largest.copy_(axis.max_(largest.contiguous()))
                axis.sum_(histogram)
        return torch.cat([stats.sums.view(torch.int64), stats.largest.double().view(torch.int64), stats.histogram], 1)

    def report(self, watch: Watch, totals: Tensor, iteration: int) -> list[dict[str, Any]]:
        """One line an operand, over all ranks, in the order of names; every rank calls it and gets the same lines.

        totals: those of the watch, on the host. Beside `describe`'s numbers: drift_octaves, since the step looked at
        before (None: there is none), and the histogram of log2(scale_inv): `histogram_start`, the number of its first
        bin, and `histogram`, counts.
        """
        lines = []
        for place, (sums, largest, histogram) in self._over_all_ranks(watch, totals).items():
            name, _, role = place.rpartition("/")
            before, first = self._before.get(place), min(histogram, default=0)
            self._before[place] = histogram
            lines.append(
                {"iteration": iteration, "linear": name, "role": role}
                | describe(sums, largest, histogram)
                | {
                    "drift_octaves": drift(before, histogram) if before and histogram else None,
                    "histogram_start": first,
                    "histogram": [histogram.get(i, 0) for i in range(first, max(histogram, default=-1) + 1)],
                }
            )
        return lines

    def _over_all_ranks(self, watch: Watch, totals: Tensor) -> dict[str, tuple[list, list, dict[int, int]]]:
        """Place -> stats. Stages and expert ranks exchange what they have."""
        p, own, merged = self._parallel, _unpacked(watch, totals), {}
        alike, of_experts = (own[rows] for rows in watch.kinds())
        for part in (alike, *p.ep.exchange(of_experts)):
            _merge(merged, part)
        stages, merged = p.pp.exchange([[k, *v[:2], sorted(v[2].items())] for k, v in merged.items()]), {}
        for stage in stages:
            _merge(merged, stage)
        return dict(sorted(merged.items()))


def _is_expert(module: nn.Module) -> bool:
    spec = getattr(next(module.parameters(recurse=False), None), "spec", None)
    return spec is not None and spec.expert


def _unpacked(watch: Watch, totals: Tensor) -> list[list]:
    """[place, sums, largest, (bin, count) pairs] of each row."""
    numbers, counts = totals[:, : len(COLUMNS) + 3].view(torch.float64).tolist(), totals[:, len(COLUMNS) + 3 :]
    pairs: list[list] = [[] for _ in numbers]
    filled = counts.nonzero()
    for (row, place), count in zip(filled.tolist(), counts[tuple(filled.t())].tolist(), strict=True):
        pairs[row].append((place, count))
    return [
        [place, number[: len(COLUMNS)], number[len(COLUMNS) :], pair]
        for place, number, pair in zip(watch.index, numbers, pairs, strict=True)
    ]


def _merge(into: dict[str, tuple[list, list, dict[int, int]]], part: list[list]) -> None:
    for place, sums, largest, pairs in part:
        seen = into.get(place, ([0.0] * len(sums), [-float("inf")] * len(largest), {}))
        histogram = seen[2] | {i: seen[2].get(i, 0) + n for i, n in pairs}
        total = [a + b for a, b in zip(seen[0], sums, strict=True)]
        into[place] = total, [max(a, b) for a, b in zip(seen[1], largest, strict=True)], histogram
