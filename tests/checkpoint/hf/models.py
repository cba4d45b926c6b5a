"""Small random models of every family, as transformers makes and saves them; and what to hold conversions to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megafp8.checkpoint import Found, find_checkpoint
from megafp8.training.hf_import import ImportOptions, import_hf

VOCAB = 101
TOKENS = 24
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON |= {"intermediate_size": 52, "max_position_embeddings": 64, "initializer_range": 0.2}
LLAMA = {**COMMON, "num_key_value_heads": 2}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 12}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
DEEPSEEK = {**COMMON, "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4}
DEEPSEEK |= {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9}
DEEPSEEK |= {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
DEEPSEEK |= {"moe_intermediate_size": 20}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Case:
    """A model of transformers: class name without suffix, and its configuration."""

    name: str
    kind: str
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def _case(name: str, kind: str, base: dict[str, Any], **changes: Any) -> Case:
    return Case(name, kind, base | changes)


CASES = [
    _case("llama", "Llama", LLAMA),
    _case("llama-8-heads-2-groups", "Llama", LLAMA, num_attention_heads=8),
    _case("llama-1-group-tied", "Llama", LLAMA, num_key_value_heads=1, tie_word_embeddings=True),
    _case("llama-no-groups", "Llama", LLAMA, num_key_value_heads=4, intermediate_size=37),
    _case("llama-wide-heads", "Llama", LLAMA, head_dim=20, num_attention_heads=2, num_key_value_heads=2),
    _case("llama-biases", "Llama", LLAMA, attention_bias=True, mlp_bias=True),
    _case("llama-eps-theta", "Llama", LLAMA, rms_norm_eps=3e-3,
          rope_parameters={"rope_type": "default", "rope_theta": 777.0}),
    _case("llama-3", "Llama", LLAMA, rope_parameters=LLAMA3),
    _case("llama-linear", "Llama", LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    _case("llama-yarn", "Llama", LLAMA, rope_parameters=YARN),
    _case("mistral", "Mistral", LLAMA, sliding_window=7),
    _case("mistral-no-window", "Mistral", LLAMA, sliding_window=None, tie_word_embeddings=True),
    _case("qwen2", "Qwen2", LLAMA),
    _case("qwen3", "Qwen3", LLAMA, head_dim=16, rms_norm_eps=1e-5),
    _case("qwen3-tied", "Qwen3", LLAMA, head_dim=8, tie_word_embeddings=True),
    _case("gpt2", "GPT2", GPT2, n_inner=75, layer_norm_epsilon=1e-3),
    _case("gpt2-untied", "GPT2", GPT2, tie_word_embeddings=False, activation_function="gelu"),
    _case("mixtral", "Mixtral", LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    _case("mixtral-window", "Mixtral", LLAMA, num_local_experts=3, num_experts_per_tok=3, sliding_window=9,
          rms_norm_eps=1e-3),
    _case("qwen3-moe", "Qwen3Moe", LLAMA, **MOE, num_experts=6, norm_topk_prob=True),
    _case("qwen3-moe-not-normalized", "Qwen3Moe", LLAMA, **MOE, num_experts=4, mlp_only_layers=[0],
          num_hidden_layers=3),
    _case("deepseek-v3", "DeepseekV3", DEEPSEEK),
    _case("deepseek-v3-eps", "DeepseekV3", DEEPSEEK, rms_norm_eps=1e-3),
    _case("deepseek-v3-yarn", "DeepseekV3", DEEPSEEK, n_shared_experts=2, norm_topk_prob=False,
          routed_scaling_factor=1.5, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}),
    _case("deepseek-v3-three-groups", "DeepseekV3", DEEPSEEK, topk_group=3),
    _case("deepseek-v3-no-groups", "DeepseekV3", DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1,
          tie_word_embeddings=True),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def make(case: Case, directory: Path, *, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """Saves the random model of a case; norms, biases and expert biases away from their initial values."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{case.kind}Config")(**case.config)
    kind = "GPT2LMHeadModel" if case.kind == "GPT2" else f"{case.kind}ForCausalLM"
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and (tensor.dim() == 1 or "bias" in name):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.to(dtype).save_pretrained(directory, **save)
    return directory


def convert(source: Path, save: Path, **options: Any) -> Found:
    """The checkpoint that from-hf makes of a model."""
    import_hf(source, save, ImportOptions(**options))
    return find_checkpoint(save)


def weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face directory."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_bytes(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)), name
