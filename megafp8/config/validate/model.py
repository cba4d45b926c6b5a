"""Checks of the architecture's flags against each other."""

from megafp8.config.config import Config, flag_of


def heads(c: Config) -> str | None:
    m = c.model
    if not c.is_given("kv_channels") and not m.multi_latent_attention and m.hidden_size % m.num_attention_heads:
        return (
            f"--hidden-size {m.hidden_size} is not divisible by --num-attention-heads {m.num_attention_heads}; "
            "change one, or give the head's width with --kv-channels"
        )
    if m.num_attention_heads % m.num_query_groups:
        return (
            f"--num-attention-heads {m.num_attention_heads} is not divisible by --num-query-groups "
            f"{m.num_query_groups}; every group must serve as many heads"
        )
    return None


def query_groups(c: Config) -> str | None:
    groups = c.given.get("num_query_groups")
    if groups is not None and not c.model.group_query_attention and groups != c.model.num_attention_heads:
        return f"--num-query-groups {groups} needs --group-query-attention; add it"
    return None


def positions(c: Config) -> str | None:
    if c.data.seq_length > c.model.max_position_embeddings:
        return (
            f"--seq-length {c.data.seq_length} is longer than --max-position-embeddings "
            f"{c.model.max_position_embeddings}; raise the latter"
        )
    if c.model.use_rotary_position_embeddings and c.given.get("position_embedding_type", "rope") != "rope":
        return (
            f"--use-rotary-position-embeddings contradicts --position-embedding-type "
            f"{c.given['position_embedding_type']}; leave one out"
        )
    return None


def rotary(c: Config) -> str | None:
    m = c.model
    if m.position_embedding_type != "rope":
        if m.use_rope_scaling or m.rotary_interleaved:
            which = "use_rope_scaling" if m.use_rope_scaling else "rotary_interleaved"
            return f"{flag_of(which)} needs --position-embedding-type rope; add it"
        return None
    width = "qk_pos_emb_head_dim" if m.multi_latent_attention else "kv_channels"
    channels = int(c.value(width) * m.rotary_percent)
    if channels < 2 or channels % 2:
        return (
            f"--position-embedding-type rope rotates pairs, but {flag_of(width)} {c.value(width)} x --rotary-percent "
            f"{m.rotary_percent} = {channels} channels; make it even and at least 2"
        )
    return None


def activation(c: Config) -> str | None:
    if c.model.swiglu and c.model.squared_relu:
        return "--swiglu contradicts --squared-relu; leave one out"
    return None
