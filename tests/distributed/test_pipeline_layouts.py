"""Pipelines together with other kinds of parallelism, and in other models, against one process (NUMERICS.md's
tolerances); CASES 20 (tied embeddings), 22 and 23 (recomputation, auxiliary losses)."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from megafp8.checkpoint import save_checkpoint
from megafp8.core.pipeline.p2p import Links
from megafp8.fp8.param import Weight
from megafp8.optimizer import Optimizer
from megafp8.training.step import PipelinePlan
from tests.cases import quick
from tests.distributed.layouts import GPT2, Layout, compare, run_layout, train
from tests.distributed.pool import WorkerPool
from tests.distributed.test_pipeline import DEEP, RECIPES, assert_same_bits

TIED = GPT2 | {"hidden_size": 32, "num_layers": 4}
MIXED = [
    Layout(tp=2, pp=2),
    Layout(tp=2, sp=True, pp=2, schedule="zero-bubble"),
    Layout(tp=2, sp=True, overlap=True, pp=2, chunks=2, schedule="zero-bubble"),
    Layout(pp=2, dp=2),
    Layout(pp=2, chunks=2, dp=2, schedule="zero-bubble"),
    Layout(pp=2, cp=2),
    Layout(pp=2, cp=2, ring=True, schedule="gpipe"),
    Layout(tp=2, cp=2),
    Layout(tp=2, sp=True, cp=2, ring=True),
]
WIDE = [Layout(tp=2, sp=True, pp=2, dp=2), Layout(tp=2, sp=True, pp=2, cp=2, schedule="zero-bubble")]
FAST = {Layout(tp=2, sp=True, pp=2, schedule="zero-bubble"), Layout(pp=2, dp=2), Layout(pp=2, cp=2)}


@pytest.fixture(scope="module")
def one_process(pool_of_module):
    return {name: run_layout(pool_of_module, model, Layout()) for name, model in (("untied", DEEP), ("tied", TIED))}


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[] if x in FAST else [pytest.mark.slow], id=str(x)) for x in MIXED]
)
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_layout_equals_one_process(pool, one_process, name, layout):
    compare(run_layout(pool, {"untied": DEEP, "tied": TIED}[name], layout), one_process[name])


@pytest.mark.slow
def test_eight_ranks_equal_one_process(one_process):
    eight = WorkerPool(8)
    try:
        for layout in WIDE:
            compare(run_layout(eight, DEEP, layout), one_process["untied"])
            compare(run_layout(eight, TIED, layout), one_process["tied"])
    finally:
        eight.close()


@pytest.mark.parametrize(
    "layout", [Layout(pp=2), Layout(pp=2, chunks=2), Layout(pp=4, schedule="zero-bubble")], ids=str
)
def test_tied_embeddings_equal_one_process(pool, one_process, layout):
    compare(run_layout(pool, TIED, layout), one_process["tied"])


TIED_NAME = "embedding.word_embeddings.weight"


def train_and_watch_the_tied_weight(values, layout, steps):
    """This rank's copy of the tied weight after every step, and whether it has one."""
    seen, original = [], Optimizer.step

    def step(self, **options):
        stats = original(self, **options)
        if TIED_NAME in self.masters.views:
            seen.append((self.masters.views[TIED_NAME].clone(), self.weights.params[TIED_NAME].detach().clone()))
        return stats

    with mock.patch.object(Optimizer, "step", step):
        run = train(values, layout, steps)
    return seen, run.norms


def test_copies_of_the_tied_weight_never_drift(pool, one_process):
    """CASES 20: PP2 x DP2, bit-equal after each of five steps; the gradient's norm counts the weight once."""
    ranks = pool.run_on(4, train_and_watch_the_tied_weight, TIED, Layout(pp=2, dp=2), 5)
    assert [len(seen) for seen, _ in ranks] == [5] * 4, "first and last stage both have it"
    for step in range(5):
        for kind in (0, 1):
            first = ranks[0][0][step][kind]
            assert all(torch.equal(seen[step][kind], first) for seen, _ in ranks[1:])
    moved = ranks[0][0][4][0] - ranks[0][0][0][0]
    assert moved.any()
    for norm, expected in zip(ranks[0][1], one_process["tied"].norms, strict=False):
        assert norm == pytest.approx(expected, rel=1e-6)


SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


DEFERRED, CHUNKED = Layout(pp=2, dp=2, schedule="zero-bubble"), Layout(pp=2, chunks=2, dp=2)


@pytest.mark.parametrize(
    ("name", "layout"),
    quick(
        [(name, layout) for name in ("untied", "tied") for layout in (DEFERRED, CHUNKED)],
        {("untied", DEFERRED), ("tied", CHUNKED)},
        id=lambda case: f"{case[0]}-{case[1]}",
    ),
)
def test_sharded_optimizer_and_overlap(pool, one_process, name, layout):
    """A bucket is reduced when the last microbatch's gradients are there, deferred ones included."""
    compare(run_layout(pool, {"untied": DEEP, "tied": TIED}[name] | SHARDED, layout), one_process[name])


# Recomputation, dropout, uneven stages, and models that are not plain


EXPERTS = DEEP | {
    "num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "moe_aux_loss_coeff": (1e-2,),
    "moe_router_load_balancing_type": ("aux_loss",), "moe_router_enable_expert_bias": False, "mtp_num_layers": 1,
}  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")}
VARIANTS = {
    "full recompute, blockwise": (RECIPES["blockwise"] | FULL, Layout(pp=2, schedule="zero-bubble")),
    "full recompute, delayed": (RECIPES["delayed"] | FULL, Layout(pp=2, chunks=2)),
    "selective recompute, blockwise": (RECIPES["blockwise"] | SELECTIVE, Layout(pp=2, schedule="zero-bubble")),
    "FP8 primary weights": (
        RECIPES["tensorwise"] | {"fp8_param_gather": True, "use_distributed_optimizer": True},
        Layout(pp=2, chunks=2, schedule="zero-bubble"),
    ),
    "dropout": (DEEP | {"hidden_dropout": 0.2, "attention_dropout": 0.1}, Layout(pp=2, chunks=2)),
    "first stage small": (DEEP | {"decoder_first_pipeline_num_layers": 1}, Layout(pp=2)),
    "ends count": (
        DEEP | {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        Layout(pp=2),
    ),
    "written out": (DEEP | {"pipeline_model_parallel_layout": "E|tt|tt|L"}, Layout(pp=2, schedule="zero-bubble")),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_has_the_bits_of_one_process(pool, name):
    """CASES 22: recomputed or not, one process or a pipeline: the same bits."""
    values, layout = VARIANTS[name]
    alone = {key: value for key, value in values.items() if "pipeline" not in key and "recompute" not in key}
    assert_same_bits(run_layout(pool, values, layout), run_layout(pool, alone, Layout()))


@pytest.mark.slow
def test_experts_and_prediction_equal_one_process(pool):
    """Auxiliary losses on every stage; the prediction of tokens ahead uses the embedding on the last stage again."""
    expected = run_layout(pool, EXPERTS, Layout())
    for layout in (Layout(pp=2), Layout(pp=2, chunks=2, schedule="zero-bubble"), Layout(pp=2, dp=2)):
        compare(run_layout(pool, EXPERTS, layout), expected)


@pytest.mark.parametrize("microbatches", quick([1, 2, 3, 4, 5], {1, 3, 5}))
def test_any_number_of_microbatches(pool, microbatches):
    """CASES 80: fewer than stages, and numbers that nothing divides."""
    values = DEEP | {"global_batch_size": 2 * microbatches}
    expected = run_layout(pool, values, Layout(), 2)
    for layout in (Layout(pp=2, chunks=2), Layout(pp=4, schedule="zero-bubble")):
        assert_same_bits(run_layout(pool, values, layout, 2), expected)


@pytest.mark.parametrize("microbatches", quick([4, 8], {8}))
def test_accumulation_divides_once(pool, microbatches):
    """CASES 19: more microbatches of the same samples: gradients are divided once, by the tokens of them all."""
    expected = run_layout(pool, DEEP, Layout(), 2)
    values = DEEP | {"micro_batch_size": 8 // microbatches}
    for layout in (Layout(pp=2), Layout(pp=2, chunks=2)):
        compare(run_layout(pool, values, layout, 2), expected)


# From a trained model


def save_to(directory, model, optimizer, parallel):
    save_checkpoint(directory, 50, optimizer.weights.state() | optimizer.state(), {}, parallel=parallel)


@pytest.fixture(scope="module", params=["untied", "tied"])
def trained(request, pool_of_module, tmp_path_factory):
    """A pipeline trained for 50 steps and saved: its model, the directory, and one process's next 5 steps."""
    values = {"untied": DEEP, "tied": TIED}[request.param]
    directory = str(tmp_path_factory.mktemp("trained"))
    fast = values | {"lr": 3e-3, "min_lr": 3e-3}
    run = run_layout(pool_of_module, fast, Layout(pp=2), 50, observe=partial(save_to, directory))
    assert run.losses[-1] < 0.8 * run.losses[0]
    return request.param, values, directory, run_layout(pool_of_module, values, Layout(), 5, load=directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(pp=4), Layout(pp=2, chunks=2, schedule="zero-bubble"), Layout(pp=2, dp=2), Layout(pp=2, cp=2)],
    ids=str,
)  # fmt: skip
def test_trained_pipeline_goes_on_in_any_layout(pool, trained, layout):
    name, values, directory, expected = trained
    actual = run_layout(pool, values, layout, 5, load=directory)
    compare(actual, expected)
    if name == "untied" and layout.dp == layout.cp == 1:
        assert_same_bits(actual, expected)


# Zero-bubble really defers


def watch_executor(notes, executor):
    notes.append(([str(action) for action in executor.ran], executor.wgrads.peak_bytes))


def order_and_bytes(values, layout, steps, limit=None):
    notes, original = [], PipelinePlan.of
    limited = lambda config, parallel: replace(original(config, parallel), wgrad_limit_bytes=limit)  # noqa: E731
    with mock.patch.object(PipelinePlan, "of", limited):
        train(values, layout, steps, watch=partial(watch_executor, notes))
    return notes


def test_zero_bubble_defers(pool):
    """The actions in the order in which they ran, and what the queue held: FP8 operands of every linear, exactly."""
    values = RECIPES["blockwise"]
    (first, *_), (last, *_) = pool.run_on(2, order_and_bytes, values, Layout(pp=2, schedule="zero-bubble"), 1)
    assert first[0] == ["F0", "F1", "I0", "W0", "F2", "I1", "W1", "F3", "I2", "W2", "I3", "W3"]
    assert last[0] == ["F0", "I0", "F1", "I1", "W0", "F2", "I2", "W1", "F3", "I3", "W2", "W3"]
    tokens = 2 * 16
    linears = [(64, 32), (32, 32), (96, 32), (32, 48)]  # qkv of 4 + 2 x 2 heads of 8, proj, fc1, fc2: two layers each
    one = 2 * sum(tokens * (rows + columns) + 4 * (rows + columns) for rows, columns in linears)
    assert first[1] == one, "a microbatch's, which run at once"
    assert last[1] == 2 * one, "two microbatches wait on the last stage"
    none, _ = pool.run_on(2, order_and_bytes, values, Layout(pp=2), 1)
    assert none[0][1] == 0, "1F1B defers nothing"


def test_queue_keeps_to_its_limit(pool):
    """--wgrad-queue-mib: the oldest run early, and the bits stay."""
    values = RECIPES["blockwise"]
    for limit in (0, 9000):
        notes = pool.run_on(2, order_and_bytes, values, Layout(pp=2, schedule="zero-bubble"), 1, limit)
        largest = 2 * 16 * (96 + 32) + 4 * (96 + 32)
        assert all(rank[0][1] <= max(limit, largest) for rank in notes)


# What travels, and how often weights are quantized


def watched(values, layout):
    """(dtype and shape of every message sent, how often weights were quantized, number of FP8 weights)."""
    sent, derived = [], []
    send, quantize = Links.send, Weight._quantize

    def note_send(self, message, x, *more):
        sent.append((str(message), x.dtype, tuple(x.shape)))
        return send(self, message, x, *more)

    def note_quantize(self, *args, **options):
        derived.append(id(self))
        return quantize(self, *args, **options)

    with mock.patch.object(Links, "send", note_send), mock.patch.object(Weight, "_quantize", note_quantize):
        train(values, layout, 1)
    return sent, len(derived), len(set(derived))


def test_messages_are_bf16_and_weights_are_quantized_once_a_step(pool):
    """CASES 05: all microbatches of a step use the same FP8 copies, both made in one pass; nothing travels in FP32."""
    first, second = pool.run_on(2, watched, RECIPES["blockwise"], Layout(pp=2, schedule="zero-bubble"))
    for (sent, derived, weights), what, stage in ((first, "hidden states", 0), (second, "gradient", 0)):
        shape = 2 * 16, 32
        expected = [(f"{what} of microbatch {m} after stage {stage}", torch.bfloat16, shape) for m in range(4)]
        assert sent == expected
        assert weights == 2 * 4
        assert derived == weights
