"""Runs in which the first gradient of a step is written over a poisoned buffer, or added to zeros: the same bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from megafp8.fp8 import Linear
from megafp8.optimizer.buffers import GradBuffers
from megafp8.params import GradSink
from megafp8.step import StepContext
from tests.core import equalities as eq

GPT2 = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "group_query_attention": False,
    "num_query_groups": None,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
}
EXPERTS = {"num_experts": 16, "moe_ffn_hidden_size": 32, "moe_router_topk": 2}  # some have no tokens
ALIKE = {
    "bf16": {},
    "fp32": {"bf16": False},
    "tied, learned positions, biases": GPT2,
    "tied, predicting ahead, loss in pieces": {
        "untie_embeddings_and_output_weights": False,
        "mtp_num_layers": 1,
        "cross_entropy_chunks": 2,
    },
    "recomputed": eq.RECIPES["blockwise"] | eq.RECOMPUTE["full"],
    "experts": EXPERTS,
    "experts, fp32": EXPERTS | {"bf16": False},
    **{f"{name}, experts": EXPERTS | recipe for name, recipe in eq.RECIPES.items()},
    **eq.RECIPES,
}


@contextmanager
def starting(act: Callable[[GradBuffers], None]) -> Iterator[None]:
    """Inside, `act` is done to gradient buffers when a step begins."""
    original = GradBuffers.zero

    def zero(self, microbatches=None):
        original(self, microbatches)
        act(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradBuffers, "zero", zero)
        yield


def poison(buffers: GradBuffers) -> None:
    """What nobody writes to shows."""
    for view in buffers._stale.values():
        view.fill_(torch.nan)


class Buffers(GradSink):
    """Gradients of one parameter; nothing is counted, which torch.compile could not trace."""

    def __init__(self, param: torch.Tensor) -> None:
        self.one = torch.ones(param.shape, device=param.device)

    def buffer(self, param: torch.Tensor) -> torch.Tensor:
        return self.one

    def ready(self, param: torch.Tensor) -> None:
        pass


def compiled_and_plain(device: torch.device, backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The gradients of a BF16 linear's input and, in FP32, of its weight, with and without torch.compile."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 64, generator=generator).to(device, torch.bfloat16) for n in (48, 32))
    results = []
    for compiled in (True, False):
        linear = Linear(64, 48, bias=False, params_dtype=torch.bfloat16, device=device)
        linear.weight.data.copy_(weight)
        sink, leaf = Buffers(linear.weight), x.clone().requires_grad_()
        run = torch.compile(linear, backend=backend, fullgraph=True) if compiled else linear
        for _ in range(2):
            run(leaf, StepContext(grads=sink)).float().square().sum().backward()
        results.append((leaf.grad, sink.one))
    return results


def traces(flags: dict, device: torch.device, steps: int = 2) -> tuple[eq.Trace, eq.Trace]:
    """Gradients written over what was there, and added to zeros."""
    with starting(poison):
        written = eq.trace(flags, device, steps=steps)
    with starting(GradBuffers.settle):
        return written, eq.trace(flags, device, steps=steps)
