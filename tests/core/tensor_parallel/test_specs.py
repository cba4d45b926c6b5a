"""ParamSpecs and initial values: decay groups, names, and independence of any layout."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.build import BuildContext
from megafp8.core.moe.experts import SharedExperts
from megafp8.core.tensor_parallel.linear import ColumnParallelLinear, LMHead, RowParallelLinear
from megafp8.core.transformer.norm import head_norm, hidden_norm
from megafp8.parallel import Axis, ParallelContext
from megafp8.params import initial_value, named_specs, unpadded
from tests.core.helpers import EXOTIC, GPT2, LLAMA, VOCAB, make_model, parameters


def layer_names(i, attention, mlp, norms):
    return {f"layers.{i}.{n}" for n in (*(f"attention.{a}" for a in attention), *(f"mlp.{m}" for m in mlp), *norms)}


def test_decay_groups():
    """CASES 64: every parameter of a model with everything, by group. Only matrices decay."""
    m = replace(EXOTIC, add_bias_linear=True, num_layers=1, untie_embeddings_and_output_weights=True)
    groups = {True: set(), False: set()}
    for spec, _ in named_specs(make_model(m)):
        groups[spec.decay].add(spec.name)
    assert groups[True] == {
        "embedding.word_embeddings.weight",
        "lm_head.weight",
        *layer_names(0, ("qkv.weight", "proj.weight"), ("fc1.weight", "fc2.weight"), ()),
    }
    norms = ("input_norm.weight", "input_norm.bias", "mlp_norm.weight", "mlp_norm.bias")
    heads = ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias")
    biases = ("qkv.bias", "proj.bias")
    assert groups[False] == {
        "final_norm.weight",
        "final_norm.bias",
        *layer_names(0, (*heads, *biases), ("fc1.bias", "fc2.bias"), norms),
    }


def test_query_and_key_norms_decay_where_asked():
    """--apply-wd-to-qk-layernorm."""
    m = replace(EXOTIC, num_layers=1)
    decaying = {s.name for s, _ in named_specs(make_model(m, head_norms_decay=True)) if s.decay}
    plain = {s.name for s, _ in named_specs(make_model(m)) if s.decay}
    heads = [f"{norm}.{field}" for norm in ("q_norm", "k_norm") for field in ("weight", "bias")]
    assert decaying - plain == set(layer_names(0, heads, (), ()))


def test_names_follow_modules():
    for m in (LLAMA, EXOTIC):
        assert all(name == p.spec.name for name, p in make_model(m).named_parameters())


def test_gpt2_learned_positions_are_a_matrix():
    names = {spec.name: spec for spec, _ in named_specs(make_model(GPT2))}
    assert names["embedding.position_embeddings.weight"].decay
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("biases", ["all", "qkv", "none"])
def test_which_biases_exist(biases):
    m = replace(LLAMA, add_bias_linear=biases == "all", add_qkv_bias=biases == "qkv", num_layers=1)
    found = {name for name in parameters(make_model(m)) if name.endswith("bias")}
    expected = {
        "all": {"attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2"},
        "qkv": {"attention.qkv"},
        "none": set(),
    }
    assert found == {f"layers.0.{name}.bias" for name in expected[biases]}


def test_initial_values():
    m = replace(GPT2, num_layers=8, init_method_std=0.05, hidden_size=64, kv_channels=16, ffn_hidden_size=256)
    p = parameters(make_model(m))
    for name, value in p.items():
        if name.endswith("bias"):
            assert (value == 0).all(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            std = 0.05 / 4 if "proj" in name or "fc2" in name else 0.05
            value = value[:VOCAB] if "word" in name else value
            assert value.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(value.mean().item()) < 4 * std / value.numel() ** 0.5, name
    assert (p["embedding.word_embeddings.weight"][VOCAB:] == 0).all()


def test_values_depend_on_seed_and_name_only():
    base = parameters(make_model(LLAMA))
    again = parameters(make_model(replace(LLAMA, padded_vocab_size=512), dtype=torch.bfloat16))
    other = parameters(make_model(LLAMA, seed=2))
    for name, value in base.items():
        spec = value.spec
        assert torch.equal(unpadded(value, spec).bfloat16(), unpadded(again[name], again[name].spec)), name
        if "norm" not in name:
            assert not torch.equal(value, other[name]), name
    matrices = [v for n, v in base.items() if n.endswith("fc2.weight")]
    assert not torch.equal(*matrices)
    # a deeper model starts its first layers alike, but for the residual scaling of proj and fc2
    deeper = parameters(make_model(replace(LLAMA, num_layers=4)))
    assert torch.equal(deeper["layers.1.mlp.fc1.weight"], base["layers.1.mlp.fc1.weight"])


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_parts_are_slices_of_the_whole(size):
    """CASES 26: a rank holds matching rows of gate and up; and the vocabulary's padding may be cut anywhere."""
    m = replace(LLAMA, padded_vocab_size=128 * size)

    def linears(rank, size):
        build = BuildContext(m, parallel=ParallelContext(tp=Axis(size, rank)))
        return (
            ColumnParallelLinear("fc1", 32, (2, 48), bias=True, init_std=0.02, build=build),
            ColumnParallelLinear("qkv", 32, (64,), bias=True, init_std=0.02, build=build),
            RowParallelLinear("fc2", 48, 32, bias=True, init_std=0.01, build=build),
            LMHead("lm_head", build),
        )

    for whole in linears(0, 1):
        spec = whole.weight.spec
        full = initial_value(spec, 7)[: spec.box_shape[0] if spec.name.startswith("lm_head") else None].view(spec.shape)
        seen = torch.zeros(spec.shape)
        for rank in range(size):
            part = next(m for m in linears(rank, size) if m.weight.spec.name == spec.name)
            local = part.weight.spec
            assert local.shape == spec.shape
            box = tuple(slice(a, b) for a, b in local.box)
            value = initial_value(local, 7)
            assert value.shape == part.weight.shape
            assert torch.equal(unpadded(value, local), full[box])
            assert (value[local.box_shape[0] :] == 0).all() or value.numel() == full[box].numel()
            seen[box] += 1
        assert (seen == 1).all()


def test_replicated_parameters():
    """CASES 14: under sequence parallelism norms and row-parallel biases see only their tokens; head norms only their
    heads; on one rank nothing is to be summed."""
    for size, summed in ((1, frozenset()), (2, frozenset({"tp"}))):
        parallel = ParallelContext(tp=Axis(size, 0), sequence_parallel=True)
        build = BuildContext(LLAMA, parallel=parallel)
        bias = RowParallelLinear("fc2", 48, 32, bias=True, init_std=0.01, build=build).bias
        gated = replace(LLAMA, moe_shared_expert_intermediate_size=32, moe_shared_expert_gate=True)
        gate = SharedExperts("s", replace(build, model=gated)).gate.weight
        for spec in (hidden_norm("n", build).weight.spec, head_norm("q", build).weight.spec, bias.spec, gate.spec):
            assert spec.replicated_over == {"tp"}
            assert spec.grad_sum_over == summed
