"""What a step counted, summed over the ranks, and how evenly the experts were used.

`expert_load_max` and `expert_load_min` are the largest and smallest load of an expert, in mean loads (1 and 1 where all
is even), averaged over the layers with experts. With `--moe-per-layer-logging` every layer's loads go into the log.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafp8.core.gpt import GPTModel, ModelChunks
from megafp8.parallel import Axis
from megafp8.step import Statistics


def sum_over(statistics: Statistics, ranks: Axis) -> None:
    """Sums all that was counted over the ranks, which counted the same things, in one message."""
    groups = [group for group in (statistics.sums, statistics.means) if group]
    values = [value for group in groups for value in group.values()]
    if ranks.size == 1 or not values:
        return
    total = ranks.sum_(torch.cat([value.reshape(-1) for value in values]))
    parts = iter(total.split([value.numel() for value in values]))
    for group in groups:
        for name, value in group.items():
            group[name] = next(parts).view(value.shape)


def add_load_means(model: GPTModel | ModelChunks, statistics: Statistics) -> None:
    """Adds the means `expert_load_max` and `expert_load_min` of this stage's layers, after `sum_over`."""
    for router in model.routers():
        load = statistics.sums[router.load_name]
        for end, value in (("max", load.max()), ("min", load.min())):
            statistics.add_mean(f"expert_load_{end}", value / load.mean(), 1)
            if router.by_layer:
                statistics.add_mean(f"expert_load_{end}/{router.layer_name}", value / load.mean(), 1)


def loads_of_layers(
    model: GPTModel | ModelChunks, statistics: Statistics, stages: Axis, known: dict[tuple[str, ...], Sequence[str]]
) -> dict[str, Tensor]:
    """Layer -> tokens of each expert, FP64 [E], of all stages, of the layers that log them.

    known: this stage's layers -> those of all, the same in every step, so that they are asked for once.
    """
    own = {r.layer_name: statistics.sums[r.load_name] for r in model.routers() if r.by_layer}
    if stages.size == 1 or not model.chunks[0].experts_logged:
        return own
    key = ("expert loads", *sorted(own))
    if key not in known:
        known[key] = sorted({name for names in stages.exchange(sorted(own)) for name in names})
    like = torch.zeros(model.chunks[0].experts_logged, dtype=torch.float64, device=model.chunks[0].device)
    return {name: stages.sum_(own.get(name, like).clone()) for name in known[key]}
