"""GPTModel: embedding, transformer block, final norm, LM head and loss, assembled from the parts.

tokens [b, s] -> hidden states [T, h], T = b * s, batch-major -> logits [T, padded vocabulary] -> losses [T]

Global names of the parameters; N, E and K are the numbers of a layer, an expert and a depth, from 0:

    embedding.{word_embeddings, position_embeddings}.weight, final_norm.{weight, bias}, lm_head.weight
    layers.N.{input_norm, mlp_norm}.{weight, bias}
    layers.N.attention.{qkv, proj}.{weight, bias}, .{q_norm, k_norm}.{weight, bias}   per head
    layers.N.mlp.{fc1, fc2}.{weight, bias}
  multi-head latent attention, in place of qkv, q_norm and k_norm (without --q-lora-rank: q_proj for q_down, q_up):
    layers.N.attention.q_down.weight [q rank, h], .q_norm.weight [q rank], .q_up.weight [heads (nope + rope), q rank]
    layers.N.attention.q_proj.weight [heads (nope + rope), h]
    layers.N.attention.kv_down.weight [kv rank + rope, h], .kv_norm.weight [kv rank],
    layers.N.attention.kv_up.weight [heads (nope + v), kv rank]; rotated channels are neighbours, as DeepSeek's files
  mixture of experts, in place of mlp.fc1 and mlp.fc2:
    layers.N.mlp.router.weight [experts, h], .router.expert_bias [experts] (no parameter: FP32 state of the model)
    layers.N.mlp.experts.E.{fc1, fc2}.weight, layers.N.mlp.shared_experts.{fc1, fc2}.weight
    layers.N.mlp.shared_experts.gate.weight [1, h]
  multi-token prediction; embedding and LM head are the model's own:
    mtp.K.{embedding_norm, hidden_norm, final_norm}.{weight, bias}, mtp.K.eh_proj.weight [h, 2h]   [embedding; hidden]
    mtp.K.layer.*                                     a transformer layer, of the kind of the last one
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megafp8.config import Config
from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megafp8.core.tensor_parallel.linear import LMHead
from megafp8.core.transformer.block import TransformerBlock
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.embedding import Embedding
from megafp8.core.transformer.norm import hidden_norm
from megafp8.core.transformer.rope import inverse_frequencies, rotation
from megafp8.fp8 import policy
from megafp8.parallel import ParallelContext
from megafp8.params import GradSink, initial_value, named_specs
from megafp8.step import StepContext


class _EarlierUse:
    """Gradients of a parameter that is used again nearer the input: added, but not yet complete.

    The tied weight's gradient is ready when the embedding's backward, the last of the two, has run.
    """

    def __init__(self, sink: GradSink) -> None:
        self._sink = sink

    def buffer(self, param: Tensor) -> Tensor:
        return self._sink.buffer(param)

    def ready(self, param: Tensor) -> None:
        pass


class GPTModel(nn.Module):
    """A decoder-only language model.

    Parameters carry their global names in `param.spec`; on one rank modules are named alike.
    """

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.vocab_size, self.tp = build.vocab_size, build.tp
        self.padded_vocab_size = build.model.padded_vocab_size
        self.max_positions = build.model.max_position_embeddings
        self.tied = not build.model.untie_embeddings_and_output_weights
        self.embedding = Embedding("embedding", build)
        self.layers = TransformerBlock(range(build.model.num_layers), build)
        self.final_norm = hidden_norm("final_norm", build)
        self.lm_head = LMHead("lm_head", build, self.embedding.word_embeddings.weight if self.tied else None)
        rotary = build.model.position_embedding_type == "rope"
        frequencies = inverse_frequencies(build.model, build.device) if rotary else None
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(
        self,
        tokens: Tensor,
        *,
        step: StepContext,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Logits, or with `labels` the sum of the valid tokens' losses.

        tokens, labels, position_ids: int64 [b, s]; positions count from 0 in each sequence by default.
        loss_mask: FP32 [b, s], the weight of each token's loss; default 1.
        cu_seqlens: int32 [n + 1], document boundaries over the b * s tokens, sequence boundaries included; documents
            don't attend across. Default: one document a sequence.
        Returns logits [b, s, vocabulary] in the compute dtype, padding cut off; or the loss, an FP32 scalar, 0 (not
        NaN) when no token is valid.
        Raises ValueError when a sequence is longer than `--max-position-embeddings` with learned positions.
        """
        hidden = self._hidden_states(tokens, position_ids, cu_seqlens, step)
        logits = self.lm_head(hidden, self._head_step(step))
        if labels is None:
            return logits[:, : self.vocab_size].view(*tokens.shape, self.vocab_size)
        losses = vocab_parallel_cross_entropy(
            logits, labels.reshape(-1), self.vocab_size, self.padded_vocab_size, tp=self.tp
        )
        return (losses if loss_mask is None else losses * loss_mask.reshape(-1)).sum()

    def _hidden_states(
        self, tokens: Tensor, position_ids: Tensor | None, cu_seqlens: Tensor | None, step: StepContext
    ) -> Tensor:
        batch, length = tokens.shape
        if self.frequencies is None and length > self.max_positions:
            raise ValueError(
                f"sequence of {length} tokens is longer than --max-position-embeddings {self.max_positions}: "
                f"raise it, or use --position-embedding-type rope"
            )
        if position_ids is None:
            position_ids = torch.arange(length, device=tokens.device).expand(batch, length)
        positions = position_ids.reshape(-1)
        turn = None if self.frequencies is None else rotation(positions, self.frequencies)
        x = self.embedding(tokens.reshape(-1), positions, step)
        x = self.layers(x, Sequences(batch, length, turn, cu_seqlens), step)
        return self.final_norm(x)

    def _head_step(self, step: StepContext) -> StepContext:
        if self.tied and step.grads is not None:
            return replace(step, grads=_EarlierUse(step.grads))
        return step


def initialize(model: nn.Module, seed: int) -> None:
    """Writes each parameter's initial value, a function of the seed and its global name, rounded to its dtype."""
    with torch.no_grad():
        for spec, param in named_specs(model):
            param.copy_(initial_value(spec, seed))


def build_model(config: Config, parallel: ParallelContext, device: torch.device | str) -> GPTModel:
    """The model of a configuration whose vocabulary is known (`config.with_vocab_size`), initialized from `--seed`.

    On the "meta" device nothing is allocated or initialized.
    Raises ValueError where the layout cuts a linear through its FP8 tiles, and for a --keep-modules-in-bf16 that
    matches nothing.
    """
    device = torch.device(device)
    recipe_of = policy.from_config(config)
    model = GPTModel(BuildContext.of(config, parallel, device, recipe_of))
    recipe_of.check()
    if device.type != "meta":
        initialize(model, config.train.seed)
    return model
