"""Self-attention with grouped queries: qkv -> (norm) -> rotation -> core attention -> proj.

The rows of the fused qkv weight lie by key/value group, as in Megatron-LM: for each group its query heads, then its
key head, then its value head. So a tensor-parallel cut between groups keeps heads together.
"""

from __future__ import annotations

from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megafp8.core.transformer.core_attention import CoreAttention, Sequences
from megafp8.core.transformer.heads import split_heads
from megafp8.core.transformer.norm import Norm, head_norm
from megafp8.core.transformer.produce import branch_after
from megafp8.core.transformer.recompute import recomputed
from megafp8.core.transformer.rope import apply_rotary
from megafp8.step import StepContext


class SelfAttention(nn.Module):
    """name: global name, e.g. "layers.3.attention"."""

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        model = build.model
        heads, self.channels = model.num_attention_heads, model.kv_channels
        self.queries_per_group = heads // model.num_query_groups
        self.interleaved = model.rotary_interleaved
        self.recompute_core = "core_attn" in build.recompute.modules
        rows = (heads + 2 * model.num_query_groups) * self.channels
        self.qkv = ColumnParallelLinear(
            f"{name}.qkv",
            model.hidden_size,
            (rows,),
            bias=model.add_bias_linear or model.add_qkv_bias,
            init_std=model.init_method_std,
            requantize_input="layernorm" in build.recompute.modules,
            build=build,
        )
        self.q_norm = head_norm(f"{name}.q_norm", build) if model.qk_layernorm else None
        self.k_norm = head_norm(f"{name}.k_norm", build) if model.qk_layernorm else None
        self.core = CoreAttention(
            build.head_place(f"{name}.core"),
            model.attention_dropout,
            build.deterministic,
            window=model.window,
            cp=build.parallel.cp,
            ring=build.ring_attention,
        )
        self.proj = RowParallelLinear(
            f"{name}.proj",
            heads * self.channels,
            model.hidden_size,
            bias=model.add_bias_linear,
            init_std=build.output_std,
            # Core attention keeps its output for its own backward, unless that is computed again.
            requantize_input=not self.recompute_core,
            build=build,
        )

    def forward(self, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]."""
        return self._attend(self.qkv(x, step), sequences, step)

    def after(
        self, norm: Norm, x: Tensor, sequences: Sequences, step: StepContext, *, remake: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`self(norm(x))`, and `x` for the sum that follows; see `branch_after`."""
        qkv, x = branch_after(norm, self.qkv, x, step, remake=remake)
        return self._attend(qkv, sequences, step), x

    def _attend(self, qkv: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        q, k, v = self._heads(qkv, sequences)
        if self.recompute_core:
            out = recomputed(lambda q, k, v, step: self.core(q, k, v, sequences, step), step, q, k, v)
        else:
            out = self.core(q, k, v, sequences, step)
        return self.proj(out, step)

    def _heads(self, qkv: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, heads, d], k and v [T, groups, d], each contiguous: views would keep all of `qkv` alive."""
        tokens, n = qkv.shape[0], self.queries_per_group
        if sequences.rotation is not None and not self.interleaved:
            norms = None if self.q_norm is None else (self.q_norm, self.k_norm)
            heads = split_heads(qkv, sequences.rotation, n, self.channels, norms)
            if heads is not None:
                return heads
        grouped = qkv.view(tokens, -1, n + 2, self.channels)
        q, k, v = grouped.split((n, 1, 1), dim=2)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if sequences.rotation is not None:
            q = apply_rotary(q, sequences.rotation, interleaved=self.interleaved)
            k = apply_rotary(k, sequences.rotation, interleaved=self.interleaved)
        q, k, v = (x.reshape(tokens, -1, self.channels).contiguous() for x in (q, k, v))
        return q, k, v
