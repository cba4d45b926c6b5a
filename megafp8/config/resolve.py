"""Derives the values that flags leave open, so that the rest of the code reads only final ones.

Each rule is a small function from Config to Config, and they run in the order of `RULES`. Rules assume that the
required flags are there (validate.py checks it first); they check nothing else.
"""

from collections.abc import Mapping

from megafp8.config.batch_size import parse_steps
from megafp8.config.config import Config
from megafp8.config.crossover import with_small_linears
from megafp8.config.fp8 import DEFAULT_RECIPE

DEFAULT_SPLIT = "969,30,1"
WHOLE_LAYERS = "full"
"""What a CUDA graph covers."""


def resolve(config: Config, env: Mapping[str, str]) -> Config:
    """Returns `config` with every derived value filled in.

    Args:
        config: the flags as given, with plain defaults elsewhere.
        env: environment variables; WORLD_SIZE is the number of processes (torchrun sets it), 1 without it.
    """
    config = config.replace(world_size=_world_size(env))
    for rule in RULES:
        config = rule(config)
    return config


def _world_size(env: Mapping[str, str]) -> int:
    text = env.get("WORLD_SIZE", "1")
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(f"WORLD_SIZE={text!r} in the environment is no number of processes; start with torchrun")
    return int(text)


def padded_vocab_size(
    vocab_size: int,
    make_vocab_size_divisible_by: int = 128,
    tensor_model_parallel_size: int = 1,
    extra_vocab_size: int = 0,
) -> int:
    """Rows of the embedding: ids in use (plus `--extra-vocab-size`), rounded up to a multiple of the product of
    `--make-vocab-size-divisible-by` and the tensor-parallel size, as Megatron does."""
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-(vocab_size + extra_vocab_size) // multiple) * multiple


def with_vocab_size(config: Config, vocab_size: int) -> Config:
    """Returns `config` with `model.unpadded_vocab_size`, the ids in use, and `model.padded_vocab_size`, the rows.

    The ids in use are the tokenizer's (or `--vocab-size`, which may reserve more) plus `--extra-vocab-size`; the rows
    are the smallest multiple of `--make-vocab-size-divisible-by` times the tensor-parallel size that holds them.

    Args:
        config: a resolved configuration.
        vocab_size: number of the tokenizer's tokens, end-of-document included.

    Raises:
        ValueError: `--vocab-size` is smaller than the tokenizer's vocabulary.
    """
    wanted = config.given.get("vocab_size")
    if wanted is not None and config.data.tokenizer_type != "NullTokenizer":  # NullTokenizer's own size follows from it
        if wanted < vocab_size:
            raise ValueError(f"--vocab-size {wanted} is less than the tokenizer's {vocab_size} tokens; leave it out")
        vocab_size = wanted
    tokens = vocab_size + config.data.extra_vocab_size
    tensor_parallel = config.parallel.tensor_model_parallel_size
    rows = padded_vocab_size(tokens, config.model.make_vocab_size_divisible_by, tensor_parallel)
    return config.replace(unpadded_vocab_size=tokens, padded_vocab_size=rows)


def _parallel(config: Config) -> Config:
    p = config.parallel
    model_parallel = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
    values = {"data_parallel_size": max(1, p.world_size // model_parallel)}
    if p.expert_tensor_parallel_size is None:
        values["expert_tensor_parallel_size"] = p.tensor_model_parallel_size
    return config.replace(**values)


def _old_spellings(config: Config) -> Config:
    """Two flags of Megatron-LM that set another one."""
    if config.model.use_rotary_position_embeddings:
        config = config.replace(position_embedding_type="rope")
    if config.train.recompute_activations and config.train.recompute_granularity is None:
        config = config.replace(recompute_granularity="selective")
    return config


def _attention(config: Config) -> Config:
    m = config.model
    if m.kv_channels is None:
        config = config.replace(kv_channels=m.hidden_size // m.num_attention_heads)
    if m.multi_latent_attention and m.latent_norm_epsilon is None:
        config = config.replace(latent_norm_epsilon=m.norm_epsilon)
    if not m.group_query_attention:
        return config.replace(num_query_groups=m.num_attention_heads)
    return config.replace(num_query_groups=1 if m.num_query_groups is None else m.num_query_groups)


def _mlp(config: Config) -> Config:
    """Megatron-LM's rule: 4 h; gated, two thirds of that rounded down to a multiple of 64."""
    m = config.model
    if m.ffn_hidden_size is not None:
        return config
    if m.swiglu:
        return config.replace(ffn_hidden_size=int(4 * m.hidden_size * 2 / 3 / 64) * 64)
    return config.replace(ffn_hidden_size=4 * m.hidden_size)


def _experts(config: Config) -> Config:
    if config.model.num_experts is not None and config.model.moe_ffn_hidden_size is None:
        return config.replace(moe_ffn_hidden_size=config.model.ffn_hidden_size)
    return config


def _one_rank(config: Config) -> Config:
    """A rank that is alone can't know what others' routers would send it: as many tokens as anybody."""
    alone = config.parallel.fake_process_group and config.model.num_experts is not None
    return config.replace(moe_router_force_load_balancing=True) if alone else config


def _biases(config: Config) -> Config:
    """With biases everywhere qkv has one too, so that `add_qkv_bias` alone tells."""
    return config.replace(add_qkv_bias=config.model.add_qkv_bias or config.model.add_bias_linear)


def _positions(config: Config) -> Config:
    if config.model.rope_type is None:
        config = config.replace(rope_type="yarn" if config.model.multi_latent_attention else "rope")
    if config.model.max_position_embeddings is None:
        return config.replace(max_position_embeddings=config.data.seq_length)
    return config


def _fp8(config: Config) -> Config:
    if config.fp8.enabled and config.fp8.fp8_recipe is None:
        return config.replace(fp8_recipe=DEFAULT_RECIPE[config.fp8.fp8_format])
    return config


def _graphs(config: Config) -> Config:
    if config.train.cuda_graph_impl == "none" or config.train.cuda_graph_modules:
        return config
    return config.replace(cuda_graph_modules=(WHOLE_LAYERS,))


def _batch(config: Config) -> Config:
    if config.train.step_batch_size_schedule is not None:
        config = _batch_steps(config)
    if config.train.global_batch_size is None:
        return config.replace(global_batch_size=config.train.micro_batch_size * config.parallel.data_parallel_size)
    return config


def _batch_steps(config: Config) -> Config:
    texts = config.train.step_batch_size_schedule
    try:
        steps = parse_steps(texts, config.data.seq_length)
    except ValueError as error:
        raise ValueError(f'--step-batch-size-schedule "{" ".join(texts)}": {error}') from None
    config = config.replace(batch_size_steps=tuple(number for step in steps for number in step))
    if config.train.global_batch_size is None:
        return config.replace(global_batch_size=max(size for _, size in steps))
    return config


def _recompute(config: Config) -> Config:
    if config.train.recompute_granularity == "selective" and config.train.recompute_modules is None:
        return config.replace(recompute_modules=("core_attn",))
    if config.train.recompute_granularity == "full":
        return config.replace(
            recompute_method=config.train.recompute_method or "uniform",
            recompute_num_layers=config.train.recompute_num_layers or 1,
        )
    return config


def _schedule(config: Config) -> Config:
    """Decay lasts as long as training unless told otherwise."""
    o, t = config.optimizer, config.train
    if t.train_iters is not None and o.lr_decay_iters is None:
        config = config.replace(lr_decay_iters=t.train_iters)
    if t.train_samples is not None and o.lr_decay_samples is None:
        config = config.replace(lr_decay_samples=t.train_samples)
    if o.decoupled_lr is not None and o.decoupled_min_lr is None:
        config = config.replace(decoupled_min_lr=o.min_lr)
    return config.replace(
        start_weight_decay=o.weight_decay if o.start_weight_decay is None else o.start_weight_decay,
        end_weight_decay=o.weight_decay if o.end_weight_decay is None else o.end_weight_decay,
    )


def _data(config: Config) -> Config:
    d = config.data
    values = {}
    if d.tokenizer_type is None:
        values["tokenizer_type"] = "GPT2BPETokenizer"
    if d.dataloader_type is None:
        values["dataloader_type"] = "single"
    if d.split is None and d.data_path and not d.mock_data:
        values["split"] = DEFAULT_SPLIT
    return config.replace(**values)


def _logs(config: Config) -> Config:
    if config.logging.tensorboard_dir is None and config.logging.log_dir is not None:
        return config.replace(tensorboard_dir=config.logging.log_dir)
    return config


RULES = (
    _parallel,
    _old_spellings,
    _attention,
    _mlp,
    _experts,
    _one_rank,
    _biases,
    _positions,
    _fp8,
    _batch,
    with_small_linears,
    _graphs,
    _recompute,
    _schedule,
    _data,
    _logs,
)
