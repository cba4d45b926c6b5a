"""What a run writes about itself."""

from dataclasses import dataclass

from megafp8.config.flags import flag


@dataclass(frozen=True)
class LoggingConfig:
    """Logs."""

    log_dir: str | None = flag(
        None, "Directory of the run: args.json, metrics.jsonl, TensorBoard events.", metavar="DIR"
    )
    log_interval: int = flag(100, "Iterations between training lines.")
    log_params_norm: bool = flag(False, "Log the L2 norm of all parameters.")
    log_num_zeros_in_grad: bool = flag(False, "Log how many gradient elements are exactly 0.")
    log_throughput: bool = flag(False, "Print TFLOPS a GPU on the console line (metrics.jsonl always has them).")
    tensorboard_dir: str | None = flag(
        None, "Directory of TensorBoard events.", metavar="DIR", shown_default="--log-dir's"
    )
    wandb_project: str = flag(
        "", "Log to Weights & Biases as well, in this project; needs --wandb-exp-name.", metavar="NAME"
    )
    wandb_exp_name: str = flag("", "Name of the run in Weights & Biases.", metavar="NAME")
    wandb_entity: str = flag("", "Team or user in Weights & Biases.", metavar="NAME")
    wandb_save_dir: str = flag(
        "", "Directory of Weights & Biases' own files.", metavar="DIR", shown_default="--log-dir's"
    )
    timing_log_level: int = flag(
        0,
        "Time the phases of an iteration: 1 what runs once in each, 2 also forward, backward and all waits for other "
        "ranks (docs/working_day.md).",
        choices=(0, 1, 2),
    )
    timing_log_option: str = flag(
        "minmax", "Which of the ranks' times the console shows.", choices=("max", "minmax", "all")
    )
    log_timers_to_tensorboard: bool = flag(
        False, "Write the phases' times to TensorBoard: of the slowest rank, in seconds."
    )
    profile: bool = flag(
        False,
        "Write a trace of some iterations to --log-dir, for Perfetto or Chrome; under nsys, NVTX ranges and its "
        "capture range instead.",
    )
    profile_step_start: int = flag(10, "Iterations done before the first one that is profiled.")
    profile_step_end: int = flag(12, "Last iteration that is profiled.")
    profile_ranks: tuple[int, ...] = flag(
        (0,), "Global ranks to profile.", nargs="+", metavar="RANK", shown_default="0"
    )
    use_pytorch_profiler: bool = flag(False, "With --profile: write the trace even under nsys.")
    pytorch_profiler_collect_shapes: bool = flag(False, "With --profile: the shapes of every operator's inputs.")
    pytorch_profiler_collect_callstack: bool = flag(
        False, "With --profile: the Python line that called each operator (slow)."
    )
    record_memory_history: bool = flag(
        False,
        "Record every allocation on CUDA; the last rank writes a snapshot with each training line, and every rank one "
        "when memory runs out.",
    )
    memory_snapshot_path: str = flag(
        "snapshot.pickle",
        "File of memory snapshots, in --log-dir unless it is a whole path; the rank is put into its name.",
        metavar="FILE",
    )
