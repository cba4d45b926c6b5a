"""Multi-token prediction: which tokens are joined, its loss against a naive one in FP64, and shared weights."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.mtp import look_ahead
from megafp8.step import Phase, Statistics, StepContext
from tests.core import reference
from tests.core.helpers import GPT2, LLAMA, VOCAB, Sink, batch, gradients, make_model, parameters, relative_error

MODELS = {"untied": LLAMA, "tied": replace(GPT2, mtp_loss_scaling_factor=0.3)}


def test_look_ahead_stays_in_the_sequence():
    tokens = torch.arange(10)
    ahead = look_ahead(2, tokens, tokens % 5, tokens + 1, torch.ones(10), Sequences(2, 5))
    assert ahead.loss_mask.tolist() == [1, 1, 1, 0, 0] * 2
    assert ahead.tokens[:3].tolist() == [2, 3, 4]
    assert ahead.labels[5:8].tolist() == [8, 9, 10]
    assert ahead.positions[5:8].tolist() == [2, 3, 4]


def test_look_ahead_stays_in_the_document():
    """Documents of 3, 1 and 4 tokens; the mask of the token ahead counts."""
    tokens, bounds = torch.arange(8), torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    mask = torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 1])
    ahead = look_ahead(1, tokens, tokens, tokens + 1, mask, Sequences(1, 8, cu_seqlens=bounds))
    assert ahead.loss_mask.tolist() == [1, 1, 0, 0, 1, 0, 1, 0]


def naive_loss(p, m, tokens, labels, mask):
    """Main loss plus the scaled losses of the depths, one sequence, in FP64."""
    s, depths = len(tokens), m.mtp_num_layers
    causal = torch.ones(s, s, dtype=torch.bool).tril()
    positions = torch.arange(s)
    table = p["embedding.word_embeddings.weight"]
    x = table[tokens]
    if m.position_embedding_type == "learned_absolute":
        x = x + p["embedding.position_embeddings.weight"][positions]

    def layer(x, name):
        h = reference.norm(x, p, f"{name}.input_norm", m)
        x = x + reference.attention(h, p, f"{name}.attention", m, positions, causal)
        return x + reference.mlp(reference.norm(x, p, f"{name}.mlp_norm", m), p, f"{name}.mlp", m)

    for i in range(m.num_layers):
        x = layer(x, f"layers.{i}")
    hidden = reference.norm(x, p, "final_norm", m)
    head = p["lm_head.weight" if m.untie_embeddings_and_output_weights else "embedding.word_embeddings.weight"]

    def loss(hidden, labels, mask):
        log_p = (hidden @ head.T)[:, :VOCAB].log_softmax(-1)
        return -(log_p[torch.arange(s), labels] * mask).sum()

    losses = [loss(hidden, labels, mask)]
    for k in range(depths):
        ahead = (positions + k + 1).clamp(max=s - 1)
        embedded = table[tokens[ahead]]
        if m.position_embedding_type == "learned_absolute":
            embedded = embedded + p["embedding.position_embeddings.weight"][ahead]
        joined = [reference.norm(embedded, p, f"mtp.{k}.embedding_norm", m)]
        joined.append(reference.norm(hidden, p, f"mtp.{k}.hidden_norm", m))
        x = torch.cat(joined, 1) @ p[f"mtp.{k}.eh_proj.weight"].T
        hidden = reference.norm(layer(x, f"mtp.{k}.layer"), p, f"mtp.{k}.final_norm", m)
        inside = (positions + k + 1 < s).double()
        losses.append(loss(hidden, labels[ahead], mask[ahead] * inside))
    return losses


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("depths", [1, 2])
def test_gradients_against_float64(kind, depths):
    m = replace(MODELS[kind], mtp_num_layers=depths)
    model = make_model(m, random=True)
    tokens, labels, mask = batch(1, 16)
    statistics = Statistics()
    loss = model(tokens, step=StepContext(statistics=statistics), labels=labels, loss_mask=mask)
    loss.backward()
    exact = {name: p.detach().double().requires_grad_() for name, p in parameters(model).items()}
    main, *ahead = naive_loss(exact, m, tokens[0], labels[0], mask[0].double())
    assert loss.item() == pytest.approx(main.item(), rel=1e-6)
    for k, expected in enumerate(ahead):
        total, count = statistics.means[f"mtp_{k + 1}_loss"].tolist()
        assert total == pytest.approx(expected.item(), rel=1e-6)
        assert count == mask[0, k + 1 :].sum()
    (main + m.mtp_loss_scaling_factor / depths * sum(ahead)).backward()
    for name, grad in gradients(model).items():
        assert relative_error(grad, exact[name].grad) < 1e-5, name


@pytest.mark.parametrize("kind", MODELS)
def test_shared_weights_become_ready_once_and_last(kind):
    """Embedding and LM head are used by every depth: their gradients are ready when all uses have been added."""
    m = replace(MODELS[kind], mtp_num_layers=2)
    model, plain = make_model(m, random=True), make_model(m, random=True)
    left = {}

    class Watching(Sink):
        def ready(self, param):
            super().ready(param)
            left[self.calls[-1]] = self.buffer(param).clone()

    sink = Watching(model)
    tokens, labels, mask = batch(2, 16)
    model(tokens, step=StepContext(grads=sink), labels=labels, loss_mask=mask).backward()
    plain(tokens, step=StepContext(), labels=labels, loss_mask=mask).backward()
    table = "embedding.word_embeddings.weight"
    assert sink.calls.count(table) == 1
    assert len(sink.calls) == len(set(sink.calls))
    for name in {table, "lm_head.weight"} & sink.buffers.keys():
        assert torch.equal(left[name], sink.buffers[name]), "it grew after it had been called ready"
        assert relative_error(sink.buffers[name] - Sink.OFFSET, gradients(plain)[name]) < 1e-5


def test_evaluation_has_the_main_loss_only():
    model = make_model(replace(LLAMA, mtp_num_layers=1), random=True)
    plain = make_model(LLAMA, random=True)
    with torch.no_grad():
        for name, param in parameters(plain).items():
            param.copy_(parameters(model)[name])
    tokens, labels, mask = batch()
    step = StepContext(phase=Phase.EVAL)
    calls = []
    model.mtp[0].register_forward_hook(lambda *_: calls.append(1))
    ours = model(tokens, step=step, labels=labels, loss_mask=mask)
    assert torch.equal(ours, plain(tokens, step=step, labels=labels, loss_mask=mask))
    assert not calls
    assert torch.equal(model(tokens, step=StepContext(), labels=labels, loss_mask=mask).detach(), ours)


def test_packed_documents_equal_documents_alone():
    """Two documents in one sequence have the losses and gradients of two runs."""
    m = replace(LLAMA, mtp_num_layers=2)
    packed, alone = make_model(m, random=True), make_model(m, random=True)
    tokens, labels, _ = batch(1, 16)
    bounds = torch.tensor([0, 7, 16], dtype=torch.int32)
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    statistics, sums = Statistics(), Statistics()
    loss = packed(
        tokens,
        step=StepContext(statistics=statistics),
        labels=labels,
        position_ids=positions,
        cu_seqlens=bounds,
    )
    loss.backward()
    total = 0
    for part in (slice(0, 7), slice(7, 16)):
        one = alone(tokens[:, part], step=StepContext(statistics=sums), labels=labels[:, part])
        one.backward()
        total += one.item()
    assert loss.item() == pytest.approx(total, rel=1e-6)
    for name, value in sums.means.items():
        torch.testing.assert_close(statistics.means[name], value, rtol=1e-6, atol=0)
    for name, grad in gradients(packed).items():
        assert relative_error(grad, gradients(alone)[name]) < 1e-5, name
