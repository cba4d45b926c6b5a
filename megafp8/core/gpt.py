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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megafp8.config import Config
from megafp8.config.pipeline import Stage, pipeline_stages, stages_of_rank
from megafp8.core.build import BuildContext
from megafp8.core.context_parallel import own_places
from megafp8.core.moe.router import Router, with_loss
from megafp8.core.tensor_parallel.cross_entropy import summed_cross_entropy
from megafp8.core.tensor_parallel.linear import LMHead
from megafp8.core.transformer.block import TransformerBlock
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.embedding import Embedding
from megafp8.core.transformer.mtp import Ahead, PredictionDepth, look_ahead
from megafp8.core.transformer.norm import hidden_norm
from megafp8.core.transformer.recompute import recomputed
from megafp8.core.transformer.rope import inverse_frequencies, rotation, rotation_scale
from megafp8.fp8 import policy
from megafp8.parallel import ParallelContext
from megafp8.params import GradSink, InitialValues, StateItem, initial_value, named_specs
from megafp8.step import Statistics, StepContext

WEIGHTS = "model/"
"""Under which weights are saved."""


class _EarlierUse:
    """Gradients of a parameter that is used again nearer the input: added, but not yet complete.

    The tied weight's gradient is ready when the embedding's backward, the last of the two, has run; autograd runs later
    uses first, so those of multi-token prediction come before the model's own.
    """

    def __init__(self, sink: GradSink) -> None:
        self._sink = sink

    def buffer(self, param: Tensor) -> Tensor:
        return self._sink.buffer(param)

    def target(self, param: Tensor) -> tuple[Tensor, bool]:
        return self._sink.target(param)

    def ready(self, param: Tensor) -> None:
        pass


class _Parts(nn.Module):
    """What the model as a whole is asked, and what each rank of a pipeline answers for its part."""

    def ends(self) -> Iterator[nn.Module]:
        """Embedding and LM head, where they are here."""
        return (module for module in self.modules() if isinstance(module, Embedding | LMHead))

    def routers(self) -> Iterator[Router]:
        """The routers of all layers with experts, in order."""
        return (module for module in self.modules() if isinstance(module, Router))

    def end_step(self, statistics: Statistics) -> None:
        """Once a step: routers take what was counted in it, over the global batch."""
        for router in self.routers():
            router.end_step(statistics)

    def state(self) -> dict[str, StateItem]:
        """What isn't a parameter: the experts' biases, saved beside the weights."""
        biased = (router for router in self.routers() if router.expert_bias is not None)
        return {f"{WEIGHTS}{router.name}.expert_bias": StateItem.whole(router.expert_bias) for router in biased}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes the experts' biases back; other names are ignored. A missing one is KeyError."""
        for name, item in self.state().items():
            item.tensor.copy_(tensors[name])


class GPTModel(_Parts):
    """A decoder-only language model, or one stage of it.

    Parameters carry their global names in `param.spec`; on one rank modules are named alike.
    stage: its layers and ends; None: all.
    """

    def __init__(self, build: BuildContext, stage: Stage | None = None) -> None:
        super().__init__()
        self.stage = stage = stage or Stage(tuple(range(build.model.num_layers)), embedding=True, loss=True)
        self.dtype, self.device, self.hidden_size = build.dtype, build.device, build.model.hidden_size
        self.token_ranks = build.tp.size if build.sequence_parallel else 1
        self.vocab_size, self.tp, self.cp = build.vocab_size, build.tp, build.parallel.cp
        self.padded_vocab_size = build.model.padded_vocab_size
        self.loss_chunks = build.loss_chunks
        self.max_positions = build.model.max_position_embeddings
        self.experts_logged = build.model.num_experts if build.model.moe_per_layer_logging else None
        self.tied = not build.model.untie_embeddings_and_output_weights
        self.mtp_scale = build.model.mtp_loss_scaling_factor / max(build.model.mtp_num_layers or 0, 1)
        depths = build.model.mtp_num_layers or 0 if stage.loss else 0
        self.embedding = Embedding("embedding", build) if stage.embedding or depths else None
        self.layers = TransformerBlock(stage.layers, build)
        self.final_norm = hidden_norm("final_norm", build) if stage.loss else None
        self.lm_head = self._head(build) if stage.loss else None
        self.mtp = nn.ModuleList(PredictionDepth(f"mtp.{k}", build) for k in range(depths))
        rotary = build.model.position_embedding_type == "rope"
        frequencies = inverse_frequencies(build.model, build.device) if rotary else None
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.rotation_scale = rotation_scale(build.model)

    def _head(self, build: BuildContext) -> LMHead:
        if not self.tied:
            return LMHead("lm_head", build)
        if self.embedding is not None:
            return LMHead("lm_head", build, self.embedding.word_embeddings.weight)
        # The first stage has the embedding: here is a copy of the same name, so with the same values.
        return LMHead("embedding.word_embeddings", build)

    def forward(
        self,
        tokens: Tensor,
        *,
        step: StepContext,
        hidden: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Logits, or with `labels` the sum of the valid tokens' losses; a stage before the last, its hidden states.

        In training the loss's backward runs that of auxiliary losses and multi-token prediction too, which its value
        leaves out.

        hidden: what the stage before gave, [T, hidden]; None on the first.
        tokens, labels, position_ids: int64 [b, s], under context parallelism this rank's share of them (`own_tokens`);
            positions count from 0 in each sequence by default.
        loss_mask: FP32 [b, s], the weight of each token's loss; default 1.
        cu_seqlens: int32 [n + 1], document boundaries over the b * s tokens, sequence boundaries included; documents
            don't attend across. Default: one document a sequence.
        Returns logits [b, s, vocabulary] in the compute dtype, padding cut off; or the loss, an FP32 scalar, 0 (not
        NaN) when no token is valid.
        Raises ValueError when a sequence is longer than `--max-position-embeddings` with learned positions.
        """
        positions = self._positions(tokens, position_ids)
        turn = None if self.frequencies is None else rotation(positions, self.frequencies, self.rotation_scale)
        sequences = Sequences(*tokens.shape, turn, cu_seqlens)
        x = self.embedding(tokens.reshape(-1), positions, step) if self.stage.embedding else hidden
        x = self.layers(x, sequences, step)
        if not self.stage.loss:
            return x
        hidden = self.final_norm(x)
        if labels is None:
            logits = self.lm_head(hidden, self._head_step(step))
            return logits[:, : self.vocab_size].view(*tokens.shape, self.vocab_size)
        labels = labels.reshape(-1)
        mask = torch.ones(labels.shape, device=labels.device) if loss_mask is None else loss_mask.reshape(-1)
        loss = self._loss(hidden, labels, mask, self._head_step(step))
        if len(self.mtp) and step.training and torch.is_grad_enabled():
            here = {"tokens": tokens.reshape(-1), "positions": positions, "labels": labels, "loss_mask": mask}
            ahead = partial(look_ahead, **here, sequences=sequences, cp=self.cp)
            loss = with_loss(loss, self.mtp_scale * self._mtp_loss(hidden, ahead, sequences, step))
        return loss

    def _loss(self, hidden: Tensor, labels: Tensor, mask: Tensor, step: StepContext) -> Tensor:
        """Sum of the losses. With several chunks of tokens, logits exist for one of them at a time, and backward
        computes them again."""
        if self.loss_chunks == 1:
            return self._loss_of(hidden, labels, mask, step)
        size, total = -(-hidden.shape[0] // self.loss_chunks), torch.zeros((), device=hidden.device)
        # Backward runs the first chunk last: its gradient completes the weight's.
        later = replace(step, grads=step.grads and _EarlierUse(step.grads))
        labels, mask = (x.view(self.token_ranks, -1).split(size, 1) for x in (labels, mask))  # each rank's tokens
        for number, (part, *rest) in enumerate(zip(hidden.split(size), labels, mask, strict=True)):
            run = partial(self._loss_of_chunk, *(x.reshape(-1) for x in rest))
            total = total + recomputed(run, later if number else step, part)
        return total

    def _loss_of_chunk(self, labels: Tensor, mask: Tensor, hidden: Tensor, step: StepContext) -> Tensor:
        return self._loss_of(hidden, labels, mask, step)

    def _loss_of(self, hidden: Tensor, labels: Tensor, mask: Tensor, step: StepContext) -> Tensor:
        logits = self.lm_head(hidden, step)
        return summed_cross_entropy(logits, labels, mask, self.vocab_size, self.padded_vocab_size, tp=self.tp)

    def _mtp_loss(self, hidden: Tensor, ahead: Callable[..., Ahead], sequences: Sequences, step: StepContext) -> Tensor:
        """Sum of the losses of all depths, which use the embedding and the LM head again."""
        shared = replace(step, grads=step.grads and _EarlierUse(step.grads), wgrads=None)
        total = torch.zeros((), device=hidden.device)
        for k, depth in enumerate(self.mtp):
            near = ahead(k + 1)
            embedded = self.embedding(near.tokens, near.positions, shared, place=f"mtp.{k}.embedding")
            hidden = depth(hidden, embedded, sequences, step)
            loss = self._loss(hidden, near.labels, near.loss_mask, shared)
            if step.records and step.statistics is not None:
                step.statistics.add_mean(f"mtp_{k + 1}_loss", loss, near.loss_mask.sum())
            total = total + loss
        return total

    def _positions(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        """int64 [T]. Raises ValueError for a sequence longer than the table of learned positions."""
        batch, length = tokens.shape[0], tokens.shape[1] * self.cp.size
        if self.frequencies is None and length > self.max_positions:
            raise ValueError(
                f"sequence of {length} tokens is longer than --max-position-embeddings {self.max_positions}: "
                f"raise it, or use --position-embedding-type rope"
            )
        if position_ids is None:
            position_ids = own_places(length, self.cp, tokens.device).expand(batch, -1)
        return position_ids.reshape(-1)

    def _head_step(self, step: StepContext) -> StepContext:
        """The LM head's weight gradient never waits: the logits' gradient is too large to hold."""
        tied_here = self.tied and self.stage.embedding
        grads = _EarlierUse(step.grads) if tied_here and step.grads is not None else step.grads
        return replace(step, grads=grads, wgrads=None)

    @property
    def chunks(self) -> tuple[GPTModel, ...]:
        """The model's stages on this rank: itself."""
        return (self,)

    def hidden_shape(self, tokens: Tensor) -> tuple[int, int]:
        """Shape of what goes from stage to stage for `tokens` [b, s]."""
        return tokens.numel() // self.token_ranks, self.hidden_size


class ModelChunks(_Parts):
    """The stages of an interleaved pipeline that are on this rank, in the order of the model."""

    def __init__(self, chunks: Iterable[GPTModel]) -> None:
        super().__init__()
        self._chunks = nn.ModuleList(chunks)

    @property
    def chunks(self) -> tuple[GPTModel, ...]:
        return tuple(self._chunks)


def initialize(model: nn.Module, seed: int, initial: InitialValues = initial_value) -> None:
    """Writes each parameter's initial value, a function of the seed and its global name, rounded to its dtype."""
    with torch.no_grad():
        for spec, param in named_specs(model):
            param.copy_(initial(spec, seed))


def build_model(
    config: Config,
    parallel: ParallelContext,
    device: torch.device | str,
    *,
    initial: InitialValues = initial_value,
) -> GPTModel | ModelChunks:
    """The model of a configuration whose vocabulary is known (`config.with_vocab_size`), initialized from `--seed`.

    In a pipeline, this rank's stages. On the "meta" device nothing is allocated or initialized.
    Raises ValueError where the layout cuts a linear through its FP8 tiles, and for a --keep-modules-in-bf16 that
    matches nothing.
    """
    device = torch.device(device)
    recipe_of = policy.from_config(config)
    build = BuildContext.of(config, parallel, device, recipe_of)
    if parallel.pp.size == 1:
        model = GPTModel(build)
    else:
        GPTModel(replace(build, device=torch.device("meta")))  # asks the policy for every linear of the model
        stages = pipeline_stages(config.model, config.parallel)
        own = stages_of_rank(stages, parallel.pp.size, parallel.pp.rank)
        chunks = [GPTModel(build, stage) for stage in own]
        model = chunks[0] if len(chunks) == 1 else ModelChunks(chunks)
    recipe_of.check()
    if device.type != "meta":
        initialize(model, config.train.seed, initial)
    return model
