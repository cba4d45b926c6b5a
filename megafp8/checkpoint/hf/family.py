"""Family: what one Hugging Face model class needs for conversion, and what most of them share."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megafp8.checkpoint.hf.rules import Rule
from megafp8.checkpoint.hf.values import MAX_LAYERS, Values
from megafp8.config import Config, build_config
from megafp8.config.config import flag_of, has_flag
from megafp8.config.model import ModelConfig
from megafp8.config.validate.idle import IDLE

TRAINING_ONLY = {
    *("init_method_std", "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by", "moe_aux_loss_coeff"),
    *("moe_z_loss_coeff", "moe_router_load_balancing_type", "moe_router_bias_update_rate", "moe_router_dtype"),
    *("mtp_loss_scaling_factor", "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_per_layer_logging"),
    *("moe_pad_expert_input_to_capacity", "moe_router_force_load_balancing"),
}
"""Fields of ModelConfig that say nothing of the trained model."""
DERIVED = {
    *("group_query_attention", "use_rotary_position_embeddings", "moe_layer_freq", "window_size"),
    "moe_router_group_scores",
}
"""Fields whose effect is compared otherwise."""
BY_LAYOUT = {"rotary_interleaved"}
"""Fields that change the order of rows, which the layouts see to."""
IGNORED = (r".*\.rotary_emb\.inv_freq",)
"""Names in old files that hold no weights."""


@dataclass(frozen=True)
class Family:
    """model_type, architecture: as in config.json. rules: of all its tensors.

    to_args: config.json -> our configuration fields. Raises ValueError for what is not built here.
    to_hf: our configuration -> config.json. It may assume that the model is of the family: `describe` checks it.
    ignored: patterns of names in its files that hold no weights.
    stem: prefix that its files' names may lack.
    present: our fields, and the names in the files -> the fields of what is really there.
    """

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]
    to_args: Callable[[Values], dict[str, Any]]
    to_hf: Callable[[Config], dict[str, Any]]
    ignored: tuple[str, ...] = IGNORED
    stem: str = "model."
    present: Callable[[dict[str, Any], Collection[str]], dict[str, Any]] = lambda args, names: args

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
            back = model_of(self.to_args(Values(content)))
        except ValueError as error:
            raise ValueError(f"family {self.model_type} has no such model: {error}") from None
        if differing := differences(back, config):
            raise ValueError(f"family {self.model_type} has no such model: {'; '.join(differing)}")
        return content


def model_of(args: Mapping[str, Any]) -> Config:
    """The configuration of a converted model that no run has trained yet; fields not in `args` say nothing of it."""
    values = {"micro_batch_size": 1, "train_iters": 1, "lr": 0.0, "mock_data": True, "tokenizer_type": "NullTokenizer"}
    values |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "vocab_size": 1}
    values |= {"seq_length": args.get("max_position_embeddings", 1)}
    return build_config(env={}, check_files=False, **(values | dict(args)))


def differences(a: Config, b: Config) -> list[str]:
    """What tells two architectures apart, a text a flag; the vocabulary aside."""
    idle = {name for rule in IDLE if rule.applies(a) and rule.applies(b) for name in rule.names}
    if all(a.model.moe_layers) and all(b.model.moe_layers):
        idle.add("ffn_hidden_size")
    names = [f.name for f in fields(ModelConfig) if has_flag(f.name)]
    found = []
    for name in names:
        x, y = getattr(a.model, name), getattr(b.model, name)
        if (x or None) != (y or None) and name not in TRAINING_ONLY | DERIVED | BY_LAYOUT | idle:
            found.append(f"{flag_of(name)} is {y}, not {x}")
    properties = {"moe_layer_freq": "moe_layers", "window_size": "window", "moe_router_group_scores": "group_scores"}
    for name, what in properties.items():
        if getattr(a.model, what) != getattr(b.model, what):
            found.append(f"{flag_of(name)} is {getattr(b.model, name)}, not {getattr(a.model, name)}")
    return found


def decoder_args(
    hf: Values, *, kv_heads: int | None = None, eps: float = 1e-6, theta: float = 10000.0
) -> dict[str, Any]:
    """Fields of a decoder with RMSNorm, rotary positions and SwiGLU: all families but GPT-2.

    kv_heads, eps, theta: the class's defaults (kv_heads None: as many as query heads).
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
        "untie_embeddings_and_output_weights": not hf.flag("tie_word_embeddings", False),
        **rope_args(hf, theta),
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


def rope_args(hf: Values, theta: float) -> dict[str, Any]:
    """Rotary fields: from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4)."""
    new = hf.section("rope_parameters")
    scaling = new if new.content else hf.section("rope_scaling")
    base = (new if "rope_theta" in new.content else hf).number("rope_theta", theta)
    scaling.require("partial_rotary_factor", 1.0, default=1.0)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"{scaling.where}: '{kind}' is not built here, only {', '.join(ROPE_TYPES)}")
    args: dict[str, Any] = {"position_embedding_type": "rope", "rope_type": "rope", "rotary_base": base}
    return args | ROPE_TYPES[kind](scaling)


def _linear(scaling: Values) -> dict[str, Any]:
    factor = scaling.number("factor")
    if factor != int(factor):
        raise ValueError(f"{scaling.where}: factor {factor}: only whole numbers are built here")
    return {"rotary_seq_len_interpolation_factor": int(factor)}


def _llama3(scaling: Values) -> dict[str, Any]:
    scaling.require("low_freq_factor", LLAMA3["low_freq_factor"])
    scaling.require("high_freq_factor", LLAMA3["high_freq_factor"])
    scaling.require("original_max_position_embeddings", LLAMA3["original_max_position_embeddings"])
    return {"use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor")}


def _yarn(scaling: Values) -> dict[str, Any]:
    """transformers heeds `mscale` and `mscale_all_dim` only together; else rotation is scaled as by mscale 1."""
    scaling.require("attention_factor", None)
    scaling.require("truncate", True, default=True)
    mscale, all_dim = (scaling.content.get(key) or None for key in ("mscale", "mscale_all_dim"))
    if all_dim and not mscale:
        raise ValueError(f"{scaling.where}: 'mscale_all_dim' without 'mscale' is not built here")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.number("factor"),
        "original_max_position_embeddings": scaling.integer("original_max_position_embeddings"),
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
        "mscale": scaling.number("mscale") if all_dim else 1.0,
        "mscale_all_dim": scaling.number("mscale_all_dim") if all_dim else 0.0,
    }


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_TYPES: dict[str, Callable[[Values], dict[str, Any]]] = {
    "default": lambda scaling: {},
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Kind of scaling -> the fields that it sets."""


def rope_hf(model: ModelConfig) -> dict[str, Any]:
    """The inverse of `rope_args`, for transformers 5 and 4 alike."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor, **LLAMA3}
    elif model.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor)}
    elif model.rope_type == "yarn":
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        scaling = {"rope_type": "yarn", "factor": model.rotary_scaling_factor}
        scaling |= {name: getattr(model, name) for name in names}
    old = {} if scaling["rope_type"] == "default" else {"rope_scaling": scaling}
    return {"rope_theta": model.rotary_base, "rope_parameters": {"rope_theta": model.rotary_base, **scaling}, **old}


def window_args(hf: Values) -> dict[str, Any]:
    """A sliding window of so many tokens, the token itself included; one that reaches over all positions is none."""
    window = hf.integer("sliding_window", None)
    if window is None or window >= hf.integer("max_position_embeddings", 2048):
        return {}
    return {"window_size": f"{window - 1},0"}


def window_hf(config: Config) -> dict[str, Any]:
    """The inverse of `window_args`."""
    window = config.model.window
    return {"sliding_window": None if window is None else window + 1}


COMMON_RULES = (
    Rule("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    Rule("final_norm.weight", "model.norm.weight"),
    Rule("lm_head.weight", "lm_head.weight"),
    Rule("layers.{i}.input_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    Rule("layers.{i}.mlp_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
)
"""Of what all decoders with RMSNorm name alike."""


def canonical(name: str, family: Family) -> str:
    """A name with the family's stem, which old files leave out."""
    bare = family.stem and not name.startswith((family.stem, "lm_head.")) and re.match(r"[a-z]", name)
    return family.stem + name if bare else name
