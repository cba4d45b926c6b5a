"""The monitor: statistics of every quantized tensor of a training step, by linear and role, over all ranks.

A step that is looked at gets `watch()` as its `StepContext.observer`; inputs and output gradients are seen as they are
quantized, weights at the end of the step (`see_weights`). Then `report()` adds up over the ranks and gives one line an
operand. Looking changes no bit of the run, and a step that nobody looks at costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megafp8.fp8.linear import Linear
from megafp8.fp8.operand_stats import OperandStats, describe, drift
from megafp8.fp8.recipe import ROLES
from megafp8.fp8.storage import Quantized
from megafp8.parallel import Axis, ParallelContext
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
    """One step's observer: stats by place, "<linear>/<role>"."""

    def __init__(self, places: Iterable[str], device: torch.device):
        self.index = {place: row for row, place in enumerate(sorted(places))}
        self.stats = OperandStats.empty(len(self.index), device)

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
        names = quantized_modules(self._model)
        return Watch((f"{name}/{role}" for name in names for role in ROLES), self._device)

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

    def report(self, watch: Watch, iteration: int) -> list[dict[str, Any]]:
        """One line an operand, over all ranks, in the order of names; every rank calls it and gets the same lines.

        Beside `describe`'s numbers: drift_octaves, since the step looked at before (None: there is none), and the
        histogram of log2(scale_inv): `histogram_start`, the number of its first bin, and `histogram`, counts.
        """
        lines = []
        for place, (sums, largest, histogram) in self._over_all_ranks(watch).items():
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

    def _over_all_ranks(self, watch: Watch) -> dict[str, tuple[list, list, dict[int, int]]]:
        """Place -> stats. Ranks that hold the same modules add up in place; then stages and expert ranks exchange."""
        p, modules = self._parallel, quantized_modules(self._model)
        experts = {name for name, module in modules.items() if _is_expert(module)}
        kinds = {True: ([], (p.etp, p.edp)), False: ([], (p.tp, p.dp_cp))}
        for place, row in watch.index.items():
            kinds[place.rpartition("/")[0] in experts][0].append((place, row))
        merged: dict[str, tuple[list, list, dict[int, int]]] = {}
        for kind, (rows, axes) in kinds.items():
            own = _reduced(watch.stats, rows, axes)
            for part in p.ep.exchange(own) if kind else [own]:
                _merge(merged, part)
        stages, merged = p.pp.exchange([[k, *v[:2], sorted(v[2].items())] for k, v in merged.items()]), {}
        for stage in stages:
            _merge(merged, stage)
        return dict(sorted(merged.items()))


def _is_expert(module: nn.Module) -> bool:
    spec = getattr(next(module.parameters(recurse=False), None), "spec", None)
    return spec is not None and spec.expert


def _reduced(stats: OperandStats, rows: list[tuple[str, int]], axes: Iterable[Axis]) -> list[list]:
    """[place, sums, largest, (bin, count) pairs] of some rows, over the ranks of the axes; reads the device."""
    if not rows:
        return []
    index = torch.tensor([row for _, row in rows], device=stats.sums.device)
    sums, largest, histogram = stats.sums[index], stats.largest[index], stats.histogram[index]
    for axis in axes:
        axis.sum_(sums)
        axis.max_(largest)
        axis.sum_(histogram)
    counts = histogram.cpu()
    return [
        [place, s, m, [(i, int(c[i])) for i in c.nonzero().flatten().tolist()]]
        for (place, _), s, m, c in zip(rows, sums.tolist(), largest.tolist(), counts, strict=True)
    ]


def _merge(into: dict[str, tuple[list, list, dict[int, int]]], part: list[list]) -> None:
    for place, sums, largest, pairs in part:
        seen = into.get(place, ([0.0] * len(sums), [-float("inf")] * len(largest), {}))
        histogram = seen[2] | {i: seen[2].get(i, 0) + n for i, n in pairs}
        total = [a + b for a, b in zip(seen[0], sums, strict=True)]
        into[place] = total, [max(a, b) for a, b in zip(seen[1], largest, strict=True)], histogram
