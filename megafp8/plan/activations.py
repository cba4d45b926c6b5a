"""What one microbatch holds for backward on one rank, by module, in bytes, and what backward adds for a while.

T tokens, h hidden size, f MLP width (the inner width i is 2f with SwiGLU), a query heads, g key/value heads, d width
of a head, V padded vocabulary, e bytes of the compute dtype. q8(T x K) is an FP8 copy with its scales.

    input_norm, mlp_norm   T h e (its input) and FP32 statistics
    qkv                    T h e, or q8(T x h)
    core attention         T (a + 2g) d e (q, k, v), T a d e (its output), 4 T a (log of the softmax's sum)
    q_norm, k_norm         T (a + 2g) d e (qkv's output) and FP32 statistics
    proj                   nothing: it reads the core's output; q8(T x a d) where that is recomputed
    fc1                    T h e, or q8(T x h)
    activation             T i e (fc1's output); T (i + 4 i/128) with --activation-func-fp8-input-store
    fc2                    T f e in high precision; FP8: nothing, its input is remade from fc1's output
    final_norm, lm_head    T h e each
    loss                   T V e (logits, whose gradient takes their place); with --cross-entropy-chunks nothing

Latent attention and mixtures of experts: layer_activations.py. A depth of multi-token prediction holds 2 T h e for its
linear, the inputs of its three norms, a layer, and what the LM head and the loss hold.

Widths are this rank's parts (sizes.py); under sequence parallelism norms and the inputs of column-parallel linears are
of S = T / TP tokens. Context parallelism keeps keys and values of whole sequences, unless a ring passes them on.

Recomputation keeps inputs instead: of whole layers (a unit's input, T h e), of the core attention (q, k, v), of the
MLP or the mixture of experts (mlp_norm's input), or of norms (their outputs are made anew).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from megafp8.config import Config
from megafp8.config.model import ModelConfig
from megafp8.config.pipeline import Stage
from megafp8.fp8 import Recipe, policy
from megafp8.plan.layer_activations import Activation, LayerPlan, quantized_bytes
from megafp8.plan.rank_parameters import held_stages
from megafp8.plan.shapes import LayerShape, layer_linears, layers
from megafp8.plan.sizes import Sizes
from megafp8.plan.transients import PARTS, backward_bytes, loss_bytes, part_of

__all__ = ["Activation", "Phase", "by_module", "layer_activations", "peak_of", "quantized_bytes", "stage_phases"]

IDS_BYTES = 8
"""A token id is int64."""


@dataclass(frozen=True)
class Phase:
    """A part of the model whose backward is counted as one.

    kept: from forward to backward. again: made again before its backward, and dropped with it. backward: most that its
    backward holds on top of both. what: that is, in words.
    """

    kept: tuple[Activation, ...]
    again: int = 0
    backward: int = 0
    what: str = "gradients"

    @property
    def bytes(self) -> int:
        return sum(a.bytes for a in self.kept)


def stage_phases(config: Config, device: torch.device, stage: int = 0) -> list[list[Phase]]:
    """Returns the phases of a microbatch in each of the stages of pipeline rank `stage`.

    Args:
        config: resolved, with the vocabulary known (`with_vocab_size`).
        device: whose GEMMs decide on orientations.
    """
    return [chunk_phases(config, chunk, device) for chunk in held_stages(config, stage)]


def layer_activations(config: Config, device: torch.device, number: int = 0) -> list[Activation]:
    """Returns what one layer holds of a microbatch when its forward ends, its input included, unless it is recomputed
    as a whole."""
    return list(LayerKinds(config, device)(layers(config)[number]).plan(_selected(config)).items())


def chunk_phases(config: Config, chunk: Stage, device: torch.device) -> list[Phase]:
    """Returns the phases of a stage of the model, in the order of the forward pass."""
    sizes, m, kinds = Sizes.of(config), config.model, LayerKinds(config, device)
    phases = [Phase(tuple(_inputs(config, sizes, chunk)))]
    own = [LayerShape(f"layers.{number}", m.moe_layers[number]) for number in chunk.layers]
    recomputed, unit = _recomputed_layers(config, len(own)), _unit(config)
    for start in range(0, recomputed, unit):
        members = own[start : min(start + unit, recomputed)]
        phases.append(_recomputed_unit("layers", kinds, members, sizes))
    for layer in own[recomputed:]:
        phases.extend(_layer_phases(kinds(layer), _selected(config)))
    if chunk.loss:
        phases.append(_head_phase(config, sizes))
        for layer in (layer for layer in layers(config) if layer.name.startswith("mtp.")):
            phases.extend(_prediction(config, kinds, layer, sizes))
    return phases


def _inputs(config: Config, s: Sizes, chunk: Stage) -> Iterator[Activation]:
    m = config.model
    if chunk.embedding:
        yield Activation("embedding", "token ids", s.tokens * IDS_BYTES)
    if m.position_embedding_type == "rope":
        turned = m.qk_pos_emb_head_dim if m.multi_latent_attention else int(m.kv_channels * m.rotary_percent)
        yield Activation("rotation", "cosines and sines", 4 * s.tokens * turned)


def peak_of(phases: Iterable[Phase]) -> tuple[int, str]:
    """Returns the most bytes that a microbatch's backward holds, and what holds them beside what forward kept."""
    held, most = 0, (0, "gradients")
    for phase in phases:
        held += phase.bytes
        most = max(most, (held + phase.again + phase.backward, phase.what))
    return most


def by_module(items: Iterable[Activation]) -> list[Activation]:
    """Returns the sums over layers, in the order in which modules first appear."""
    sums: dict[tuple[str, str], int] = {}
    for item in items:
        sums[item.module, item.what] = sums.get((item.module, item.what), 0) + item.bytes
    return [Activation(module, what, total) for (module, what), total in sums.items()]


def _recomputed_layers(config: Config, own: int) -> int:
    """How many of a stage's layers, from the first, are recomputed whole."""
    train = config.train
    if train.recompute_granularity != "full":
        return 0
    return min(train.recompute_num_layers or 1, own) if train.recompute_method == "block" else own


def _unit(config: Config) -> int:
    return 1 if config.train.recompute_method == "block" else config.train.recompute_num_layers or 1


def _selected(config: Config) -> tuple[str, ...]:
    """The parts of a layer that selective recomputation computes again."""
    train = config.train
    return train.recompute_modules or () if train.recompute_granularity == "selective" else ()


@dataclass(frozen=True)
class LayerKind:
    """What the bytes of a layer depend on; layers that agree in it are alike. recipes: of its linears, by part."""

    sizes: Sizes
    experts: bool
    recipes: tuple[tuple[str, Recipe | None], ...]
    device: torch.device
    fp8_input_store: bool | None = None

    def plan(self, recomputed: tuple[str, ...] = ()) -> LayerPlan:
        """recomputed: parts that backward computes again."""
        layer, recipes = LayerShape("layer", self.experts), {f"layer.{part}": recipe for part, recipe in self.recipes}
        return LayerPlan(layer, self.sizes, recipes.__getitem__, self.device, recomputed, self.fp8_input_store)


class LayerKinds:
    """Called with a layer: its kind."""

    def __init__(self, config: Config, device: torch.device | str = "cpu") -> None:
        self.sizes, self.device = Sizes.of(config), torch.device(device)
        self.store = config.fp8.activation_func_fp8_input_store
        self.recipe_of = policy.from_config(config)
        kinds = set(config.model.moe_layers)
        self.parts = {experts: _part_names(config.model, experts=experts) for experts in kinds}
        self._alike = not self.recipe_of.keep and not self.recipe_of.others
        self._known: dict[bool, LayerKind] = {}

    def __call__(self, layer: LayerShape) -> LayerKind:
        if self._alike and layer.experts in self._known:  # no pattern tells layers apart
            return self._known[layer.experts]
        recipes = tuple((part, self.recipe_of(f"{layer.name}.{part}")) for part in self.parts[layer.experts])
        self._known[layer.experts] = LayerKind(self.sizes, layer.experts, recipes, self.device, self.store)
        return self._known[layer.experts]


def _part_names(model: ModelConfig, *, experts: bool) -> tuple[str, ...]:
    """Names of a layer's linears; of experts, the first one's."""
    return tuple(shape.part.replace("*", "0") for shape in layer_linears(model, experts=experts))


@lru_cache(maxsize=1 << 14)
def _layer_phases(kind: LayerKind, recomputed: tuple[str, ...] = ()) -> tuple[Phase, ...]:
    return tuple(_parts_of_layer(kind, recomputed))


def _parts_of_layer(kind: LayerKind, recomputed: tuple[str, ...]) -> Iterator[Phase]:
    whole, kept = kind.plan(), kind.plan(recomputed)
    of_whole, of_kept = list(whole.items()), list(kept.items())
    for part in PARTS:
        own = tuple(a for a in of_kept if part_of(a.module) == part)
        again = sum(a.bytes for a in of_whole if part_of(a.module) == part) - sum(a.bytes for a in own)
        what = "gradients in a layer" if again <= 0 else "a layer's parts made again, gradients"
        yield Phase(own, max(0, again), backward_bytes(whole, part), what)


def _recomputed_unit(name: str, kinds: LayerKinds, members: list[LayerShape], sizes: Sizes) -> Phase:
    """Layers that backward runs again together; their inputs are the residual stream, which the first one's norm keeps
    too."""
    most, _ = peak_of(phase for layer in members for phase in _layer_phases(kinds(layer)))
    held = Activation(name, "input of recomputed units", sizes.stream)
    shared = sizes.stream if sizes.norm_input == sizes.element else 0
    return Phase((held,), again=most - shared, what="one unit of layers made again, gradients")


def _head_phase(config: Config, s: Sizes, prefix: str = "") -> Phase:
    chunks = config.train.cross_entropy_chunks
    tokens, fused = -(-s.tokens // chunks), config.train.device != "cpu"
    logits = tokens * (config.model.padded_vocab_size // s.tp) * s.element
    kept = (
        Activation(f"{prefix}final_norm", "input", s.norm(s.stream_tokens, s.model.hidden_size)),
        Activation(f"{prefix}lm_head", "input", s.stream),
    )
    if chunks > 1:
        # The parts' gradients are put together at the end.
        made_again = logits + loss_bytes(s, tokens, fused=fused) + s.stream
        return Phase(kept, backward=made_again, what="one part's logits made again")
    kept = (*kept, Activation(f"{prefix}loss", "logits", logits))
    return Phase(kept, backward=loss_bytes(s, tokens, fused=fused), what="gradients of LM head and loss")


def _prediction(config: Config, kinds: LayerKinds, layer: LayerShape, s: Sizes) -> Iterator[Phase]:
    """A depth of multi-token prediction. The hidden states that it reads are the LM head's input before it."""
    rows = s.stream_tokens
    norms = s.norm(rows, s.model.hidden_size) + 4 * s.statistics * rows
    if s.norm_input != s.element:  # a copy of the LM head's input
        norms += rows * s.model.hidden_size * s.norm_input
    yield Phase(
        (
            Activation("mtp", "token ids", s.tokens * IDS_BYTES),
            Activation("mtp.norms", "embedding and statistics", norms),
            Activation("mtp.eh_proj", "input", 2 * s.stream),
        ),
        backward=4 * s.stream,
    )
    if config.train.recompute_granularity == "full" and config.train.recompute_method == "uniform":
        yield _recomputed_unit("mtp.layer", kinds, [layer], s)
    else:
        for phase in _layer_phases(kinds(layer), _selected(config)):
            named = tuple(Activation(f"mtp.layer.{a.module}", a.what, a.bytes) for a in phase.kept)
            yield Phase(named, phase.again, phase.backward, phase.what)
    yield _head_phase(config, s, "mtp.")
