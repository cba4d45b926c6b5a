"""Experts and multi-token prediction where ranks share a sequence, and the losses that count over ranks."""

from unittest.mock import patch

import pytest
import torch

from megafp8.core.moe import router
from tests.distributed.layouts import Layout, compare, run_layout
from tests.distributed.test_families import DEEPSEEK, EXPERTS, STEPS, biases

LOSSES = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.2, 0.3),
    "moe_z_loss_coeff": 0.01,
}
MODELS = {"experts": EXPERTS | LOSSES, "deepseek": DEEPSEEK | LOSSES | {"mtp_num_layers": 2}}


def routers(model, optimizer, parallel):
    return biases(model, optimizer, parallel), {router.name: router.shares.clone() for router in model.routers()}


@pytest.fixture(scope="module")
def alone(pool_of_module):
    return {name: run_layout(pool_of_module, model, Layout(), STEPS, observe=routers) for name, model in MODELS.items()}


CASES = [
    pytest.param("experts", Layout(cp=2), id="experts-CP2"),
    pytest.param("deepseek", Layout(cp=2, ring=True), id="deepseek-CP2-ring"),
    pytest.param("deepseek", Layout(dp=2), id="deepseek-DP2"),
    pytest.param("deepseek", Layout(cp=2, ep=2), id="deepseek-CP2-EP2"),
    pytest.param("deepseek", Layout(tp=2, cp=2), id="deepseek-TP2xCP2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_layout_equals_one_process(pool, alone, name, layout):
    """CASES 52, 54: gradients of three losses at once, the counts they take, and tokens that are predicted ahead."""
    run = run_layout(pool, MODELS[name], layout, STEPS, observe=routers)
    compare(run, alone[name])
    for expected, *others in zip(*[alone[name].extra[0]], *run.extra, strict=True):
        for other in others:
            assert expected.keys() == other.keys()
            assert all(torch.equal(value, other[router]) for router, value in expected.items())


def count_own_tokens_alone(stack):
    plain = router.balance_loss
    stack.enter_context(patch.object(router, "balance_loss", lambda *args: plain(*args[:3]) / args[3].size))


def test_counts_of_own_tokens_alone_are_noticed(pool, alone):
    """The fault that the tests above are for, planted."""
    run = run_layout(pool, MODELS["experts"], Layout(cp=2), STEPS, fault=count_own_tokens_alone)
    with pytest.raises(AssertionError, match="router"):
        compare(run, alone["experts"])
