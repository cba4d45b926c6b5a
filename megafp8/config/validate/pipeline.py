"""Checks of pipeline and context parallelism."""

from megafp8.config.config import Config, flag_of
from megafp8.config.parallel import SCHEDULES
from megafp8.config.pipeline import pipeline_stages

SPLITS = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
)
VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


def pipeline(c: Config) -> str | None:
    """Every layer is on exactly one stage, and every flag about stages has an effect."""
    p = c.parallel
    if p.pipeline_model_parallel_layout is not None:
        for name in SPLITS:
            if c.is_given(name):
                return f"{flag_of(name)} contradicts --pipeline-model-parallel-layout, which lays all out; drop one"
    if p.pipeline_model_parallel_size == 1:
        return _one_stage(c)
    try:
        pipeline_stages(c.model, p)
    except ValueError as error:
        return str(error)
    group = p.microbatch_group_size_per_vp_stage
    if group is not None and group < p.pipeline_model_parallel_size:
        return (
            f"{flag_of('microbatch_group_size_per_vp_stage')} {group} is less than --pipeline-model-parallel-size "
            f"{p.pipeline_model_parallel_size}: stages would wait for each other; raise it"
        )
    if p.wgrad_queue_mib is not None and not SCHEDULES[p.pipeline_schedule]:
        able = " or ".join(name for name, defers in SCHEDULES.items() if defers)
        return f"--wgrad-queue-mib {p.wgrad_queue_mib} needs --pipeline-schedule {able}; add it"
    return None


def _one_stage(c: Config) -> str | None:
    p = c.parallel
    for name in ("pipeline_schedule", "wgrad_queue_mib"):  # ours: no script carries them along
        if c.is_given(name):
            return f"{flag_of(name)} {c.value(name)} needs --pipeline-model-parallel-size 2 or more"
    for name in VIRTUAL:
        if (c.value(name) or 1) > 1 and c.is_given(name) and not _all_layers(c, name):
            return f"{flag_of(name)} {c.value(name)} needs --pipeline-model-parallel-size 2 or more; drop it"
    if p.pipeline_model_parallel_layout is not None:
        try:
            stages = pipeline_stages(c.model, p)
        except ValueError as error:
            return str(error)
        if len(stages) > 1:
            return (
                f"--pipeline-model-parallel-layout {p.pipeline_model_parallel_layout!r} has {len(stages)} stages: give "
                "--pipeline-model-parallel-size"
            )
    return None


def _all_layers(c: Config, name: str) -> bool:
    return name.startswith("num_layers_per") and c.value(name) == c.model.num_layers


def context_parallel(c: Config) -> str | None:
    p = c.parallel
    cp, tp, length = p.context_parallel_size, p.tensor_model_parallel_size, c.data.seq_length
    if cp == 1:
        return None
    if length % (2 * cp):
        return (
            f"--seq-length {length} is not divisible by 2 x --context-parallel-size {cp}, since each rank takes an "
            f"early and a late part of every sequence; make it a multiple of {2 * cp}"
        )
    if p.sequence_parallel and length // cp % tp:
        return (
            f"--seq-length {length} / --context-parallel-size {cp} is not divisible by --tensor-model-parallel-size "
            f"{tp}; change one of them, or drop --sequence-parallel"
        )
    if len(set(p.cp_comm_type or ())) > 1 or len(p.cp_comm_type or ()) > 1:
        return f"--cp-comm-type {' '.join(p.cp_comm_type)}: one type for all layers; give one of them"
    if "p2p" in (p.cp_comm_type or ()) and c.model.attention_dropout:
        return (
            f"--attention-dropout {c.model.attention_dropout} with --cp-comm-type p2p: a ring draws no dropout; use "
            "--attention-dropout 0 or --cp-comm-type all_gather"
        )
    return None
