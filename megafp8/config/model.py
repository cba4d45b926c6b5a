"""Architecture of the model: sizes, positions, attention, experts, norms, activation, dropout, initialization."""

from dataclasses import dataclass

from megafp8.config.flags import derived, flag
from megafp8.config.patterns import layer_pattern, left_window

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
"""Megatron-LM's ways to balance the load of experts."""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of the transformer."""

    num_layers: int | None = flag(None, "Number of transformer layers. Required.")
    hidden_size: int | None = flag(None, "Width h of the residual stream. Required.")
    ffn_hidden_size: int | None = flag(
        None,
        "Width of the MLP's inner layer (of each half with --swiglu).",
        shown_default="4 h; with --swiglu 8/3 h rounded down to a multiple of 64",
    )
    num_attention_heads: int | None = flag(None, "Number of query heads. Required.")
    kv_channels: int | None = flag(None, "Width of one attention head.", shown_default="hidden size / attention heads")
    group_query_attention: bool = flag(False, "Share key and value heads among query heads (--num-query-groups).")
    num_query_groups: int | None = flag(
        None,
        "Number of key/value heads; needs --group-query-attention.",
        shown_default="1 with --group-query-attention, else the number of query heads",
    )
    max_position_embeddings: int | None = flag(
        None, "Longest sequence in tokens that the positions can tell apart.", shown_default="--seq-length"
    )
    window_size: str | None = flag(
        None,
        "Sliding-window attention: keys before and after a token that it sees, e.g. 4095,0; causal, so the second is "
        "0. A window of 4096 tokens, the token itself included, is 4095,0.",
        metavar="LEFT,0",
        shown_default="all keys before",
    )
    position_embedding_type: str = flag(
        "learned_absolute",
        "How positions are encoded: a learned table, or rotation of queries and keys.",
        choices=("learned_absolute", "rope"),
    )
    use_rotary_position_embeddings: bool = flag(False, "Old form of --position-embedding-type rope.")
    rotary_base: float = flag(10000.0, "Base theta of the rotary frequencies.")
    rotary_percent: float = flag(1.0, "Part of each head's channels that is rotated, 0 to 1.")
    rotary_interleaved: bool = flag(False, "Rotate neighbouring channels in pairs instead of the two halves.")
    rotary_seq_len_interpolation_factor: int | None = flag(
        None, "Divide positions by this factor before rotating (linear interpolation to longer sequences)."
    )
    use_rope_scaling: bool = flag(False, "Llama-3.1's scaling of the low rotary frequencies.")
    rope_scaling_factor: float = flag(8.0, "Factor of --use-rope-scaling.")
    rope_type: str | None = flag(
        None,
        "Rotary frequencies: as they are, or stretched to longer sequences as in YaRN.",
        choices=("rope", "yarn"),
        shown_default="yarn with --multi-latent-attention, else rope",
    )
    rotary_scaling_factor: float = flag(1.0, "YaRN: how many times longer than originally sequences may be.")
    original_max_position_embeddings: int = flag(4096, "YaRN: sequence length in tokens of the original training.")
    beta_fast: float = flag(32.0, "YaRN: channels that turn more often over the original length keep their frequency.")
    beta_slow: float = flag(1.0, "YaRN: channels that turn less often are slowed down by the whole factor.")
    mscale: float = flag(1.0, "YaRN: strength of the correction of rotated queries and keys.")
    mscale_all_dim: float = flag(0.0, "YaRN: the same, of all channels' attention scores.")
    multi_latent_attention: bool = flag(False, "Multi-head latent attention: keys and values from a narrow latent.")
    q_lora_rank: int | None = flag(None, "Width of the queries' latent.", shown_default="queries have no latent")
    kv_lora_rank: int = flag(32, "Width of the latent of keys and values.")
    qk_head_dim: int = flag(128, "Latent attention: channels of a head's queries and keys that are not rotated.")
    qk_pos_emb_head_dim: int = flag(64, "Latent attention: rotated channels; their keys are shared by all heads.")
    v_head_dim: int = flag(128, "Latent attention: channels of a head's values.")
    latent_norm_epsilon: float | None = flag(
        None, "Latent attention: epsilon of the latents' norms.", shown_default="--norm-epsilon"
    )
    make_vocab_size_divisible_by: int = flag(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size, in tokens."
    )
    unpadded_vocab_size: int | None = derived(None)  # ids in use; `with_vocab_size` sets both from the tokenizer
    padded_vocab_size: int | None = derived(None)  # rows of the embedding
    normalization: str = flag("LayerNorm", "Normalization layer.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "Added to the variance inside the normalization.")
    apply_layernorm_1p: bool = flag(False, "Store norm weights minus one, so that weight decay pulls them to one.")
    swiglu: bool = flag(False, "Gated MLP: SiLU(a) * b, two input projections in fc1.")
    bias_gelu_fusion: bool = flag(
        True,
        "GELU in its exact form, by the error function, also where linears have biases: there Megatron-LM's fused one "
        "is the tanh form (GPT-2's).",
        spelling="--no-bias-gelu-fusion",
    )
    squared_relu: bool = flag(False, "Squared ReLU as the MLP's activation.")
    untie_embeddings_and_output_weights: bool = flag(False, "Give the LM head a weight of its own.")
    add_bias_linear: bool = flag(True, "Leave out the biases of all linear layers.", spelling="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "Keep the bias of the qkv projection when --disable-bias-linear removes the rest.")
    qk_layernorm: bool = flag(False, "Normalize each head's queries and keys before attention.")
    num_experts: int | None = flag(None, "Mixture of experts: number of experts of a layer.", shown_default="dense")
    moe_layer_freq: str = flag(
        "1",
        "Which layers have experts: N for every N-th from the first, or a list expression such as [0]*3+[1]*58.",
        metavar="N|LIST",
    )
    moe_ffn_hidden_size: int | None = flag(
        None, "Width of an expert's inner layer (of each half with --swiglu).", shown_default="--ffn-hidden-size"
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "Width of the shared experts together, which see every token.", shown_default="no shared experts"
    )
    moe_shared_expert_gate: bool = flag(False, "Weigh the shared experts' output by a learned gate.")
    moe_router_topk: int = flag(2, "Experts that each token goes to.")
    moe_router_score_function: str = flag(
        "softmax", "From the router's logits to scores.", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(False, "Softmax over all experts before top-k, instead of over the chosen.")
    moe_router_norm_topk_prob: bool = flag(
        True,
        "With sigmoid scores: don't divide the chosen experts' weights by their sum.",
        spelling="--moe-router-no-norm-topk-prob",
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None, "Multiply the chosen experts' weights.", shown_default="1"
    )
    moe_router_num_groups: int | None = flag(None, "Experts are chosen within the best of so many groups of experts.")
    moe_router_group_topk: int | None = flag(None, "How many groups a token's experts may come from.")
    moe_router_group_scores: int | None = flag(
        None,
        "How many of its best scores a group is judged by, added up; DeepSeek's own code always takes 2.",
        shown_default="--moe-router-topk / --moe-router-group-topk, as in Megatron-LM",
    )
    moe_router_dtype: str | None = flag(
        None, "Number format of the router's product; never below fp32.", choices=("fp32", "fp64"), shown_default="fp32"
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "Balance by a bias on the scores that only selection sees, moved once a step towards equal load."
    )
    moe_router_bias_update_rate: float = flag(1e-3, "How far an expert's bias moves in a step.")
    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",),
        "What balances the load: losses over a microbatch (aux_loss), each sequence (seq_aux_loss), the global batch "
        "(global_aux_loss), one or several; or sinkhorn; or none.",
        nargs="+",
        metavar="TYPE",
        shown_default="aux_loss",
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag(
        (0.0,),
        "Coefficient of each auxiliary loss of --moe-router-load-balancing-type.",
        nargs="+",
        metavar="X",
        shown_default="0.0",
    )
    moe_z_loss_coeff: float | None = flag(None, "Coefficient of the loss on large logits.", shown_default="off")
    moe_expert_capacity_factor: float | None = flag(
        None,
        "Most tokens that an expert takes of a microbatch, in even shares (tokens x top-k / experts); the rest is "
        "dropped.",
        shown_default="no limit: nothing is dropped",
    )
    moe_token_drop_policy: str = flag(
        "probs",
        "Which of an expert's tokens stay when there are too many: those of largest weight, or the first ones.",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = flag(
        False, "Give every expert as many rows as its capacity, zeros where there are no tokens: sizes never change."
    )
    moe_router_force_load_balancing: bool = flag(
        False, "For benchmarks: deal tokens out to the experts in turn, whatever the router says."
    )
    moe_per_layer_logging: bool = flag(
        False, "Log auxiliary losses and every expert's load by layer, not only means over the layers."
    )
    mtp_num_layers: int | None = flag(
        None, "Multi-token prediction: how many tokens beyond the next are predicted.", shown_default="0"
    )
    mtp_loss_scaling_factor: float = flag(0.1, "Weight of the mean loss of those predictions.")
    init_method_std: float = flag(0.02, "Standard deviation of the normal distribution of initial weights.")
    hidden_dropout: float = flag(0.1, "Dropout probability of the embedding's and each sublayer's output.")
    attention_dropout: float = flag(0.1, "Dropout probability of attention weights.")

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts. Raises ValueError for a wrong --moe-layer-freq."""
        if self.num_experts is None:
            return (False,) * self.num_layers
        return layer_pattern("--moe-layer-freq", self.moe_layer_freq, self.num_layers)

    @property
    def window(self) -> int | None:
        """How many keys before its own a token sees; None: all. Raises ValueError for a wrong --window-size."""
        return None if self.window_size is None else left_window(self.window_size)

    @property
    def query_channels(self) -> int:
        """Channels of a head's queries and keys."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def value_channels(self) -> int:
        """Channels of a head's values."""
        return self.v_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def group_scores(self) -> int:
        """How many of its best scores a group of experts is judged by; 0 where there are no groups."""
        if self.moe_router_group_topk is None:
            return 0
        return self.moe_router_group_scores or self.moe_router_topk // self.moe_router_group_topk

    @property
    def balancing_losses(self) -> dict[str, float]:
        """Auxiliary loss -> its coefficient, of those that have an effect."""
        pairs = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False)
        return {kind: weight for kind, weight in pairs if kind not in ("none", "sinkhorn") and weight}
