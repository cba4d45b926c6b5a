"""The model's input: word embedding, plus learned positions, plus dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.embedding import VocabParallelEmbedding, lookup
from megafp8.core.tensor_parallel.random import dropout
from megafp8.core.tensor_parallel.specs import replicated
from megafp8.parallel import Axis
from megafp8.params import Init, attach_spec
from megafp8.step import StepContext


class PositionEmbedding(nn.Module):
    """A learned table with a row for each position."""

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        shape = (build.model.max_position_embeddings, build.model.hidden_size)
        spec = replicated(
            f"{name}.weight",
            shape,
            Init("normal", build.model.init_method_std),
            decay=True,
            gradient_is_part=build.sequence_parallel,
        )
        self.weight = attach_spec(nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device)), spec)

    def forward(self, position_ids: Tensor, step: StepContext) -> Tensor:
        """position_ids: int64 [T]; returns [T, hidden]."""
        return lookup(self.weight, position_ids, step)


class Embedding(nn.Module):
    """name: global name ("embedding")."""

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        self.place, self.dropout = build.token_place(name), build.model.hidden_dropout
        self.tokens = build.tp if build.sequence_parallel else Axis()
        self.word_embeddings = VocabParallelEmbedding(f"{name}.word_embeddings", build)
        learned = build.model.position_embedding_type == "learned_absolute"
        self.position_embeddings = PositionEmbedding(f"{name}.position_embeddings", build) if learned else None

    def forward(self, tokens: Tensor, position_ids: Tensor, step: StepContext, place: str | None = None) -> Tensor:
        """tokens, position_ids: int64 [T]; returns [T, hidden], or this rank's part of the tokens.

        place: of the dropout, where the embedding is used again.
        """
        x = self.word_embeddings(tokens, step)
        if self.position_embeddings is not None:
            start, stop = self.tokens.split(position_ids.shape[0])
            x = x + self.position_embeddings(position_ids[start:stop], step)
        return dropout(x, self.dropout, step, place or self.place)
