"""The ledger of a step's format conversions: where a number changes its format, how many bytes that moves, and which
kernel does it on the way to something else, or for its own sake.

    input         X, where its producer makes it: RMSNorm, SwiGLU, the rows of experts; by a kernel of its own for proj,
                  whose input attention keeps in BF16 anyway
    grad_output   dY, where SwiGLU's gradient makes it (fc1); by a kernel of its own elsewhere
    weight        once a step, both orientations in one pass; inside AdamW where FP8 bytes are the weight
    the rest      logits, masters, gradients of norms and embeddings

Bytes are those that the conversion reads and writes beyond what its host would move anyway, for a microbatch of one
rank (weights, masters: for a step). Derived from the configuration; what recomputation repeats is not listed again.
`tools/bench_step.py` compares it with the profiler's list of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megafp8.config import Config
from megafp8.fp8 import Recipe, policy
from megafp8.fp8.formats import Scale
from megafp8.plan.shapes import LayerShape, PartShape, layer_linears, layers, parameter_count
from megafp8.plan.sizes import Sizes

MICROBATCH, STEP = "microbatch", "step"
NORM_KERNELS = ("norm_rows", "norm_both", "norm_tiles")
QUANTIZE_KERNELS = ("quantize_1d", "quantize_2d", "cast_kernel", "amax_kernel")
EXPERT_KERNELS = ("row_amax_kernel", "expert_amax_kernel", "expert_cast_kernel")  # of one scale an expert
SWIGLU_KERNELS = ("swiglu",)
ROW_KERNELS = ("grouped_kernel", "spread_kernel", "sums_kernel")
TRANSPOSE_KERNELS = ("transpose_kernel",)
COPIES = ("copy_kernel", "memcpy dtod")  # PyTorch's: anybody's, so what counts is how many there are


@dataclass(frozen=True)
class Conversion:
    """place: what is converted, with the layers' number as `*`; when: forward, backward or update; source, target:
    formats; orientations: of the bytes. nbytes: moved for its sake, each time. times: in a microbatch or a step, over
    all layers. fused: into what; "" for a kernel of its own. kernels: words in the names of the GPU kernels that do it,
    none where it is an operand of some arithmetic. launches: how many at most, where others have kernels of that name.
    """

    place: str
    when: str
    source: str
    target: str
    orientations: str
    nbytes: int
    times: int
    fused: str
    kernels: tuple[str, ...]
    every: str = MICROBATCH
    launches: int | None = None

    @property
    def total(self) -> int:
        """Bytes over all layers."""
        return self.nbytes * self.times


def conversions(config: Config) -> list[Conversion]:
    """The ledger of a configuration whose vocabulary is known, in the order of a step; of a rank's part where ranks
    share the work by tokens, and of whole features."""
    sizes, kinds = Sizes.of(config), {}
    for layer in layers(config):
        kinds.setdefault(layer.experts, []).append(layer)
    found: list[Conversion] = []
    for members in kinds.values():
        found += _of_layers(config, sizes, members)
    return [*found, *_of_the_rest(config, sizes)]


def _of_layers(config: Config, sizes: Sizes, members: list[LayerShape]) -> Iterator[Conversion]:
    recipe_of, count = policy.from_config(config), len(members)
    for shape in layer_linears(config.model, experts=members[0].experts):
        recipe = recipe_of(f"{members[0].name}.{next(shape.parts)}")
        if recipe is not None:
            yield from _of_linear(config, sizes, shape, recipe, count)


def _of_linear(config: Config, sizes: Sizes, shape: PartShape, recipe: Recipe, count: int) -> Iterator[Conversion]:
    m, rows, k, n = config.model, sizes.tokens * shape.share, shape.in_features, shape.out_features
    formats, place, high = recipe.formats, f"layers.*.{shape.part}", _high(config)
    expert, part = "*" in shape.part, shape.part.rpartition(".")[2]
    each = expert and recipe.input_tile == "tensor"  # a scale an expert: rows are read for it before they are spread
    producer, kernels = _producer(config, shape, recipe)
    again = _input_is_made_again(part, producer)
    x = _bytes(recipe, "input", rows, k)
    passes = 2 if each or _needs_amax(recipe) else 1  # a tensor's scale is known only after its last element
    forward = "row" if again else "row + col"
    read = passes * rows * k * sizes.element
    moved = (1 if again else 2) * x + (0 if producer else read)
    moved += sizes.tokens * k * sizes.element if each and part == "fc1" else 0
    yield Conversion(
        f"{place} input", "forward", high, formats["input"], forward, moved, count, producer,
        kernels or QUANTIZE_KERNELS,
    )  # fmt: skip
    gated = producer == "SwiGLU" and m.swiglu
    if again:
        read = read if producer else rows * k * sizes.element  # the amax is forward's
        yield Conversion(
            f"{place} input", "backward", high, formats["input"], "col", x + (0 if gated else read), count,
            "SwiGLU's gradient" if gated else producer and f"{producer} again",
            SWIGLU_KERNELS if gated else kernels or QUANTIZE_KERNELS,
        )  # fmt: skip
    fused = part == "fc1" and m.swiglu and not (shape.bias or _square(recipe, "grad_output"))
    spread = expert and part == "fc2" and not _square(recipe, "grad_output")  # quantized as rows go to experts
    amaxes = sizes.tokens * n * sizes.element if spread and each else 0
    dy, maker = 2 * _bytes(recipe, "grad_output", rows, n), "SwiGLU's gradient" if fused else "rows of experts"
    yield Conversion(
        f"{place} grad_output", "backward", high, formats["grad_output"], "row + col",
        dy + amaxes + (0 if fused or spread else passes * rows * n * sizes.element), count,
        maker if fused or spread else "",
        SWIGLU_KERNELS if fused else ROW_KERNELS + QUANTIZE_KERNELS if expert else QUANTIZE_KERNELS,
    )  # fmt: skip
    yield _of_weight(config, sizes, shape, recipe, count)


def _of_weight(config: Config, sizes: Sizes, shape: PartShape, recipe: Recipe, count: int) -> Conversion:
    n, k, copies = shape.out_features, shape.in_features, shape.copies // (sizes.ep if "*" in shape.part else 1)
    stored, place = _bytes(recipe, "weight", n, k), f"layers.*.{shape.part} weight"
    primary = config.fp8.fp8_param_gather
    source = "fp32" if primary else _high(config)
    read = 0 if primary else (2 if _needs_amax(recipe) else 1) * n * k * sizes.element
    fused, kernels = ("AdamW", ("adamw", "cast_kernel", "transpose")) if primary else ("", QUANTIZE_KERNELS)
    return Conversion(
        place, "update" if primary else "forward", source, recipe.formats["weight"], "row + col", 2 * stored + read,
        count * copies, fused, (*kernels, *TRANSPOSE_KERNELS), STEP,
    )  # fmt: skip


def _producer(config: Config, shape: PartShape, recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """What makes a linear's input and quantizes it on the way, and its kernels; "" where a kernel of its own does."""
    m, (place, _, part) = config.model, shape.part.rpartition(".")
    if _square(recipe, "input"):
        return "", ()
    if part == "fc2":
        return ("SwiGLU", SWIGLU_KERNELS) if m.swiglu else ("", ())
    if "*" in shape.part:
        return "rows of experts", ROW_KERNELS + (EXPERT_KERNELS if recipe.input_tile == "tensor" else ())
    shared = place == "mlp.shared_experts"  # its input is the router's as well
    if m.normalization == "RMSNorm" and part in ("qkv", "q_proj", "q_down", "q_up", "kv_down", "kv_up", "fc1"):
        return ("", ()) if shared else ("RMSNorm", NORM_KERNELS)
    return "", ()


def _input_is_made_again(part: str, producer: str) -> bool:
    """Whether backward quantizes the input anew, from what somebody keeps anyway."""
    return part == "proj" or (part == "fc2" and producer == "SwiGLU")


def _of_the_rest(config: Config, sizes: Sizes) -> Iterator[Conversion]:
    m, tokens, high = config.model, sizes.tokens, _high(config)
    logits = tokens * m.padded_vocab_size // sizes.tp
    element, uses = sizes.element, 1 + (m.mtp_num_layers or 0)
    routers = sum(layer.experts for layer in layers(config))
    if routers:
        yield _of_router(config, sizes, routers)
    if high != "fp32":
        heads = tokens * m.num_attention_heads * m.query_channels // sizes.tp
        yield Conversion("layers.*.attention.core dQ", "backward", "fp32", high, "", heads * (4 + element),
                         len(layers(config)), "attention", ("convert_dq", "sdpa", "cudnn"))  # fmt: skip
        yield Conversion("loss: logits", "forward", high, "fp32", "", 0, uses, "the loss", ("loss_rows",))
        yield Conversion(
            "loss: gradient of the logits",
            "forward",
            "fp32",
            high,
            "",
            logits * element,
            uses,
            "the loss",
            ("loss_grad",),
        )
        stream = tokens * m.hidden_size
        yield Conversion("embedding: gradient", "backward", high, "fp32", "", stream * (element + 4), uses, "", COPIES,
                         launches=uses)  # fmt: skip
    small = (2 * len(layers(config)) + 1) * m.hidden_size
    yield Conversion("gradients of norms", "backward", high, "fp32", "", small * (element + 8), 1, "addition", ())
    if high != "fp32":
        masters = parameter_count(config)
        yield Conversion("masters", "update", "fp32", high, "", masters * element, 1, "AdamW", ("adamw",), STEP)
    yield Conversion("tokens, labels, masks", "forward", "host", "device", "", tokens * 32, 1, "", ("memcpy htod",))
    yield Conversion("skip flag, statistics", "update", "device", "host", "", 8, 1, "", ("memcpy dtoh",), STEP)


def _of_router(config: Config, sizes: Sizes, count: int) -> Conversion:
    """In FP32 on GPUs BF16 operands stay what they are, and the logits' gradient becomes three BF16 numbers."""
    m, high, target = config.model, _high(config), config.model.moe_router_dtype or "fp32"
    if high == "bf16" and target == "fp32":
        moved = sizes.tokens * m.num_experts * (4 + 3 * sizes.element)
        return Conversion("layers.*.mlp.router gradient of the logits", "backward", "fp32", "3 x bf16", "", moved,
                          count, "", (*COPIES, "catarray"), launches=6 * count)  # fmt: skip
    moved = sizes.tokens * m.hidden_size * (sizes.element + (8 if target == "fp64" else 4))
    return Conversion("layers.*.mlp.router", "forward, backward", high, target, "", 3 * moved, count, "", COPIES,
                      launches=8 * count)  # fmt: skip


def _high(config: Config) -> str:
    return "bf16" if config.train.bf16 else "fp32"


def _needs_amax(recipe: Recipe) -> bool:
    return recipe.input_tile == "tensor" and not recipe.uses_history


def _square(recipe: Recipe, role: str) -> bool:
    return recipe.tiles[role] == "2d"


def _bytes(recipe: Recipe, role: str, rows: int, columns: int) -> int:
    """Of one orientation, scales included."""
    spec = recipe.quantizer(role).spec
    scales = 1
    for size in spec.tile.scale_shape(rows, columns):
        scales *= size
    return rows * columns + scales * (1 if spec.scale is Scale.E8M0 else 4)


def markdown(ledger: list[Conversion]) -> list[str]:
    """The ledger as rows of a table."""
    lines = ["| what | when | from | to | copies | MiB | times | inside of |", "|---|---|---|---|---|---|---|---|"]
    for c in ledger:
        fused, per = c.fused or "a kernel of its own", "" if c.every == MICROBATCH else " a step"
        size = f"{c.nbytes / 2**20:.1f}" if c.nbytes >= 2**16 else "0"
        cells = (c.place, c.when, c.source, c.target, c.orientations, size, f"{c.times}{per}", fused)
        lines.append("| " + " | ".join(cells) + " |")
    return lines
