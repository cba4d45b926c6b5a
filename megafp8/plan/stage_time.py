"""Time of one microbatch in a stage of the model: forward, backward without weight gradients, weight gradients.

GEMMs of this rank's parts, attention's products over the keys that a token sees, and what else reads and writes memory,
in bytes a token (e: compute dtype; i, f: fc1's and fc2's inner widths; w: qkv's output):

    forward    norm -> quantize   h (e + 2)            split, rotate  2 w e          sums  6 h e
               quantize proj's input  a d (e + 1), BF16 0      activation  i e + f, BF16 i e + f e
    backward   dY -> FP8          h (e + 2) a linear, w (e + 2)       norm's gradient  4 h e
               activation         f e + i e + 2 i + f    rotate  2 w e    proj's input again  a d (e + 1), BF16 0
    experts    rows permuted and quantized on the way in, summed on the way back; the same in backward
    router     its FP32 copies, 12 h e forward and backward; scores
    loss       the kernels of GPUs: logits read, then read and their gradient written in their place, 3 e a logit;
               backward multiplies that by the loss's gradient, 2 e
    again      parts that backward recomputes, with all of their forward; norms  h (e + 1), BF16 2 h e; an activation
               of experts in BF16  i e + f e (in FP8 its remaking is part of backward anyway)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megafp8.config import Config
from megafp8.config.pipeline import Stage
from megafp8.fp8 import Recipe
from megafp8.plan.activations import LayerKind, LayerKinds
from megafp8.plan.cluster import Cluster
from megafp8.plan.flops import keys_seen
from megafp8.plan.shapes import LayerShape, PartShape, layer_linears
from megafp8.plan.sizes import Sizes
from megafp8.plan.speed import ATTENTION_BACKWARD, attention_seconds, gemm_seconds, memory_seconds

LOSS_FORWARD, LOSS_BACKWARD = 3, 2
"""Times that a logit is read or written (kernels/cross_entropy.py)."""


@dataclass(frozen=True)
class Times:
    """Seconds. input: backward without weight gradients, recomputation included."""

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(self.forward + other.forward, self.input + other.input, self.weight + other.weight)

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weight


class StageClock:
    """Times of a configuration's parts on one of its ranks."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        self.config, self.cluster, self.kinds = config, cluster, LayerKinds(config)
        self.sizes = self.kinds.sizes

    def chunk(self, chunk: Stage) -> Times:
        """Of a stage of the model and one microbatch."""
        m, train, total = self.config.model, self.config.train, Times()
        count = len(chunk.layers)
        whole = 0
        if train.recompute_granularity == "full":
            whole = min(train.recompute_num_layers or 1, count) if train.recompute_method == "block" else count
        for place, number in enumerate(chunk.layers):
            total += self.layer(LayerShape(f"layers.{number}", m.moe_layers[number]), whole=place < whole)
        if chunk.loss:
            total += self.head()
            for k in range(m.mtp_num_layers or 0):
                everything = train.recompute_granularity == "full" and train.recompute_method == "uniform"
                total += self.layer(LayerShape(f"mtp.{k}.layer", m.moe_layers[-1]), whole=everything)
                total += self.head() + self._linear(PartShape("eh_proj", m.hidden_size, 2 * m.hidden_size))
        return total

    def layer(self, layer: LayerShape, *, whole: bool = False) -> Times:
        """whole: backward runs it again."""
        train = self.config.train
        chosen = tuple(train.recompute_modules or ()) if train.recompute_granularity == "selective" else ()
        return _layer_times(self.cluster, self.kinds(layer), self.config.data.seq_length, None if whole else chosen)

    def _linear(self, shape: PartShape) -> Times:
        s = self.sizes
        sizes = (None, s.tokens, shape.out_features, shape.in_features)
        return Times(*(gemm_seconds(self.cluster, role, *sizes) for role in ("fprop", "dgrad", "wgrad")))

    def head(self) -> Times:
        """LM head and loss; in chunks, backward runs them again."""
        s, m = self.sizes, self.config.model
        columns = m.padded_vocab_size // s.tp
        gemms = self._linear(PartShape("lm_head", columns, m.hidden_size))
        logits = s.tokens * columns * s.element
        times = gemms + _memory(self.cluster, logits * LOSS_FORWARD, logits * LOSS_BACKWARD)
        return times + Times(input=times.forward) if self.config.train.cross_entropy_chunks > 1 else times

    def update(self, elements: int, shard: int) -> float:
        """The optimizer's: norm and update of this rank's shard (34 bytes an element), and gradients zeroed."""
        return memory_seconds(self.cluster, 34.0 * shard + 4.0 * elements)


AGAIN = {"core": ("core_attn",), "up": ("mla_up_proj",), "mlp": ("mlp",), "experts": ("moe",), "rows": ("moe",),
         "shared": ("moe", "shared_experts")}  # fmt: skip
"""Part of a layer -> the recomputations that run it again."""


@lru_cache(maxsize=1 << 14)
def _layer_times(cluster: Cluster, kind: LayerKind, length: int, recomputed: tuple[str, ...] | None) -> Times:
    """length: of the sequences; recomputed: parts that backward computes again, None for the whole layer."""
    layer = LayerTimes(cluster, kind, length)
    parts = layer.parts()
    if recomputed is None:
        again = sum(times.forward for times in parts.values())
    else:
        again = sum(times.forward for name, times in parts.items() if set(AGAIN.get(name, ())) & set(recomputed))
        again += layer.remade(recomputed)
    return sum(parts.values(), Times()) + Times(input=again)


@dataclass(frozen=True)
class LayerTimes:
    """A layer of a kind; length: of the sequences, in tokens."""

    cluster: Cluster
    kind: LayerKind
    length: int

    @property
    def sizes(self) -> Sizes:
        return self.kind.sizes

    def parts(self) -> dict[str, Times]:
        """By part: attention's linears, up (the latents' projections), core, mlp, experts, shared, rows, around."""
        s, m = self.sizes, self.sizes.model
        recipes, found = self.recipes, {}
        for whole in layer_linears(m, experts=self.kind.experts):
            name = whole.part.rpartition(".")[2]
            part = "up" if name in ("q_up", "kv_up") else whole.part.partition(".")[0]
            part = "experts" if "*" in whole.part else "shared" if "shared" in whole.part else part
            times = self._linear(s.local(whole), recipes[whole.part.replace("*", "0")])
            found[part] = found.get(part, Times()) + times
        found |= {"around": self._around(), "core": self._attention()}
        return found | ({"rows": self._rows()} if self.kind.experts else {})

    def remade(self, recomputed: tuple[str, ...]) -> float:
        """Seconds that norms and the experts' activation take to be made anew, where that is asked for."""
        s, m, e, size = self.sizes, self.sizes.model, self.sizes.element, 0
        if "layernorm" in recomputed:
            size += 2 * s.stream_tokens * m.hidden_size * (e + (self.quantizes // 2 or e))
        first = next((shape for shape in map(s.local, layer_linears(m, experts=self.kind.experts))
                      if shape.part == "mlp.experts.*.fc1"), None)  # fmt: skip
        if first is not None and "moe_act" in recomputed and self.recipes["mlp.experts.0.fc2"] is None:
            size += s.rows * first.out_features * e * (1.5 if m.swiglu else 2)
        return memory_seconds(self.cluster, size)

    @property
    def recipes(self) -> dict[str, Recipe | None]:
        return dict(self.kind.recipes)

    @property
    def quantizes(self) -> int:
        """Bytes of an operand's FP8 copies in both directions, an element; 0 without FP8."""
        return 2 if any(recipe is not None for recipe in self.recipes.values()) else 0

    def _around(self) -> Times:
        """Norms, sums, heads split and rotated, operands quantized."""
        s, m, e, quantizes = self.sizes, self.sizes.model, self.sizes.element, self.quantizes
        hidden, heads = s.stream_tokens * m.hidden_size, m.num_attention_heads // s.tp
        width = heads * m.query_channels * (3 if m.multi_latent_attention else 1)
        width += 0 if m.multi_latent_attention else 2 * (m.num_query_groups // s.tp) * m.kv_channels
        out = heads * m.value_channels * (e + 1) if self.recipes["attention.proj"] is not None else 0
        forward = 2 * hidden * (e + (quantizes or e)) + 6 * hidden * e + s.tokens * (2 * width * e + out)
        backward = 8 * hidden * e + s.tokens * (width * (3 * e + quantizes) + out)
        backward += 2 * s.tokens * m.hidden_size * (e + quantizes) if quantizes else 0
        return _memory(self.cluster, forward, backward)

    def _linear(self, shape: PartShape, recipe: Recipe | None) -> Times:
        """GEMMs of a linear, or of a row of like ones; and of an MLP's second, the activation before it."""
        s, expert = self.sizes, "*" in shape.part
        rows, groups = (s.rows, shape.copies) if expert else (s.tokens, 1)
        sizes = (recipe, rows, shape.out_features, shape.in_features, groups)
        times = Times(*(gemm_seconds(self.cluster, role, *sizes) for role in ("fprop", "dgrad", "wgrad")))
        if not shape.part.endswith("fc2"):
            return times
        f, e, gate, in_fp8 = shape.in_features, s.element, 2 if s.model.swiglu else 1, recipe is not None
        backward = f * e + gate * f * (e + (2 if in_fp8 else e)) + (f if in_fp8 else 0)
        return times + _memory(self.cluster, rows * f * (gate * e + (1 if in_fp8 else e)), rows * backward)

    def _attention(self) -> Times:
        s, m = self.sizes, self.sizes.model
        keys = keys_seen(self.length, m.window)
        flops = 2 * s.tokens * (m.num_attention_heads // s.tp) * (m.query_channels + m.value_channels) * keys
        forward = attention_seconds(self.cluster, flops)
        return Times(forward, ATTENTION_BACKWARD * forward)

    def _rows(self) -> Times:
        """Tokens to the experts' rows and back, and the router."""
        s, m, e, quantizes = self.sizes, self.sizes.model, self.sizes.element, self.quantizes
        sent = s.routed_tokens * m.moe_router_topk * m.hidden_size * e if s.exchanges else 0
        rows = s.rows * m.hidden_size
        moved = 4 * sent + rows * (2 * e + (e + quantizes if quantizes else 0))
        router = 12 * s.routed_tokens * m.hidden_size + 12 * s.tokens * m.num_experts
        return _memory(self.cluster, moved + router, moved + rows * e + 2 * router)


def _memory(cluster: Cluster, forward: float, backward: float) -> Times:
    """Memory-bound work, in bytes."""
    return Times(memory_seconds(cluster, forward), memory_seconds(cluster, backward))
