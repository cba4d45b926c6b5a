"""Defaults that follow from other flags."""

import pytest

from megafp8.config import with_vocab_size
from megafp8.config.config import field_table

ALWAYS_FINAL = (
    *("ffn_hidden_size", "kv_channels", "num_query_groups", "max_position_embeddings", "expert_tensor_parallel_size"),
    *("global_batch_size", "tokenizer_type", "dataloader_type", "start_weight_decay", "end_weight_decay"),
)


def test_nothing_is_left_open(parse):
    config = parse()
    for name in ALWAYS_FINAL:
        assert field_table()[name][1].default is None
        assert config.value(name) is not None, name


@pytest.mark.parametrize(
    ("hidden", "flags", "ffn"),
    [
        (64, "", 256),
        (64, "--swiglu", 128),  # 170.67 rounded down to a multiple of 64
        (4096, "--swiglu", 10880),
        (768, "--swiglu", 2048),  # exactly 8/3
        (64, "--swiglu --ffn-hidden-size 100", 100),
    ],
)
def test_ffn_hidden_size(parse, hidden, flags, ffn):
    assert parse(f"--hidden-size {hidden} {flags}").model.ffn_hidden_size == ffn


def test_attention_sizes(parse):
    assert parse().model.kv_channels == 16
    assert parse("--kv-channels 24").model.kv_channels == 24
    assert parse("--kv-channels 24 --num-attention-heads 3").model.num_attention_heads == 3
    assert parse().model.num_query_groups == 4
    assert parse("--group-query-attention").model.num_query_groups == 1
    assert parse("--group-query-attention --num-query-groups 2").model.num_query_groups == 2


def test_positions(parse):
    assert parse().model.max_position_embeddings == 32
    assert parse("--max-position-embeddings 64").model.max_position_embeddings == 64
    assert parse().model.position_embedding_type == "learned_absolute"
    assert parse("--use-rotary-position-embeddings").model.position_embedding_type == "rope"


def test_biases(parse):
    assert parse().model.add_qkv_bias
    assert not parse("--disable-bias-linear").model.add_qkv_bias
    assert parse("--disable-bias-linear --add-qkv-bias").model.add_qkv_bias


@pytest.mark.parametrize(
    ("flags", "recipe"),
    [
        ("--bf16 --fp8-format e4m3", "blockwise"),
        ("--bf16 --fp8-format hybrid", "tensorwise"),
        ("--bf16 --fp8-format hybrid --fp8-recipe blockwise", "blockwise"),
        ("--bf16 --fp8-format e4m3 --fp8-recipe delayed", "delayed"),
        ("", None),
    ],
)
def test_recipe(parse, flags, recipe):
    config = parse(flags)
    assert config.fp8.fp8_recipe == recipe
    assert config.fp8.enabled == (recipe is not None)


def test_batch_and_schedule(parse):
    assert parse().train.global_batch_size == 2
    assert parse("--global-batch-size 6").train.global_batch_size == 6
    config = parse("--decoupled-lr 0.1 --min-lr 1e-4")
    assert config.optimizer.lr_decay_iters == 5
    assert config.optimizer.decoupled_min_lr == 1e-4
    assert parse("--lr-decay-iters 3").optimizer.lr_decay_iters == 3
    by_samples = parse("--train-samples 10", without=("--train-iters",))
    assert by_samples.optimizer.lr_decay_samples == 10
    assert by_samples.optimizer.lr_decay_iters is None


def test_weight_decay(parse):
    config = parse("--weight-decay 0.3")
    assert (config.optimizer.start_weight_decay, config.optimizer.end_weight_decay) == (0.3, 0.3)
    config = parse("--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.2")
    assert (config.optimizer.start_weight_decay, config.optimizer.end_weight_decay) == (0.0, 0.2)


def test_recompute(parse):
    assert parse().train.recompute_granularity is None
    assert parse("--recompute-activations").train.recompute_modules == ("core_attn",)
    assert parse("--recompute-activations --recompute-granularity full").train.recompute_granularity == "full"
    full = parse("--recompute-granularity full").train
    assert (full.recompute_method, full.recompute_num_layers) == ("uniform", 1)


def test_graphs(parse):
    assert parse().train.cuda_graph_modules == ()
    none = "--hidden-dropout 0 --attention-dropout 0"
    assert parse(f"--cuda-graph-impl local {none}").train.cuda_graph_modules == ("full",)


def test_data(parse):
    assert parse().data.split is None
    assert parse("--data-path x", without=("--mock-data",)).data.split == "969,30,1"
    assert parse("--train-data-path x", without=("--mock-data",)).data.split is None
    config = parse("--vocab-file v --merge-file m", without=("--tokenizer-type",))
    assert config.data.tokenizer_type == "GPT2BPETokenizer"


def test_logs(parse):
    assert parse("--log-dir runs/x").logging.tensorboard_dir == "runs/x"
    assert parse("--log-dir runs/x --tensorboard-dir tb").logging.tensorboard_dir == "tb"
    assert parse().logging.tensorboard_dir is None


@pytest.mark.parametrize(
    ("flags", "tokenizer", "used", "rows"),
    [
        ("", 50257, 50257, 50304),
        ("", 50304, 50304, 50304),
        ("--make-vocab-size-divisible-by 1", 50257, 50257, 50257),
        ("--extra-vocab-size 48", 50257, 50305, 50432),
        ("--vocab-size 50300", 50257, 50300, 50304),
        ("--tokenizer-type NullTokenizer --vocab-size 128", 129, 129, 256),
    ],
)
def test_vocabulary(parse, flags, tokenizer, used, rows):
    """CASES 28, 72: rows >= largest id + 1, and padding is not part of the vocabulary."""
    config = with_vocab_size(parse(flags), tokenizer)
    assert (config.model.unpadded_vocab_size, config.model.padded_vocab_size) == (used, rows)
    assert with_vocab_size(config, tokenizer) == config


@pytest.mark.parametrize(("tp", "rows"), [(1, 50304), (2, 50432), (4, 50688)])
def test_vocabulary_padding_grows_with_tensor_parallelism(parse, tp, rows):
    config = parse().replace(tensor_model_parallel_size=tp)
    assert with_vocab_size(config, 50257).model.padded_vocab_size == rows


def test_vocabulary_smaller_than_the_tokenizer(parse):
    with pytest.raises(ValueError, match="--vocab-size 100 is less than the tokenizer's 257"):
        with_vocab_size(parse("--vocab-size 100"), 257)


def test_data_parallel_size_from_the_environment(parse):
    """Several processes are refused as not yet, but the derivation stands."""
    from megafp8.config.resolve import resolve

    config = resolve(parse().replace(tensor_model_parallel_size=2, global_batch_size=None), {"WORLD_SIZE": "8"})
    assert config.parallel.data_parallel_size == 4
    assert config.train.global_batch_size == 8
