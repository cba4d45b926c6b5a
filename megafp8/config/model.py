"""Architecture of the model: sizes, positions, norms, activation, dropout, initialization."""

from dataclasses import dataclass

from megafp8.config.flags import derived, flag


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
    make_vocab_size_divisible_by: int = flag(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size, in tokens."
    )
    unpadded_vocab_size: int | None = derived(None)  # ids in use; `with_vocab_size` sets both from the tokenizer
    padded_vocab_size: int | None = derived(None)  # rows of the embedding
    normalization: str = flag("LayerNorm", "Normalization layer.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "Added to the variance inside the normalization.")
    apply_layernorm_1p: bool = flag(False, "Store norm weights minus one, so that weight decay pulls them to one.")
    swiglu: bool = flag(False, "Gated MLP: SiLU(a) * b, two input projections in fc1.")
    squared_relu: bool = flag(False, "Squared ReLU as the MLP's activation.")
    untie_embeddings_and_output_weights: bool = flag(False, "Give the LM head a weight of its own.")
    add_bias_linear: bool = flag(True, "Leave out the biases of all linear layers.", spelling="--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "Keep the bias of the qkv projection when --disable-bias-linear removes the rest.")
    qk_layernorm: bool = flag(False, "Normalize each head's queries and keys before attention.")
    init_method_std: float = flag(0.02, "Standard deviation of the normal distribution of initial weights.")
    hidden_dropout: float = flag(0.1, "Dropout probability of the embedding's and each sublayer's output.")
    attention_dropout: float = flag(0.1, "Dropout probability of attention weights.")
