"""ParamSpecs of the model's parameters: which part of the global tensor this rank holds, decay, and init.

Weights are cut along their rows (column-parallel: the output features), their columns (row-parallel: the input
features) or not at all (norms, biases of row-parallel linears). Matrices decay; norms, biases and other 1-D
parameters don't.
"""

import math

from megafp8.core.build import BuildContext
from megafp8.parallel import Axis
from megafp8.params import Box, Init, ParamSpec

ZEROS = Init("zeros")
ONES = Init("ones")


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def column_weight(name: str, out_shape: tuple[int, ...], in_features: int, std: float, tp: Axis) -> ParamSpec:
    """Spec of a weight `[out, in]` cut along its output features.

    out_shape: `(out,)`, or several stacked parts such as SwiGLU's `(2, ffn)`: each part is cut, so that a rank
        holds matching rows of all parts.
    """
    rows = tp.split(out_shape[-1])
    box = (*_whole(out_shape[:-1]), rows, (0, in_features))
    local_rows = math.prod(out_shape[:-1]) * (rows[1] - rows[0])
    return ParamSpec(name, (*out_shape, in_features), Init("normal", std), True, box, (local_rows, in_features))


def column_bias(name: str, out_shape: tuple[int, ...], tp: Axis) -> ParamSpec:
    """Spec of the bias that goes with `column_weight`."""
    rows = tp.split(out_shape[-1])
    local = math.prod(out_shape[:-1]) * (rows[1] - rows[0])
    return ParamSpec(name, out_shape, ZEROS, False, (*_whole(out_shape[:-1]), rows), (local,))


def row_weight(name: str, out_features: int, in_features: int, std: float, tp: Axis) -> ParamSpec:
    """Spec of a weight `[out, in]` cut along its input features."""
    box = ((0, out_features), tp.split(in_features))
    return ParamSpec(name, (out_features, in_features), Init("normal", std), True, box)


def vocab_weight(name: str, build: BuildContext) -> ParamSpec:
    """Spec of an embedding or LM head `[vocab, hidden]` cut along the padded vocabulary.

    The global shape is the logical vocabulary: padding rows belong to no box.
    """
    vocab, hidden = build.vocab_size, build.model.hidden_size
    start, stop = build.tp.split(build.model.padded_vocab_size)
    box = ((min(start, vocab), min(stop, vocab)), (0, hidden))
    init = Init("normal", build.model.init_method_std)
    return ParamSpec(name, (vocab, hidden), init, True, box, (stop - start, hidden))


def replicated(
    name: str, shape: tuple[int, ...], init: Init, *, decay: bool = False, gradient_is_part: bool = False
) -> ParamSpec:
    """Spec of a parameter that every tensor-parallel rank holds whole.

    gradient_is_part: each rank's gradient covers only its part of the tokens or heads, and must be summed.
    """
    summed = frozenset({"tp"}) if gradient_is_part else frozenset()
    return ParamSpec(name, shape, init, decay, replicated_over=frozenset({"tp"}), grad_sum_over=summed)
