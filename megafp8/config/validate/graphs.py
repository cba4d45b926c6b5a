"""What CUDA graphs of layers can't have: every microbatch must launch the same kernels on the same addresses."""

from collections.abc import Callable

from megafp8.config.config import Config, flag_of
from megafp8.config.resolve import WHOLE_LAYERS


def cuda_graphs(c: Config) -> str | None:
    t = c.train
    if t.cuda_graph_impl == "none":
        return None
    if t.cuda_graph_impl != "local":
        return f"--cuda-graph-impl {t.cuda_graph_impl}: graphs here are of one layer each; use --cuda-graph-impl local"
    if other := [part for part in t.cuda_graph_modules if part != WHOLE_LAYERS]:
        return f"--cuda-graph-modules {' '.join(other)}: graphs are of whole layers; use full, or leave it out"
    for name, stands, why, mend in RULES:
        if stands(c.value(name)):
            value = "" if c.value(name) is True else f" {c.value(name)}"
            mend = f"{mend}, or leave --cuda-graph-impl out" if mend else "leave --cuda-graph-impl out"
            return f"{flag_of(name)}{value} with --cuda-graph-impl local: {why}; {mend}"
    return None


_SEED = "the seed of dropout is a number of the host's"
RULES: tuple[tuple[str, Callable[[object], bool], str, str], ...] = (
    # field, whether its value is in the way, why, the mend besides going without graphs
    ("context_parallel_size", lambda size: size > 1, "attention's messages are not recorded", "use 1"),
    ("pipeline_model_parallel_size", lambda size: size > 1, "several microbatches are in flight", "use 1"),
    ("fake_process_group", bool, "its few steps run without graphs", ""),
    ("num_experts", lambda count: count is not None, "an expert's number of tokens changes", ""),
    ("mtp_num_layers", bool, "layers that predict further tokens are not recorded", "drop it"),
    ("reset_attention_mask", bool, "the number of documents changes", "drop it"),
    ("hidden_dropout", bool, _SEED, "use 0"),
    ("attention_dropout", bool, _SEED, "use 0"),
    ("recompute_granularity", bool, "recomputation is not recorded", "drop it"),
)
