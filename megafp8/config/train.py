"""The training loop: batches, length, evaluation, precision, recomputation."""

from dataclasses import dataclass

from megafp8.config.flags import derived, flag
from megafp8.config.patterns import iteration_ranges


@dataclass(frozen=True)
class TrainConfig:
    """Training loop."""

    micro_batch_size: int | None = flag(None, "Samples that one rank runs at once. Required.")
    global_batch_size: int | None = flag(
        None,
        "Samples of one optimizer step, over all ranks and microbatches.",
        shown_default="micro batch size x data-parallel size",
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "Let the global batch grow: first size, increment, and consumed samples at which it is --global-batch-size.",
        nargs=3,
        metavar="N",
        shown_default="off",
    )
    step_batch_size_schedule: tuple[str, ...] | None = flag(
        None,
        'Change the global batch in steps: TOKENS:SAMPLES pairs such as "0:768 250B:1536" (suffixes K, M, B, T), of '
        "consumed tokens and the batch from there on. --global-batch-size is then the largest.",
        nargs="+",
        metavar="TOKENS:SAMPLES",
        shown_default="off",
    )
    batch_size_steps: tuple[int, ...] = derived(())  # consumed samples and samples of a step, in turn
    train_iters: int | None = flag(None, "Length of the whole training in iterations; or give --train-samples.")
    train_samples: int | None = flag(None, "Length of the whole training in samples; or give --train-iters.")
    eval_interval: int = flag(1000, "Iterations between evaluations on the validation set.")
    eval_iters: int = flag(100, "Global batches of one evaluation; 0 turns evaluation off.")
    skip_train: bool = flag(False, "Load, evaluate, and stop.")
    exit_interval: int | None = flag(None, "Stop at an iteration divisible by this.")
    exit_duration_in_mins: int | None = flag(None, "Save and stop after so many minutes.")
    iterations_to_skip: tuple[str, ...] = flag(
        (),
        "Iterations, counted from 1, whose data is passed over without a step: numbers, and ranges a:b (b included).",
        nargs="+",
        metavar="N",
        shown_default="none",
    )
    check_for_spiky_loss: bool = flag(
        False,
        "Rerun an iteration whose loss jumps, from the same state, to tell a transient fault from a real one. The loss "
        "is read every step, so the GPU waits (docs/trust.md).",
    )
    rerun_mode: str = flag(
        "disabled",
        "With validate_results rerun suspicious iterations, with report_stats every one, and report whether bits "
        "agree; exit code 16 where a restart has to decide (docs/trust.md).",
        choices=("disabled", "validate_results", "report_stats"),
    )
    seed: int = flag(1234, "Seed of weights, data order and dropout.")
    bf16: bool = flag(False, "Compute in bfloat16; without it in float32. FP8 needs it.")
    recompute_activations: bool = flag(False, "Old form of --recompute-granularity selective.")
    recompute_granularity: str | None = flag(
        None,
        "Recompute activations in backward instead of keeping them: whole layers, or --recompute-modules.",
        choices=("full", "selective"),
        shown_default="off",
    )
    recompute_method: str | None = flag(
        None,
        "Full recomputation: of all layers in units (uniform), or of the first --recompute-num-layers (block).",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(None, "Layers of a unit (uniform), or layers recomputed (block).")
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "Parts that selective recomputation covers: core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, "
        "shared_experts.",
        nargs="*",
        metavar="MODULE",
        shown_default="core_attn",
    )
    cross_entropy_chunks: int = flag(
        1,
        "Run LM head and loss on so many parts of a microbatch's tokens in turn, and again in backward: logits of one "
        "part exist at a time, for one more product of the head.",
    )
    cuda_graph_impl: str = flag(
        "none",
        "Launch layers from CUDA graphs, one a layer and pass: small microbatches and tensor parallelism else wait for "
        "the host. Not with pipeline or context parallelism (docs/conversions.md).",
        choices=("none", "local", "transformer_engine", "full_iteration"),
    )
    cuda_graph_modules: tuple[str, ...] = flag(
        (),
        "What a CUDA graph covers: whole layers, which is also the default; other parts are refused.",
        aliases=("--cuda-graph-scope",),
        nargs="*",
        metavar="MODULE",
        shown_default="whole layers",
    )
    cuda_graph_warmup_steps: int = flag(3, "Steps without CUDA graphs before they are recorded.")
    deterministic_mode: bool = flag(False, "Only deterministic kernels: the same run twice gives the same bits.")
    device: str = flag("auto", "Where to run; auto takes a GPU when there is one.", choices=("auto", "cpu", "cuda"))
    dry_run: bool = flag(False, "Print configuration, module precisions, parameters and memory, and stop.")

    @property
    def skipped_ranges(self) -> tuple[tuple[int, int], ...]:
        """(first, last) of the iterations to skip."""
        return iteration_ranges("--iterations-to-skip", self.iterations_to_skip)
