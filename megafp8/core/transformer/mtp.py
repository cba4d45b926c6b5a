"""Multi-token prediction (DeepSeek-V3, section 2.2): each depth predicts one token further ahead.

Depth k (from 0) joins the hidden state of token i with the embedding of token i + k + 1, runs one more layer, and
predicts token i + k + 2. Embedding and LM head are the model's own; a depth hands its normalized output to the next.
Tokens whose target lies in another document, or past the sequence, have no loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.context_parallel import gather_sequences, own_tokens
from megafp8.core.tensor_parallel.specs import replicated
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.layer import TransformerLayer
from megafp8.core.transformer.norm import hidden_norm
from megafp8.core.transformer.recompute import recomputed
from megafp8.fp8 import Linear
from megafp8.parallel import Axis
from megafp8.params import Init
from megafp8.step import StepContext


class PredictionDepth(nn.Module):
    """name: global name, e.g. "mtp.0". Its layer is of the kind of the model's last one."""

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        model, plan = build.model, build.recompute
        self.recompute = bool(plan.unit) and plan.layers is None
        self.embedding_norm = hidden_norm(f"{name}.embedding_norm", build)
        self.hidden_norm = hidden_norm(f"{name}.hidden_norm", build)
        width = model.hidden_size
        spec = replicated(
            f"{name}.eh_proj.weight",
            (width, 2 * width),
            Init("normal", model.init_method_std),
            decay=True,
            gradient_is_part=build.sequence_parallel,
        )
        self.eh_proj = Linear(2 * width, width, False, weight_spec=spec, params_dtype=build.dtype, device=build.device)
        self.layer = TransformerLayer(f"{name}.layer", build, experts=model.moe_layers[-1], recomputed=self.recompute)
        self.final_norm = hidden_norm(f"{name}.final_norm", build)

    def forward(self, hidden: Tensor, embedded: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """hidden: what the model, or the depth before, hands to the LM head, [T, hidden]; embedded: of the tokens
        ahead, [T, hidden]. Returns [T, hidden], for the LM head."""
        x = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        x = self.eh_proj(x, step)
        if self.recompute:
            x = recomputed(lambda x, step: self.layer(x, sequences, step), step, x)
        else:
            x = self.layer(x, sequences, step)
        return self.final_norm(x)


ALONE = Axis()


@dataclass(frozen=True)
class Ahead:
    """The tokens `distance` further on, [T] each: ids, positions, labels, and the weight of their losses (0 where
    they are in another document)."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    loss_mask: Tensor


def look_ahead(
    distance: int,
    tokens: Tensor,
    positions: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    sequences: Sequences,
    cp: Axis = ALONE,
) -> Ahead:
    """tokens, positions, labels, loss_mask: [T], of T = batch * length tokens.

    cp: the ranks that share each sequence. The tokens ahead may be another's, so all come together for it: a few
    numbers a token.
    """
    values = (tokens, positions, labels, loss_mask)
    tokens, positions, labels, loss_mask = (_whole(x, sequences.batch, cp) for x in values)
    count = tokens.numel()
    here = torch.arange(count, device=tokens.device)
    there = (here + distance).clamp(max=count - 1)
    if sequences.cu_seqlens is None:
        document = here // (sequences.length * cp.size)
    else:
        document = torch.bucketize(here, sequences.cu_seqlens[1:].long(), right=True)
    valid = (here + distance < count) & (document[there] == document)
    ahead = (tokens[there], positions[there], labels[there], loss_mask[there] * valid)
    return Ahead(*(own_tokens(x.view(sequences.batch, -1), cp).reshape(-1) for x in ahead))


def _whole(x: Tensor, batch: int, cp: Axis) -> Tensor:
    return x if cp.size == 1 else gather_sequences(x, batch, cp).reshape(-1)
