"""GPTModel against the naive FP64 model of reference.py: logits, losses, and every gradient."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.build import RecomputePlan
from megafp8.step import Phase, StepContext
from tests.core import reference
from tests.core.helpers import (
    EXOTIC,
    FAMILIES,
    GPT2,
    LLAMA,
    VOCAB,
    Sink,
    batch,
    gradients,
    make_model,
    parameters,
    relative_error,
)

PLANS = {
    "uniform": RecomputePlan(unit=2),
    "uniform, ragged": RecomputePlan(unit=2, layers=None),
    "block": RecomputePlan(unit=1, layers=1),
    "core_attn": RecomputePlan(frozenset({"core_attn"})),
    "mlp": RecomputePlan(frozenset({"mlp"})),
    "layernorm": RecomputePlan(frozenset({"layernorm"})),
    "all parts": RecomputePlan(frozenset({"core_attn", "mlp", "layernorm"})),
}


def double_parameters(model):
    return {name: p.detach().double().requires_grad_() for name, p in parameters(model).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_equal_the_reference(family):
    m = FAMILIES[family]
    model = make_model(m, random=True)
    tokens, labels, mask = batch()
    p = double_parameters(model)

    actual = model(tokens, step=StepContext())
    expected = torch.stack([reference.logits(p, m, t) for t in tokens])[..., :VOCAB]
    assert actual.shape == (2, 16, VOCAB)
    assert relative_error(actual, expected) < 3e-6

    loss = model(tokens, step=StepContext(), labels=labels, loss_mask=mask)
    expected = sum(reference.loss(p, m, VOCAB, *row) for row in zip(tokens, labels, mask, strict=True))
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)

    loss.backward()
    expected.backward()
    for name, grad in gradients(model).items():
        assert relative_error(grad, p[name].grad) < 1e-5, name


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_chunks_of_tokens_give_the_same_loss_and_gradients(kind):
    """Ragged chunks, more chunks than tokens; the head's weight is used again by multi-token prediction."""
    m = replace({"untied": LLAMA, "tied": GPT2}[kind], mtp_num_layers=1)
    tokens, labels, mask = batch()
    results = []
    for chunks in (1, 5, 100):
        model = make_model(m, random=True, loss_chunks=chunks)
        sink = Sink(model)
        loss = model(tokens, step=StepContext(grads=sink), labels=labels, loss_mask=mask)
        loss.backward()
        with torch.no_grad():
            assert model(tokens, step=StepContext(Phase.EVAL), labels=labels, loss_mask=mask) == loss
        results.append((loss, sink.buffers, sorted(name for name in sink.calls if name.endswith("weight"))))
    for loss, buffers, calls in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-6, atol=0)
        assert calls == results[0][2]
        for name, expected in results[0][1].items():
            assert relative_error(buffers[name] - Sink.OFFSET, expected - Sink.OFFSET) < 1e-5, name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_main_grads_are_added_to_and_each_weight_is_ready_once(family):
    """The tied weight collects both of its uses, and is ready after the second, the embedding's."""
    m = FAMILIES[family]
    model, plain = make_model(m, random=True), make_model(m, random=True)
    tokens, labels, mask = batch()
    plain(tokens, step=StepContext(), labels=labels, loss_mask=mask).backward()
    sink = Sink(model)
    model(tokens, step=StepContext(grads=sink), labels=labels, loss_mask=mask).backward()
    for name, expected in gradients(plain).items():
        param = parameters(model)[name]
        if param.grad is None:
            assert relative_error(sink.buffers[name] - Sink.OFFSET, expected) < 1e-5, name
        else:  # what stays with autograd (norms, perhaps biases) is moved by the optimizer's hook
            torch.testing.assert_close(param.grad, expected, msg=name)
    weights = [name for name, p in parameters(model).items() if p.dim() == 2]
    assert sorted(name for name in sink.calls if name in weights) == sorted(weights)
    assert sink.calls[-1].startswith("embedding.")


def test_documents_do_not_attend_across():
    """Packed documents with their own positions equal separate runs, in logits and in gradients."""
    model, apart = make_model(random=True), make_model(random=True)
    tokens, labels, _ = batch(2, 16)
    bounds = [0, 5, 6, 16, 29, 32]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    position_ids = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:], strict=False)]).view(2, 16)
    packed = {"position_ids": position_ids, "cu_seqlens": cu_seqlens}
    logits = model(tokens, step=StepContext(), **packed).view(32, VOCAB)
    for a, b in zip(bounds, bounds[1:], strict=False):
        alone = apart(tokens.view(1, 32)[:, a:b], step=StepContext())
        assert relative_error(logits[a:b], alone[0]) < 1e-6
    model(tokens, step=StepContext(), labels=labels, **packed).backward()
    for a, b in zip(bounds, bounds[1:], strict=False):
        apart(tokens.view(1, 32)[:, a:b], step=StepContext(), labels=labels.view(1, 32)[:, a:b]).backward()
    for name, expected in gradients(apart).items():
        assert relative_error(gradients(model)[name], expected) < 1e-5, name


def test_positions_that_are_not_reset_still_mask_documents():
    """--reset-attention-mask without --reset-position-ids, against dense masks in FP64."""
    model = make_model(GPT2, random=True)
    tokens, labels, mask = batch(1, 16)
    p = double_parameters(model)
    loss = model(
        tokens,
        step=StepContext(),
        labels=labels,
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, 7, 16], dtype=torch.int32),
    )
    documents = (torch.arange(16) >= 7).long()
    expected = reference.loss(p, GPT2, VOCAB, tokens[0], labels[0], mask[0], documents=documents)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def test_microbatch_size_changes_nothing_but_rounding():
    """CASES 18: losses are sums, so any grouping of samples with 3, all, 1 and 0 valid tokens adds up to the same."""
    tokens, labels, _ = batch(4, 16)
    mask = torch.zeros(4, 16)
    mask[0, 2:5], mask[1], mask[2, 7] = 1, 1, 1
    results = []
    for size in (4, 2, 1):
        model = make_model(random=True)
        total = 0.0
        for i in range(0, 4, size):
            rows = slice(i, i + size)
            loss = model(tokens[rows], step=StepContext(), labels=labels[rows], loss_mask=mask[rows])
            loss.backward()
            total += loss.item()
        results.append((total, gradients(model)))
    for total, grads in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-6)
        for name, grad in grads.items():
            assert relative_error(grad, results[0][1][name]) < 1e-5, name


def test_fully_masked_microbatch_gives_zero():
    """CASES 18: 0, not NaN; and zero gradients."""
    model = make_model(random=True)
    tokens, labels, mask = batch()
    loss = model(tokens, step=StepContext(), labels=labels, loss_mask=torch.zeros_like(mask))
    loss.backward()
    assert loss.item() == 0
    assert all((g == 0).all() for g in gradients(model).values())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_vocabulary_padding_changes_nothing(family):
    """CASES 28, 82: padded rows are in no softmax, their gradients are exactly zero, and the rest is the same."""
    tokens, labels, mask = batch()
    results = []
    for padded in (VOCAB, 128, 512):
        model = make_model(replace(FAMILIES[family], padded_vocab_size=padded))
        logits = model(tokens, step=StepContext())
        loss = model(tokens, step=StepContext(), labels=labels, loss_mask=mask)
        loss.backward()
        for name, grad in gradients(model).items():
            if "word_embeddings" in name or "lm_head" in name:
                assert grad.shape[0] == padded
                assert (grad[VOCAB:] == 0).all()
        results.append((logits, loss, {n: g[:VOCAB] for n, g in gradients(model).items()}))
    for logits, loss, grads in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss, results[0][1], rtol=1e-6, atol=0)
        for name, grad in grads.items():
            assert relative_error(grad, results[0][2][name]) < 1e-5, name


def test_padding_rows_cannot_reach_the_loss():
    model = make_model(random=True)
    tokens, labels, _ = batch()
    before = model(tokens, step=StepContext(), labels=labels)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 50.0
        model.embedding.word_embeddings.weight[VOCAB:] = torch.nan
    assert model(tokens, step=StepContext(), labels=labels) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plan", PLANS)
def test_recomputation_changes_no_bit(plan, dtype):
    """With dropout everywhere, documents, and a count of layers that units don't divide."""
    m = replace(LLAMA, num_layers=3, hidden_dropout=0.1, attention_dropout=0.1, qk_layernorm=True)
    tokens, labels, mask = batch()
    cu_seqlens = torch.tensor([0, 5, 16, 32], dtype=torch.int32)
    results = []
    for recompute in (RecomputePlan(), PLANS[plan]):
        model = make_model(m, dtype=dtype, recompute=recompute)
        context = StepContext(seed=3, iteration=2)
        loss = model(tokens, step=context, labels=labels, loss_mask=mask, cu_seqlens=cu_seqlens)
        loss.backward()
        results.append((loss, gradients(model)))
    assert torch.equal(results[0][0], results[1][0])
    for name, grad in results[0][1].items():
        assert torch.equal(grad, results[1][1][name]), name


def test_dropout_depends_on_the_step_only():
    m = replace(EXOTIC, hidden_dropout=0.2, attention_dropout=0.2)
    model = make_model(m)
    tokens, labels, _ = batch()

    def loss(**fields):
        torch.rand(3)  # disturb the global generator
        return model(tokens, step=StepContext(**fields), labels=labels).item()

    base = loss(seed=1)
    assert loss(seed=1) == base
    assert loss(seed=1, phase=Phase.RECOMPUTE) == base
    others = [loss(seed=2), loss(seed=1, iteration=1), loss(seed=1, microbatch=1), loss(seed=1, sample_group=1)]
    assert len({base, *others}) == 5
    silent = make_model(replace(m, hidden_dropout=0.0, attention_dropout=0.0))
    assert loss(phase=Phase.EVAL) == silent(tokens, step=StepContext(), labels=labels).item()


def test_global_random_state_is_left_alone():
    model = make_model(replace(LLAMA, hidden_dropout=0.2, attention_dropout=0.2))
    tokens, labels, _ = batch()
    state = torch.get_rng_state()
    model(tokens, step=StepContext(), labels=labels).backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_too_long_a_sequence_for_learned_positions():
    model = make_model(GPT2)
    with pytest.raises(ValueError, match="--max-position-embeddings 64"):
        model(torch.zeros(1, 65, dtype=torch.long), step=StepContext())


def test_bf16_model_is_close_to_fp32():
    tokens, labels, mask = batch()
    losses = [
        make_model(dtype=dtype)(tokens, step=StepContext(), labels=labels, loss_mask=mask)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert losses[1].dtype == torch.float32
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=2e-3)


def test_one_token():
    model = make_model(random=True)
    p = double_parameters(model)
    actual = model(torch.tensor([[7]]), step=StepContext(phase=Phase.EVAL))
    assert relative_error(actual[0], reference.logits(p, LLAMA, torch.tensor([7]))[:, :VOCAB]) < 3e-6
