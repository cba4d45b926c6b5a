"""Checks of the flags of multi-head latent attention and of stretched rotary positions."""

from megafp8.config.config import Config, flag_of


def latent_attention(c: Config) -> str | None:
    m = c.model
    if not m.multi_latent_attention:
        return None
    if m.position_embedding_type != "rope":
        return "--multi-latent-attention needs --position-embedding-type rope; add it"
    if m.group_query_attention:
        return "--multi-latent-attention shares a latent, not heads: it contradicts --group-query-attention; drop one"
    if c.is_given("add_qkv_bias"):
        return "--add-qkv-bias: latent attention has no qkv projection; leave it out"
    return None


def stretching(c: Config) -> str | None:
    """One way only to stretch rotary positions."""
    m = c.model
    ways = [name for name in ("rotary_seq_len_interpolation_factor", "use_rope_scaling") if getattr(m, name)]
    if m.rope_type == "yarn" and m.rotary_scaling_factor > 1:
        ways.append("rotary_scaling_factor")
    if len(ways) > 1:
        return f"{flag_of(ways[0])} contradicts {flag_of(ways[1])}: both stretch rotary positions; leave one out"
    if m.rope_type == "yarn" and m.beta_fast <= m.beta_slow:
        return f"--beta-fast {m.beta_fast} must be more than --beta-slow {m.beta_slow}; change one"
    return None
