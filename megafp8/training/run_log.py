"""A run's log: `metrics.jsonl`, boards (TensorBoard, W&B), and a console line like Megatron's.

One JSON object a line, numbers unrounded. Training lines come one an iteration, written at every `--log-interval`
(reading a number from a GPU waits for it, so that happens once an interval); their `elapsed_ms`,
`tokens_per_second` and `tflops_per_gpu` are means over the interval, evaluation and saving excluded. After a resume
lines are appended: of two lines for one iteration the later one counts (`read_metrics` does that). What is no finite
number is `null` there, since JSON has no NaN; the `nan` column and the console tell.
"""

from __future__ import annotations

import io
import json
import math
import sys
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from megafp8.training.wandb_board import WandbBoard

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
MONITOR_FILE = "fp8_monitor.jsonl"
LIFECYCLE = ("start", "save", "save-failed", "end")
"""Kinds of events that good runs have, too."""

# TensorBoard tags as Megatron writes them, so that existing dashboards work.
TENSORBOARD_TAGS = {
    "lm_loss": "lm loss",
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "learning_rate": "learning-rate",
    "grad_norm": "grad-norm",
    "global_batch_size": "batch-size",
    "num_zeros": "num-zeros",
    "params_norm": "params-norm",
    "elapsed_ms": "iteration-time",
    "tokens_per_second": "tokens-per-second",
    "tflops_per_gpu": "throughput",
    "mfu": "model-flops-utilization",
    "max_memory_gib": "max-memory-gib",
    "skipped": "skipped",
    "nan": "nan",
    "valid_loss": "lm loss validation",
    "valid_ppl": "lm loss validation ppl",
}


class RunLog:
    """Writes a run's metrics; a log without a directory only prints. Only the first rank makes one with `writes`."""

    def __init__(
        self,
        log_dir: Path | None,
        *,
        tensorboard_dir: Path | None,
        writes: bool,
        total_iterations: int,
        first_iteration: int = 0,
        show_throughput: bool = False,
        progress: bool | None = None,
        out: TextIO | None = None,
        wandb: WandbBoard | None = None,
    ) -> None:
        """show_throughput: TFLOPS on the console line; progress: show a bar (None: when `out` is a terminal); wandb:
        gets what TensorBoard gets, and is closed with the log."""
        self.writes = writes
        self.total_iterations = total_iterations
        self._show_throughput = show_throughput
        self._out = out = out or sys.stdout
        self._jsonl = self._bar = None
        self._boards: list[Any] = [] if wandb is None else [wandb]
        self._log_dir = log_dir
        self._streams: dict[str, TextIO] = {}
        self._redirect = ExitStack()
        if not writes:
            return
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
            self._jsonl = _open_to_append(log_dir / METRICS_FILE)
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._boards.insert(0, SummaryWriter(str(tensorboard_dir)))
        if progress if progress is not None else out.isatty():
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            self._redirect.enter_context(logging_redirect_tqdm())  # warnings go above the bar, not into it
            self._bar = tqdm(
                total=total_iterations, initial=first_iteration, unit="it", file=out, dynamic_ncols=True, leave=False
            )

    def advance(self, iteration: int) -> None:
        """Moves the progress bar; numbers on the device are not waited for."""
        if self._bar is not None:
            self._bar.update(iteration - self._bar.n)

    def note(self, message: str) -> None:
        """One line on the console, above the progress bar."""
        if not self.writes:
            return
        if self._bar is not None:
            self._bar.write(message, file=self._out)
        else:
            print(message, file=self._out, flush=True)

    def event(self, kind: str, iteration: int, message: str, **details: Any) -> None:
        """What doesn't happen in a good run: a line on the console, and one in `events.jsonl`, written at once."""
        if self.writes:
            self.note(f"iteration {iteration}: {message}")
            self.record(kind, iteration, message, **details)

    def record(self, kind: str, iteration: int, message: str, **details: Any) -> None:
        """An event for `events.jsonl` alone: what the console says in its own way (starts, saves, the end)."""
        if self.writes:
            line = {"iteration": iteration, "event": kind, "message": message, **details}
            try:
                self._append(EVENTS_FILE, [line | {"time": datetime.now().isoformat(timespec="seconds")}])
            except OSError as error:  # a full disk, most likely just told by a save: no event is worth the run
                self.note(f"{EVENTS_FILE}: {error}")

    def monitor(self, lines: list[dict[str, Any]]) -> None:
        """The monitor's lines of one step, into `fp8_monitor.jsonl`, and as scalars and histograms onto the boards."""
        if self.writes:
            self._append(MONITOR_FILE, lines)
        if self.writes and self._boards:
            from megafp8.training.monitor_board import add_to_tensorboard  # loads torch, which readers of logs spare

            for board in self._boards:
                for line in lines:
                    add_to_tensorboard(board, line)

    def scalars(self, iteration: int, values: dict[str, float]) -> None:
        """Numbers for the boards alone, by tag."""
        for board in self._boards if self.writes else ():
            for tag, value in values.items():
                board.add_scalar(tag, value, iteration)

    def _append(self, name: str, lines: list[dict[str, Any]]) -> None:
        if self._log_dir is not None:
            stream = self._streams.get(name)
            if stream is None:
                stream = self._streams[name] = _open_to_append(self._log_dir / name)
            stream.writelines(json.dumps(_finite(line), allow_nan=False) + "\n" for line in lines)
            stream.flush()

    def training(self, lines: list[dict[str, Any]]) -> None:
        """Writes the interval's lines (one an iteration, oldest first) and prints their summary."""
        if not self.writes or not lines:
            return
        for line in lines:
            self._write(line, prefix="")
        self.note(console_line(lines, self.total_iterations, self._show_throughput))
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {lines[-1]['lm_loss']:.3f}", refresh=True)

    def validation(self, name: str, line: dict[str, Any]) -> None:
        """Writes one validation result: `iteration`, `valid_loss`, `valid_ppl`, and `dataset` where it has a name."""
        if not self.writes:
            return
        self._write(line | ({"dataset": name} if name else {}), prefix=f"{name}/" if name else "")
        label = f" ({name})" if name else ""
        self.note(
            f" validation loss at iteration {line['iteration']}{label} | lm loss value: {line['valid_loss']:.6E} | "
            f"lm loss PPL: {line['valid_ppl']:.6E} |"
        )

    def _write(self, line: dict[str, Any], prefix: str) -> None:
        if self._jsonl is not None:
            self._jsonl.write(json.dumps(_finite(line), allow_nan=False) + "\n")
            self._jsonl.flush()
        for board in self._boards:
            for key, value in line.items():
                if isinstance(value, (int, float)) and key not in ("iteration", "consumed_samples"):
                    board.add_scalar(prefix + TENSORBOARD_TAGS.get(key, key), value, line["iteration"])

    def close(self) -> None:
        for resource in (self._bar, self._jsonl, *self._boards, *self._streams.values()):
            if resource is not None:
                resource.close()
        self._streams.clear()
        self._boards.clear()
        self._bar = self._jsonl = None
        self._redirect.close()


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}


def _open_to_append(path: Path) -> TextIO:
    """Opens a file of lines to append to; half a line that a killed run left at its end goes."""
    stream = open(path, "a+b")  # noqa: SIM115 - closed by the RunLog
    stream.seek(0)
    end = 0
    for line in stream:
        end += len(line) if line.endswith(b"\n") else 0
    stream.truncate(end)
    return io.TextIOWrapper(stream, encoding="utf-8")


def console_line(lines: list[dict[str, Any]], total_iterations: int, show_throughput: bool = False) -> str:
    """Megatron's line for an interval: the loss is the mean over its iterations that were not skipped."""
    last = lines[-1]
    losses = [line["lm_loss"] for line in lines if not line["skipped"] and math.isfinite(line["lm_loss"])]
    loss = sum(losses) / len(losses) if losses else last["lm_loss"]
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {last['iteration']:8d}/{total_iterations:8d}",
        f"consumed samples: {last['consumed_samples']:12d}",
        f"elapsed time per iteration (ms): {last['elapsed_ms']:.1f}",
        *([f"throughput per GPU (TFLOP/s/GPU): {last['tflops_per_gpu']:.1f}"] if show_throughput else []),
        *([f"MFU: {last['mfu']:.1%}"] if show_throughput and "mfu" in last else []),
        f"learning rate: {last['learning_rate']:.6E}",
        f"global batch size: {last['global_batch_size']:5d}",
        f"lm loss: {loss:.6E}",
        f"grad norm: {last['grad_norm']:.3f}",
    ]
    parts += [f"load balancing loss: {last['aux_loss']:.6E}"] if "aux_loss" in last else []
    parts += [f"num zeros: {last['num_zeros']}"] if "num_zeros" in last else []
    parts += [f"params norm: {last['params_norm']:.3f}"] if "params_norm" in last else []
    parts += [
        f"number of skipped iterations: {sum(line['skipped'] for line in lines):3d}",
        f"number of nan iterations: {sum(line['nan'] for line in lines):3d} |",
    ]
    return " | ".join(parts)


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """(lines of a run's JSONL file, numbers of those that are damaged), null as NaN; half a last line is left out."""
    found, damaged = [], []
    with open(path, encoding="utf-8", errors="replace") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = {key: math.nan if value is None else value for key, value in json.loads(raw).items()}
                if not isinstance(line["iteration"], int) or abs(line["iteration"]) >= 1 << 53:
                    raise TypeError  # lines are told apart by it, and drawn over it
                found.append(line)
            except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
                damaged.append(number)
    return found, [n for n in damaged if n != number]


def by_iteration(lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training lines, validation lines) of `metrics.jsonl`, in order; of two for one iteration the later one."""
    training: dict[int, dict[str, Any]] = {}
    validation: dict[tuple[str, int], dict[str, Any]] = {}
    for line in lines:
        if "valid_loss" in line:
            validation[str(line.get("dataset", "")), line["iteration"]] = line
        else:
            training[line["iteration"]] = line
    return [training[i] for i in sorted(training)], [validation[k] for k in sorted(validation)]


def read_metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training lines, validation lines) of a run's directory, each iteration once, in order; null is NaN.

    Raises ValueError when `run` holds no `metrics.jsonl`, or when a line other than the last is damaged (a run that
    is killed may leave half a last line).
    """
    path = run / METRICS_FILE if run.is_dir() else run
    if not path.is_file():
        raise ValueError(f"{run}: no {METRICS_FILE} there; give a directory written by --log-dir")
    lines, damaged = read_lines(path)
    if damaged:
        raise ValueError(f"{path}: line {damaged[0]} is not JSON of a run's log")
    return by_iteration(lines)
