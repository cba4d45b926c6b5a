"""MFU: each product against the dense peak of its dtype, and the products counted by PyTorch (CASES 75)."""

import pytest
import torch

from megafp8.config import build_config, with_vocab_size
from megafp8.core.gpt import build_model
from megafp8.fp8 import gemm
from megafp8.parallel import ParallelContext
from megafp8.plan.flops import fp8_training_flops_per_token, training_flops_per_token
from megafp8.step import StepContext
from megafp8.training.throughput import PEAKS, ideal_seconds_per_token, peaks_of

BASE = {
    "num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32,
    "micro_batch_size": 2, "lr": 1e-3, "train_iters": 9, "mock_data": True, "tokenizer_type": "ByteTokenizer",
    "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope", "device": "cpu", "bf16": True,
    "lr_warmup_iters": 0,
}  # fmt: skip
FP8 = {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}


def config(**values):
    return with_vocab_size(build_config(env={}, **(BASE | values)), 257)


def test_names_find_their_peaks():
    assert peaks_of("NVIDIA H200") == PEAKS["H200"]
    assert peaks_of("NVIDIA H100 80GB HBM3").bf16 == 989
    assert peaks_of("NVIDIA H100 PCIe").bf16 == 756
    assert peaks_of("NVIDIA H20").bf16 == 148
    assert peaks_of("NVIDIA GB200").fp8 == 5000
    assert peaks_of("Some other") is None


def test_peaks_are_dense_and_fp8_is_twice_bf16():
    assert all(p.fp8 is None or p.fp8 / p.bf16 == pytest.approx(2, rel=0.03) for p in PEAKS.values())


@pytest.mark.parametrize("keep", [(), ("layers.0.*",), ("*.mlp.fc2",)])
def test_what_fp8_gemms_do_is_counted(keep, monkeypatch):
    """The reference's GEMMs by their shapes, forward and backward."""
    values = config(**FP8, keep_modules_in_bf16=keep) if keep else config(**FP8)
    model, counted = build_model(values, ParallelContext(), "cpu"), []
    for name in ("fprop", "dgrad", "wgrad"):
        original = getattr(gemm, name)

        def counting(a, b, *rest, original=original, **named):
            out = original(a, b, *rest, **named)
            counted.append(2 * out.numel() * a.data.shape[1])  # rowwise or colwise, what is summed over comes last
            return out

        monkeypatch.setattr(gemm, name, counting)
    tokens = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    model(tokens, step=StepContext(), labels=tokens).backward()
    assert sum(counted) / tokens.numel() == pytest.approx(fp8_training_flops_per_token(values), rel=0.01)


def test_the_rest_is_counted_at_the_peak_of_bf16():
    peaks, values = PEAKS["H200"], config(**FP8)
    in_fp8, all_of_it = fp8_training_flops_per_token(values), training_flops_per_token(values)
    seconds = ideal_seconds_per_token(values, peaks, has_mxfp8=False)
    assert seconds == pytest.approx((in_fp8 / 1979 + (all_of_it - in_fp8) / 989) / 1e12)
    assert ideal_seconds_per_token(config(), peaks, has_mxfp8=False) == pytest.approx(all_of_it / 989e12)


def test_emulated_mxfp8_is_not_held_to_fp8s_peak():
    values = config(**FP8 | {"fp8_recipe": "mxfp8"})
    here, there = (ideal_seconds_per_token(values, PEAKS["H200"], has_mxfp8=has) for has in (False, True))
    assert here == pytest.approx(training_flops_per_token(values) / 989e12)
    assert there < here


@pytest.mark.parametrize("top", [2, 4])
def test_of_experts_only_the_chosen_ones_count(top):
    experts = {"num_experts": 8, "moe_router_topk": top, "moe_ffn_hidden_size": 96}
    values = config(**FP8, **experts)
    m = values.model
    expert = top * 3 * m.hidden_size * 96
    rest = (m.num_attention_heads * 2 + 2 * m.num_query_groups) * m.kv_channels * m.hidden_size
    assert fp8_training_flops_per_token(values) == 6 * m.num_layers * (expert + rest)
