"""Family: what one Hugging Face model class needs for conversion, and what most of them share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megafp8.checkpoint.hf.rules import Rule
from megafp8.checkpoint.hf.values import MAX_LAYERS, Values
from megafp8.config import Config, build_config
from megafp8.config.config import flag_of, has_flag
from megafp8.config.model import ModelConfig

TRAINING_ONLY = {
    *("init_method_std", "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by", "padded_vocab_size"),
    *("group_query_attention", "use_rotary_position_embeddings"),  # their effect is in other fields
}
"""Fields of ModelConfig that say nothing of the trained model."""
IGNORED = (r".*\.rotary_emb\.inv_freq",)
"""Names in old files that hold no weights."""


@dataclass(frozen=True)
class Family:
    """model_type, architecture: as in config.json. rules: of all its tensors.

    to_args: config.json -> our configuration fields. Raises ValueError for what is not built here.
    to_hf: our configuration -> config.json. It may assume that the model is of the family: `describe` checks it.
    ignored: patterns of names in its files that hold no weights.
    stem: prefix that its files' names may lack.
    """

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    to_args: Callable[[Values], dict[str, Any]]
    to_hf: Callable[[Config], dict[str, Any]]
    ignored: tuple[str, ...] = IGNORED
    stem: str = "model."

    def describe(self, config: Config) -> dict[str, Any]:
        """The config.json of our model. Raises ValueError, naming the flags, when this family has no such model."""
        content = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": config.model.unpadded_vocab_size,
            "tie_word_embeddings": not config.model.untie_embeddings_and_output_weights,
            "initializer_range": config.model.init_method_std,
            **self.to_hf(config),
        }
        try:
            back = model_of(self.to_args(Values(content))).model
        except ValueError as error:
            raise ValueError(f"family {self.model_type} has no such model: {error}") from None
        if differing := differences(back, config.model):
            raise ValueError(f"family {self.model_type} has no such model: {'; '.join(differing)}")
        return content


def model_of(args: Mapping[str, Any]) -> Config:
    """The configuration of a converted model that no run has trained yet; fields not in `args` say nothing of it."""
    values = {"micro_batch_size": 1, "train_iters": 1, "lr": 0.0, "mock_data": True, "tokenizer_type": "NullTokenizer"}
    values |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "vocab_size": 1}
    values |= {"seq_length": args.get("max_position_embeddings", 1)}
    return build_config(env={}, check_files=False, **(values | dict(args)))


def differences(a: ModelConfig, b: ModelConfig) -> list[str]:
    """What tells two architectures apart, a text a flag; the vocabulary aside."""
    found = []
    for field in fields(ModelConfig):
        name = field.name
        if name in TRAINING_ONLY or not has_flag(name):
            continue
        if name == "rope_scaling_factor" and not (a.use_rope_scaling and b.use_rope_scaling):
            continue
        x, y = getattr(a, name), getattr(b, name)
        if x != y and not (isinstance(x, float) and isinstance(y, float) and abs(x - y) <= 1e-12 * abs(y)):
            found.append(f"{flag_of(name)} is {y}, it has {x}")
    return found


def decoder_args(hf: Values, *, tied: bool = False, kv_heads: int | None = None, eps: float = 1e-6) -> dict[str, Any]:
    """Fields of a decoder with RMSNorm, rotary positions and SwiGLU: all families but GPT-2.

    tied, kv_heads, eps: the class's defaults (kv_heads None: as many as query heads).
    """
    hf.require("hidden_act", "silu", default="silu")
    heads = hf.integer("num_attention_heads")
    groups = hf.integer("num_key_value_heads", kv_heads or heads)
    return {
        "num_layers": hf.integer("num_hidden_layers", largest=MAX_LAYERS),
        "hidden_size": hf.integer("hidden_size"),
        "ffn_hidden_size": hf.integer("intermediate_size"),
        "num_attention_heads": heads,
        "kv_channels": hf.integer("head_dim", max(1, hf.integer("hidden_size") // heads)),
        "group_query_attention": True,
        "num_query_groups": groups,
        "max_position_embeddings": hf.integer("max_position_embeddings", 2048),
        "normalization": "RMSNorm",
        "norm_epsilon": hf.number("rms_norm_eps", eps),
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not hf.flag("tie_word_embeddings", tied),
        **rope_args(hf),
    }


def decoder_hf(config: Config) -> dict[str, Any]:
    """The inverse of `decoder_args`."""
    m = config.model
    return {
        "hidden_act": "silu",
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.num_query_groups,
        "head_dim": m.kv_channels,
        "max_position_embeddings": m.max_position_embeddings,
        "rms_norm_eps": m.norm_epsilon,
        **rope_hf(m),
    }


def rope_args(hf: Values, theta: float = 10000.0) -> dict[str, Any]:
    """Rotary fields: from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    new = hf.section("rope_parameters")
    scaling = new if new.content else hf.section("rope_scaling")
    base = (new if "rope_theta" in new.content else hf).number("rope_theta", theta)
    args: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": base}
    scaling.require("partial_rotary_factor", 1.0, default=1.0)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"{scaling.where}: '{kind}' is not built here, only {', '.join(ROPE_TYPES)}")
    return args | ROPE_TYPES[kind](scaling)


def _linear(scaling: Values) -> dict[str, Any]:
    factor = scaling.number("factor")
    if factor != int(factor):
        raise ValueError(f"{scaling.where}: factor {factor}: only whole numbers are built here")
    return {"rotary_seq_len_interpolation_factor": int(factor)}


def _llama3(scaling: Values) -> dict[str, Any]:
    scaling.require("low_freq_factor", 1.0)
    scaling.require("high_freq_factor", 4.0)
    scaling.require("original_max_position_embeddings", 8192)
    return {"use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor")}


ROPE_TYPES: dict[str, Callable[[Values], dict[str, Any]]] = {
    "default": lambda scaling: {},
    "linear": _linear,
    "llama3": _llama3,
}
"""Kind of scaling -> the fields that it sets."""


def rope_hf(model: ModelConfig) -> dict[str, Any]:
    """The inverse of `rope_args`, for transformers 5 and 4 alike."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    elif model.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor)}
    old = {} if scaling["rope_type"] == "default" else {"rope_scaling": scaling}
    return {"rope_theta": model.rotary_base, "rope_parameters": {"rope_theta": model.rotary_base, **scaling}, **old}


def without_window(hf: Values, args: dict[str, Any]) -> dict[str, Any]:
    """A sliding window makes no difference to sequences that fit into it: positions end there."""
    window = hf.integer("sliding_window", None)
    if window is not None and window < args["max_position_embeddings"]:
        args = args | {"max_position_embeddings": window}
    return args


def layer_rules(*, norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")) -> tuple[Rule, ...]:
    """Rules of what all decoders with RMSNorm name alike."""
    return (
        Rule("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        Rule("final_norm.weight", "model.norm.weight"),
        Rule("lm_head.weight", "lm_head.weight"),
        Rule("layers.{i}.input_norm.weight", f"model.layers.{{i}}.{norms[0]}.weight"),
        Rule("layers.{i}.mlp_norm.weight", f"model.layers.{{i}}.{norms[1]}.weight"),
    )


def canonical(name: str, family: Family) -> str:
    """A name with the family's stem, which old files leave out."""
    bare = family.stem and not name.startswith((family.stem, "lm_head.")) and re.match(r"[a-z]", name)
    return family.stem + name if bare else name
