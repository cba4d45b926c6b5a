"""Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values are made from a narrow latent.

    queries   h -> q_down -> norm -> q_up           per head [unrotated | rotated] channels
    latent    h -> kv_down                          [latent | rotated key], the latter shared by all heads
    keys      latent -> norm -> kv_up               per head [unrotated key | value]

Without `--q-lora-rank`, q_proj makes the queries at once; `--qk-layernorm` brings the two norms. All projections are
FP8 linears. Rotated channels are neighbours in pairs, as in DeepSeek's checkpoints and Megatron-LM.

Under tensor parallelism every rank makes the latents of all tokens alike, and has a part of the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megafp8.core.tensor_parallel.mappings import gather_tokens, sum_gradient
from megafp8.core.tensor_parallel.specs import replicated
from megafp8.core.transformer.core_attention import CoreAttention, Sequences
from megafp8.core.transformer.heads import latent_keys_and_values, latent_queries
from megafp8.core.transformer.norm import Norm, latent_norm
from megafp8.core.transformer.produce import linear_after, normalized_for
from megafp8.core.transformer.recompute import all_remade, recomputed
from megafp8.core.transformer.rope import apply_rotary, score_scale
from megafp8.fp8 import Linear
from megafp8.parallel import Axis
from megafp8.params import Init
from megafp8.step import StepContext


class LatentAttention(nn.Module):
    """name: global name, e.g. "layers.3.attention"."""

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        m = build.model
        self.tp, self.tokens = build.tp, build.tp if build.sequence_parallel else Axis()
        self.heads = m.num_attention_heads // build.tp.size
        self.plain, self.rotated = m.qk_head_dim, m.qk_pos_emb_head_dim
        self.values, self.latent = m.v_head_dim, m.kv_lora_rank
        self.recompute_core = "core_attn" in build.recompute.modules
        self.recompute_up = "mla_up_proj" in build.recompute.modules
        self._build_projections(name, build)
        self.core = CoreAttention(
            build.head_place(f"{name}.core"),
            m.attention_dropout,
            build.deterministic,
            score_scale(m),
            m.window,
            build.parallel.cp,
            build.ring_attention,
        )
        self.proj = RowParallelLinear(
            f"{name}.proj",
            m.num_attention_heads * self.values,
            m.hidden_size,
            bias=m.add_bias_linear,
            init_std=build.output_std,
            requantize_input=not self.recompute_core,
            build=build,
        )

    def _build_projections(self, name: str, build: BuildContext) -> None:
        """Down-projections are whole on every rank; up-projections hold this rank's heads."""
        m, whole = build.model, build.whole_sequences
        # The input norm's output is remade where it is the linears' input.
        remade = "layernorm" in build.recompute.modules and not build.sequence_parallel

        def down(part: str, out_features: int) -> Linear:
            init = Init("normal", m.init_method_std)
            return Linear(
                m.hidden_size,
                out_features,
                False,
                recipe=build.recipe_of(f"{name}.{part}"),
                weight_spec=replicated(f"{name}.{part}.weight", (out_features, m.hidden_size), init, decay=True),
                params_dtype=build.dtype,
                device=build.device,
                name=f"{name}.{part}",
                requantize_input=remade,
                gemm_backend=build.gemm_backend,
            )

        def up(part: str, in_features: int, out_features: int, requantize: bool = False) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                f"{name}.{part}",
                in_features,
                (out_features,),
                bias=False,
                init_std=m.init_method_std,
                requantize_input=requantize,
                build=whole,
            )

        queries = m.num_attention_heads * m.query_channels
        self.q_proj = self.q_norm = None
        if m.q_lora_rank is None:
            self.q_proj = up("q_proj", m.hidden_size, queries, requantize=remade)
        else:
            self.q_down = down("q_down", m.q_lora_rank)
            self.q_norm = latent_norm(f"{name}.q_norm", m.q_lora_rank, build) if m.qk_layernorm else None
            self.q_up = up("q_up", m.q_lora_rank, queries)
        self.kv_down = down("kv_down", self.latent + self.rotated)
        self.kv_norm = latent_norm(f"{name}.kv_norm", self.latent, build) if m.qk_layernorm else None
        self.kv_up = up("kv_up", self.latent, m.num_attention_heads * (self.plain + self.values))

    def after(self, norm: Norm, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """`self(norm(x))`, the norm's output quantized once for both linears that read it."""
        if self.tokens.size > 1:
            return self(norm(x), sequences, step)
        first = self.q_proj if self.q_proj is not None else self.q_down
        return self(normalized_for((first, self.kv_down), norm, x, step), sequences, step)

    def forward(self, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]."""
        x = gather_tokens(x, self.tokens)
        low = self.q_proj(x, step) if self.q_proj is not None else self.q_down(x, step)
        latent, shared = self.kv_down(x, step).split((self.latent, self.rotated), -1)
        inputs = low, latent.contiguous(), sum_gradient(shared, self.tp)

        def up(*inputs_and_step) -> tuple[Tensor, Tensor, Tensor]:
            return self._up(*inputs_and_step[:-1], sequences, inputs_and_step[-1])

        if self.recompute_core and self.recompute_up:
            out = recomputed(lambda *given: self.core(*up(*given), sequences, given[-1]), step, *inputs)
        elif self.recompute_core:
            q, k, v = up(*inputs, step)
            out = recomputed(lambda q, k, v, step: self.core(q, k, v, sequences, step), step, q, k, v)
        else:
            q, k, v = up(*inputs, step)
            with self._up_remade((q, k, v), lambda: up(*inputs, step.recompute())):
                out = self.core(q, k, v, sequences, step)
        return self.proj(out, step)

    def _up_remade(
        self, made: tuple[Tensor, Tensor, Tensor], up: Callable[[], tuple[Tensor, Tensor, Tensor]]
    ) -> AbstractContextManager[None]:
        """Inside, queries, keys and values are not kept; where q_proj made the queries, those are."""
        if not self.recompute_up or not torch.is_grad_enabled():
            return nullcontext()
        first = 1 if self.q_proj is not None else 0

        def remake() -> tuple[Tensor, ...]:  # it must not hold what it makes anew
            with torch.no_grad():
                return up()[first:]

        return all_remade(made[first:], remake)

    def _up(
        self, low: Tensor, latent: Tensor, shared: Tensor, sequences: Sequences, step: StepContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, heads, unrotated + rotated channels], values [T, heads, value channels], contiguous.

        low: latent of the queries, or the queries of q_proj. latent: of keys and values. shared: the rotated key.
        """
        q = low if self.q_proj is not None else linear_after(self.q_norm, self.q_up, low, step)
        up = linear_after(self.kv_norm, self.kv_up, latent, step)
        q = self._queries(q.view(-1, self.heads, self.plain + self.rotated), sequences)
        return q, *self._keys_and_values(up, shared, sequences)

    def _queries(self, q: Tensor, sequences: Sequences) -> Tensor:
        """q: [T, heads, unrotated + rotated channels]; the same, rotated."""
        turned = latent_queries(q, sequences.rotation)
        if turned is not None:
            return turned
        plain, tail = q.split((self.plain, self.rotated), -1)
        return torch.cat([plain, apply_rotary(tail, sequences.rotation, interleaved=True)], -1)

    def _keys_and_values(self, up: Tensor, shared: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """up: [T, heads * (unrotated + value channels)]; shared: [T, rotated channels]."""
        made = latent_keys_and_values(up, shared, sequences.rotation, self.heads, self.plain)
        if made is not None:
            return made
        plain, v = up.view(-1, self.heads, self.plain + self.values).split((self.plain, self.values), -1)
        shared = apply_rotary(shared[:, None], sequences.rotation, interleaved=True)
        return torch.cat([plain, shared.expand(-1, self.heads, -1)], -1), v.contiguous()
