"""What CUDA graphs of layers can't have: a layer must launch the same kernels on the same addresses every microbatch."""

from collections.abc import Callable

from megafp8.config.config import Config, flag_of

WHOLE_LAYERS = ("full",)
WITHOUT = "or leave --cuda-graph-impl out"


def cuda_graphs(c: Config) -> str | None:
    t = c.train
    if t.cuda_graph_impl == "none":
        return None
    if t.cuda_graph_impl != "local":
        return f"--cuda-graph-impl {t.cuda_graph_impl}: graphs are recorded here, a layer each; use --cuda-graph-impl local"
    if other := [part for part in t.cuda_graph_modules if part not in WHOLE_LAYERS]:
        return f"--cuda-graph-modules {' '.join(other)}: graphs are of whole layers; use full, or leave it out"
    return next((f"{_shown(c, name)} {why}" for name, stands, why in RULES if stands(c)), None)


_Rule = tuple[str, Callable[[Config], bool], str]
_MESSAGES = "with --cuda-graph-impl local: messages between ranks inside of a layer are not recorded; use 1, " + WITHOUT
_DROPOUT = f"with --cuda-graph-impl local: its seed is a number of the host's; use 0, {WITHOUT}"
_SHAPES = f"with --cuda-graph-impl local: the number of documents changes from one microbatch to the next; drop it, {WITHOUT}"
RULES: tuple[_Rule, ...] = (
    *(
        (name, lambda c, name=name: c.value(name) > 1, _MESSAGES)
        for name in ("tensor_model_parallel_size", "context_parallel_size")
    ),
    (
        "pipeline_model_parallel_size",
        lambda c: c.parallel.pipeline_model_parallel_size > 1,
        "with --cuda-graph-impl local: several microbatches are in flight, and a graph has room for one; use 1, "
        + WITHOUT,
    ),
    (
        "pipeline_schedule",
        lambda c: c.parallel.pipeline_schedule == "zero-bubble",
        f"with --cuda-graph-impl local: weight gradients that wait are not recorded; use 1f1b, {WITHOUT}",
    ),
    (
        "num_experts",
        lambda c: c.model.num_experts is not None,
        f"with --cuda-graph-impl local: an expert's number of tokens changes from one microbatch to the next; {WITHOUT[3:]}",
    ),
    (
        "mtp_num_layers",
        lambda c: bool(c.model.mtp_num_layers),
        f"with --cuda-graph-impl local: layers that predict further tokens are not recorded; {WITHOUT[3:]}",
    ),
    ("reset_attention_mask", lambda c: c.data.reset_attention_mask, _SHAPES),
    ("hidden_dropout", lambda c: c.model.hidden_dropout > 0, _DROPOUT),
    ("attention_dropout", lambda c: c.model.attention_dropout > 0, _DROPOUT),
    (
        "recompute_granularity",
        lambda c: c.train.recompute_granularity is not None,
        f"with --cuda-graph-impl local: recomputation is not recorded; drop it, {WITHOUT}",
    ),
)


def _shown(c: Config, name: str) -> str:
    value = c.value(name)
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"
