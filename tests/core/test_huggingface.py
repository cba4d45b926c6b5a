"""The model against transformers' Llama and GPT-2, with weights mapped by hand."""

from dataclasses import replace

import pytest
import torch

from megafp8.step import Phase, StepContext
from tests.core.helpers import GPT2, LLAMA, VOCAB, batch, gradients, make_model, parameters, relative_error

EVAL = StepContext(phase=Phase.EVAL)


def fused_qkv(q, k, v, groups):
    """Rows of all heads' q, k and v -> our order: each group's query heads, then its key, then its value."""
    parts = (x.view(groups, -1, *x.shape[1:]) for x in (q, k, v))
    return torch.cat(list(parts), 1).flatten(0, 1)


def llama(m, seed=0):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=m.hidden_size,
        intermediate_size=m.ffn_hidden_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.num_query_groups,
        head_dim=m.kv_channels,
        rms_norm_eps=m.norm_epsilon,
        max_position_embeddings=m.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": m.rotary_base},
        attention_bias=m.add_qkv_bias,
        tie_word_embeddings=not m.untie_embeddings_and_output_weights,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config)


def llama_mapping(m, value):
    """Our name -> tensor; `value(name)` gives a tensor of the Llama model (weights or gradients)."""
    mapped = {
        "embedding.word_embeddings.weight": value("model.embed_tokens.weight"),
        "final_norm.weight": value("model.norm.weight"),
    }
    if m.untie_embeddings_and_output_weights:
        mapped["lm_head.weight"] = value("lm_head.weight")
    for i in range(m.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        q, k, v = (value(f"{theirs}.self_attn.{x}_proj.weight") for x in "qkv")
        mapped[f"{ours}.attention.qkv.weight"] = fused_qkv(q, k, v, m.num_query_groups)
        mapped[f"{ours}.attention.proj.weight"] = value(f"{theirs}.self_attn.o_proj.weight")
        gate_up = [value(f"{theirs}.mlp.{x}_proj.weight") for x in ("gate", "up")]
        mapped[f"{ours}.mlp.fc1.weight"] = torch.cat(gate_up)
        mapped[f"{ours}.mlp.fc2.weight"] = value(f"{theirs}.mlp.down_proj.weight")
        mapped[f"{ours}.input_norm.weight"] = value(f"{theirs}.input_layernorm.weight")
        mapped[f"{ours}.mlp_norm.weight"] = value(f"{theirs}.post_attention_layernorm.weight")
    return mapped


def gpt2(m, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=m.max_position_embeddings,
        n_embd=m.hidden_size,
        n_layer=m.num_layers,
        n_head=m.num_attention_heads,
        n_inner=m.ffn_hidden_size,
        layer_norm_epsilon=m.norm_epsilon,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def gpt2_mapping(m, value):
    """GPT-2 stores its matrices transposed, and q, k, v of all heads one after the other."""

    def turned(name):
        return value(name).t()  # a bias stays as it is

    mapped = {
        "embedding.word_embeddings.weight": value("transformer.wte.weight"),
        "embedding.position_embeddings.weight": value("transformer.wpe.weight"),
        "final_norm.weight": value("transformer.ln_f.weight"),
        "final_norm.bias": value("transformer.ln_f.bias"),
    }
    names = {"attn.c_proj": "attention.proj", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    for i in range(m.num_layers):
        ours, theirs = f"layers.{i}", f"transformer.h.{i}"
        for field in ("weight", "bias"):
            qkv = turned(f"{theirs}.attn.c_attn.{field}").chunk(3)
            mapped[f"{ours}.attention.qkv.{field}"] = fused_qkv(*qkv, m.num_query_groups)
            for their_name, our_name in names.items():
                mapped[f"{ours}.{our_name}.{field}"] = turned(f"{theirs}.{their_name}.{field}")
            mapped[f"{ours}.input_norm.{field}"] = value(f"{theirs}.ln_1.{field}")
            mapped[f"{ours}.mlp_norm.{field}"] = value(f"{theirs}.ln_2.{field}")
    return mapped


def copy_into(model, mapped):
    params = parameters(model)
    assert params.keys() == mapped.keys()
    with torch.no_grad():
        for name, value in mapped.items():
            params[name][: value.shape[0]].copy_(value)


def randomize_(theirs):
    """Norms and biases away from one and zero, or a swapped one would pass."""
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return theirs.eval()


def check(model, theirs, mapping, m):
    copy_into(model, mapping(m, theirs.state_dict().__getitem__))
    tokens, labels, _ = batch(2, 24)
    expected = theirs(tokens).logits
    actual = model(tokens, step=EVAL)
    assert relative_error(actual, expected) < 1e-5
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    model(tokens, step=StepContext(), labels=labels).backward()
    their_grads = {name: p.grad for name, p in theirs.named_parameters()}
    grads = gradients(model)
    for name, expected_grad in mapping(m, their_grads.__getitem__).items():
        assert relative_error(grads[name][: expected_grad.shape[0]], expected_grad) < 1e-5, name


@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize(("heads", "groups", "channels"), [(4, 4, 8), (8, 2, 8), (8, 1, 4), (2, 2, 32)])
def test_llama(heads, groups, channels, untied):
    """CASES 25: fused qkv is grouped by key/value head; logits and all gradients."""
    m = replace(
        LLAMA,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=channels,
        untie_embeddings_and_output_weights=untied,
    )
    check(make_model(m), randomize_(llama(m)), llama_mapping, m)


def test_gpt2():
    """Its GELU is the tanh form."""
    check(make_model(GPT2), randomize_(gpt2(GPT2)), gpt2_mapping, GPT2)


def test_gpt2_with_exact_gelu():
    m = replace(GPT2, bias_gelu_fusion=False)
    check(make_model(m), randomize_(gpt2(m, activation_function="gelu")), gpt2_mapping, m)


@pytest.mark.parametrize("fault", ["all q, k, v", "gate and up swapped", "interleaved rotation"])
def test_wrong_layouts_are_seen(fault):
    """CASES 25, 26: shapes match in all of these, so only numbers tell."""
    m = replace(LLAMA, num_attention_heads=8, num_query_groups=2, kv_channels=8)
    theirs = randomize_(llama(m))
    mapped = llama_mapping(m, theirs.state_dict().__getitem__)
    model = make_model(replace(m, rotary_interleaved=fault == "interleaved rotation"))
    for i in range(m.num_layers):
        if fault == "all q, k, v":
            parts = [theirs.state_dict()[f"model.layers.{i}.self_attn.{x}_proj.weight"] for x in "qkv"]
            mapped[f"layers.{i}.attention.qkv.weight"] = torch.cat(parts)
        if fault == "gate and up swapped":
            mapped[f"layers.{i}.mlp.fc1.weight"] = torch.cat(mapped[f"layers.{i}.mlp.fc1.weight"].chunk(2)[::-1])
    copy_into(model, mapped)
    tokens, _, _ = batch(2, 24)
    assert relative_error(model(tokens, step=EVAL), theirs(tokens).logits) > 1e-2
