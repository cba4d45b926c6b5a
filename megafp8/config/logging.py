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
