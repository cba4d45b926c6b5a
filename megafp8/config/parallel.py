"""How the work is spread over processes."""

from dataclasses import dataclass

from megafp8.config.flags import derived, flag

SCHEDULES = {"1f1b": False, "gpipe": False, "zero-bubble": True}
"""Of a pipeline: name -> whether it defers weight gradients."""


@dataclass(frozen=True)
class ParallelConfig:
    """Process layout and communication."""

    tensor_model_parallel_size: int = flag(1, "Number of ranks that share each layer's weights.")
    pipeline_model_parallel_size: int = flag(1, "Number of pipeline stages that the layers are dealt to.")
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "Stages written out, e.g. 'Et*3|(tt|)*6tL': | ends a stage, E embedding, t layer, m multi-token prediction, "
        "L loss.",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "Layers of the first pipeline rank; the others share the rest."
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "Layers of the last pipeline rank; the others share the rest."
    )
    account_for_embedding_in_pipeline_split: bool = flag(False, "The embedding counts as a layer of the first stage.")
    account_for_loss_in_pipeline_split: bool = flag(False, "LM head and loss count as a layer of the last stage.")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Layers of each of a rank's virtual stages, which interleave.", shown_default="all of a rank's layers"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Number of virtual stages of each pipeline rank, which interleave.", shown_default="1"
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        None,
        "Least number of microbatches that go through a virtual stage in turn.",
        spelling="--microbatch-group-size-per-virtual-pipeline-stage",
        shown_default="--pipeline-model-parallel-size",
    )
    pipeline_schedule: str = flag(
        "1f1b",
        "Order of forwards and backwards in a pipeline; zero-bubble defers weight gradients to fill the bubble.",
        choices=tuple(SCHEDULES),
    )
    wgrad_queue_mib: int | None = flag(
        None,
        "MiB that zero-bubble's deferred weight gradients may hold; beyond, the oldest run at once.",
        shown_default="as much as the schedule defers",
    )
    context_parallel_size: int = flag(1, "Number of ranks that share each sequence.")
    cp_comm_type: tuple[str, ...] | None = flag(
        None,
        "How context-parallel attention sees all keys: p2p passes them around a ring, all_gather gathers them first.",
        choices=("p2p", "all_gather"),
        nargs="+",
        shown_default="all_gather",
    )
    expert_model_parallel_size: int = flag(1, "Number of ranks that share each layer's experts.")
    expert_tensor_parallel_size: int | None = flag(
        None, "Number of ranks that share each expert's weights.", shown_default="--tensor-model-parallel-size"
    )
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        "How tokens get to experts on other ranks: each to those of its experts, all to all of them, or by a library.",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_flex_dispatcher_backend: str = flag(
        "deepep", "The library of --moe-token-dispatcher-type flex; it has to be installed.", choices=("deepep",)
    )
    moe_shared_expert_overlap: bool = flag(
        False, "Run the shared experts while tokens travel to the routed ones (no effect on one rank)."
    )
    moe_fp8_dispatch: bool = flag(
        False,
        "Send tokens to experts as FP8 bytes and scales: half the traffic, the same results. Needs power-of-two scales "
        "by row (blockwise, mxfp8).",
    )
    moe_fp8_combine_grad: bool = flag(
        False, "Send the gradients of experts' outputs in FP8 as well; needs --moe-fp8-dispatch."
    )
    sequence_parallel: bool = flag(
        False, "Split norms and dropout along the sequence over the tensor-parallel ranks (no effect at size 1)."
    )
    overlap_grad_reduce: bool = flag(False, "Reduce gradients while backward goes on (no effect on one rank).")
    overlap_param_gather: bool = flag(
        False, "Gather updated parameters while forward goes on; needs --use-distributed-optimizer."
    )
    grad_reduce_in_bf16: bool = flag(
        False, "Sum gradients over data-parallel ranks in BF16, half the traffic (no effect on one rank)."
    )
    tp_comm_overlap: bool = flag(False, "Overlap tensor-parallel communication with GEMMs (no effect at size 1).")
    distributed_backend: str = flag(
        "nccl", "Communication library on GPUs; the CPU always uses gloo.", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(10, "Minutes after which a collective that hangs ends the run.")
    fake_process_group: bool = flag(
        False,
        "Run one rank of a large job alone, for its memory and time beside the plan's: WORLD_SIZE and RANK in the "
        "environment say which. Communication answers at once; no loss means anything.",
    )
    world_size: int = derived(1)  # number of processes: WORLD_SIZE, which torchrun sets
    data_parallel_size: int = derived(1)  # world size / (tensor * pipeline * context)


def layout_sizes(p: ParallelConfig) -> dict[str, int]:
    """Returns the size of every axis: tp, cp, dp, pp; ep, etp, edp for experts, which are folded on their own.

    Raises:
        ValueError: they don't multiply to the number of processes; the line names the flags.
    """
    tp, cp, pp = p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size
    ep, etp = p.expert_model_parallel_size, p.expert_tensor_parallel_size or tp
    dense, expert = tp * cp * pp, ep * etp * pp
    if p.world_size % dense:
        raise ValueError(
            f"world size {p.world_size} = tp {tp} x cp {cp} x pp {pp} x dp does not work out: it is no multiple of "
            f"--tensor-model-parallel-size {tp} x --context-parallel-size {cp} x --pipeline-model-parallel-size {pp} "
            f"= {dense}; start a multiple of {dense} processes, or lower one of them"
        )
    if p.world_size % expert:
        raise ValueError(
            f"world size {p.world_size} = ep {ep} x expert tp {etp} x pp {pp} x expert dp does not work out: it is no "
            f"multiple of --expert-model-parallel-size {ep} x --expert-tensor-parallel-size {etp} x "
            f"--pipeline-model-parallel-size {pp} = {expert}; start a multiple of {expert} processes, or lower one of "
            "them"
        )
    dp, edp = p.world_size // dense, p.world_size // expert
    return {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp, "edp": edp}
