"""The router on a GPU: the CPU's choices, ties and drops, and no number that the host waits for."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.build import BuildContext
from megafp8.core.moe.capacity import drop
from megafp8.core.moe.logits import Logits, three_parts
from megafp8.core.moe.permutation import Permutation, combine, permute
from megafp8.core.moe.router import Router
from megafp8.core.moe.routing import RoutingRule, best, choose, sinkhorn
from megafp8.core.transformer.core_attention import Sequences
from megafp8.params import GradSink
from megafp8.step import Statistics, StepContext
from tests.core.families import DEEPSEEK
from tests.core.helpers import relative_error
from tests.gpu.waiting import no_waiting

EXPERTS, TOKENS = 64, 512


@pytest.fixture
def logits():
    """Many ties: few different values."""
    return torch.randint(0, 5, (TOKENS, EXPERTS), generator=torch.Generator().manual_seed(0)).float()


RULES = {
    "softmax": RoutingRule(4),
    "groups": RoutingRule(8, sigmoid=True, groups=8, group_topk=4, group_scores=2),
}


@pytest.mark.parametrize("kind", RULES)
def test_ties_are_the_cpus(logits, kind):
    here, there = choose(logits, RULES[kind])[0], choose(logits.cuda(), RULES[kind])[0]
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize(("experts", "count"), [(8, 2), (100, 8), (128, 8), (512, 6), (600, 3)])
def test_best_are_those_of_a_stable_sort(experts, count):
    """Equal scores, zeros of both signs, infinities and NaN among them; strided rows."""
    scores = torch.randint(-9, 10, (3000, experts + 3)).float()[:, :experts]
    scores[::3] = torch.randn(1000, experts)
    scores[5, ::2], scores[5, 1::2] = 0.0, -0.0
    scores[6, 1], scores[6, 3], scores[6, 4], scores[7] = torch.nan, torch.inf, -torch.inf, -torch.inf
    wide = torch.full((3000, experts + 3), torch.nan, device="cuda")
    wide[:, :experts] = scores.cuda()
    assert torch.equal(best(wide[:, :experts], count).cpu(), best(scores, count))


def test_parts_of_numbers_are_the_cpus():
    x = torch.randn(1000, 128) * torch.logspace(-30, 30, 128)
    assert torch.equal(three_parts(x.cuda()).cpu(), three_parts(x))
    assert torch.equal(three_parts(x.cuda().t()).cpu(), three_parts(x.t()))


@pytest.mark.parametrize("by_position", [False, True])
def test_drops_are_the_cpus(logits, by_position):
    experts, weights = choose(logits, RULES["softmax"])
    here = drop(experts, weights, EXPERTS, 20, by_position=by_position)
    there = drop(experts.cuda(), weights.cuda(), EXPERTS, 20, by_position=by_position)
    assert (here == EXPERTS).any()
    assert torch.equal(here, there.cpu())
    x = torch.randn(TOKENS, 8)
    for capacity in (None, 20):
        parts = [(here, x), (there, x.cuda())]
        orders = [(Permutation.of(e, EXPERTS, drops=True, capacity=capacity), x) for e, x in parts]
        out = [combine(permute(x, order), order).cpu() for order, x in orders]
        assert torch.equal(*out)


def test_sinkhorn_is_near_the_cpus():
    x = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1)) * 2
    torch.testing.assert_close(sinkhorn(x.cuda()).cpu(), sinkhorn(x), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("factor", [None, 1.0])
def test_nothing_waits_for_the_device(factor):
    """Router, permutation and losses, forward and backward: one sync would be an error."""
    model = replace(
        DEEPSEEK,
        moe_router_load_balancing_type=("seq_aux_loss", "global_aux_loss"),
        moe_aux_loss_coeff=(0.1, 0.1),
        moe_z_loss_coeff=0.1,
        moe_expert_capacity_factor=factor,
        moe_pad_expert_input_to_capacity=factor is not None,
    )
    router = Router("r", BuildContext(model, device=torch.device("cuda")))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(64, model.hidden_size, device="cuda", requires_grad=True)
    with no_waiting():
        routing = router(x, Sequences(2, 32), StepContext(statistics=Statistics()))
        order = Permutation.of(routing.experts, model.num_experts, drops=routing.drops, capacity=routing.capacity)
        (combine(permute(x, order), order).sum() + routing.weights.sum()).backward()
    assert torch.isfinite(x.grad).all()


class OneBuffer(GradSink):
    """An FP32 gradient buffer, written anew by each backward."""

    def __init__(self, param):
        self.grad = torch.full(param.shape, torch.nan, device=param.device)

    def target(self, param):
        return self.grad, False

    def ready(self, param):
        pass


@pytest.mark.parametrize("experts", [4, 8, 60, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_have_fp32s_error(dtype, experts):
    """Against FP64; with operands or a gradient rounded to BF16 the error would be a hundred times as large."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(n, m, generator=generator) for n, m in ((300, 512), (experts, 512), (300, experts)))
    x, weight, grad = x.to("cuda", dtype).requires_grad_(), weight.to("cuda", dtype).requires_grad_(), grad.cuda()
    sink = OneBuffer(weight)

    def run():
        x.grad = None
        logits = Logits.apply(x, weight, torch.float32, StepContext(grads=sink))
        logits.backward(grad)
        return logits

    run()
    with no_waiting():
        logits = run()
    x64, w64, g64 = x.detach().double(), weight.detach().double(), grad.double()
    assert logits.dtype == torch.float32
    assert relative_error(logits, x64 @ w64.t()) < 1e-5
    assert relative_error(sink.grad, g64.t() @ x64) < 1e-5
    assert relative_error(x.grad, g64 @ w64) < (2.5e-3 if dtype == torch.bfloat16 else 1e-5)
