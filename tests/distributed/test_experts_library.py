"""DeepEP's interface, its part played by gloo: the same results as the project's own all-to-all."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megafp8.parallel import ParallelContext
from tests.distributed.layouts import Layout, distance, train
from tests.distributed.test_families import EXPERTS

FP8 = EXPERTS | {"bf16": True, "fp8_format": "e4m3", "hidden_size": 128, "num_layers": 1, "moe_layer_freq": "1"}


class Sizes:
    def get_nvl_buffer_size_hint(self, hidden_bytes, ranks):
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, ranks):
        return 0


class Buffer:
    """`deep_ep.Buffer` as its documentation describes it, for ranks with as many tokens each."""

    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: Sizes())

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        assert num_nvl_bytes > 0
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def _gather(self, x):
        raw = x.contiguous().view(torch.uint8) if x.element_size() == 1 else x.contiguous()
        parts = [torch.empty_like(raw) for _ in range(self.size)]
        dist.all_gather(parts, raw, group=self.group)
        return torch.cat(parts).view(x.dtype)

    def get_dispatch_layout(self, topk_idx, num_experts):
        here = num_experts // self.size
        in_rank = torch.stack([((topk_idx // here == r) & (topk_idx >= 0)).any(1) for r in range(self.size)], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None, num_tokens_per_rank=None,
                 num_tokens_per_rdma_rank=None, is_token_in_rank=None, num_tokens_per_expert=None):  # fmt: skip
        parts = [self._gather(part) for part in (x if isinstance(x, tuple) else (x,))]
        if handle is None:
            assert int(num_tokens_per_rank.sum()) == int(is_token_in_rank.sum())
            here = len(num_tokens_per_expert) // self.size
            source = self._gather(is_token_in_rank.to(torch.uint8))[:, self.rank].nonzero().squeeze(1)
            chosen, weights = self._gather(topk_idx)[source], self._gather(topk_weights)[source]
            own = (chosen >= 0) & (chosen // here == self.rank)
            chosen, weights = (chosen % here).where(own, -1), weights.where(own, 0.0)
            handle = SimpleNamespace(source=source, tokens=len(topk_idx))
        else:
            assert topk_idx is None
            chosen = weights = None
        taken = [part.view(torch.uint8)[handle.source].view(part.dtype) if part.element_size() == 1
                 else part[handle.source] for part in parts]  # fmt: skip
        return tuple(taken) if isinstance(x, tuple) else taken[0], chosen, weights, None, handle, None

    def combine(self, x, handle, topk_weights=None):
        totals = []
        for part in (x, topk_weights):
            if part is None:
                totals.append(None)
                continue
            whole = torch.zeros(self.size * handle.tokens, part.shape[1])
            whole[handle.source] = part.float()
            dist.all_reduce(whole, group=self.group)
            totals.append(whole[self.rank * handle.tokens :][: handle.tokens].to(part.dtype))
        return *totals, None


def train_with_it(values, layout, steps):
    sys.modules["deep_ep"] = SimpleNamespace(Buffer=Buffer)
    try:
        return train(values, layout, steps)
    finally:
        del sys.modules["deep_ep"]


@pytest.mark.parametrize("fp8", [False, True])
def test_equals_all_to_all(pool, fp8):
    """Each expert has the same rows; sums of a token's outputs are rounded a rank at a time."""
    model = FP8 | {"moe_fp8_dispatch": fp8}
    own = pool.run_on(2, train, model, Layout(dp=2, ep=2), 1)
    by_library = pool.run_on(2, train_with_it, model, Layout(dp=2, ep=2, dispatcher="flex"), 1)
    for expected, actual in zip(own, by_library, strict=True):
        assert actual.losses == pytest.approx(expected.losses, rel=1e-3)
        for name, (_, _, grad) in expected.grads.items():
            assert distance(actual.grads[name][2], grad) < 0.05, name


def test_without_it_the_mend_is_named():
    from dataclasses import replace

    from megafp8.core.build import BuildContext, DispatchPlan
    from megafp8.core.moe.dispatch import dispatcher_of
    from megafp8.parallel import Axis
    from tests.core.families import MOE

    ep = Axis(2, 0, None)
    parallel = replace(ParallelContext(), ep=ep, ep_etp=ep)
    with pytest.raises(ValueError, match="deep_ep is not installed; install DeepEP, or use alltoall"):
        dispatcher_of("layers.0.mlp.experts", BuildContext(MOE, parallel=parallel, dispatch=DispatchPlan(library=True)))
