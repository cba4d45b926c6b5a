"""The training loop: steps, logs, evaluations, saves, and the reasons to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

from megafp8.checkpoint.directory import checkpoints_below
from megafp8.config import Config
from megafp8.config.batch_size import BatchSize
from megafp8.config.provenance import write_args
from megafp8.data import Batch, build_loader
from megafp8.plan.flops import training_flops_per_token
from megafp8.training.agreement import Agreement
from megafp8.training.balance import balance
from megafp8.training.batches import IterationBatches
from megafp8.training.build import Parts, lacks_memory
from megafp8.training.checkpointing import RunState, check_data_left, find_to_resume, resume
from megafp8.training.fallback import Fallbacks
from megafp8.training.iteration import IterationRunner
from megafp8.training.memory_watch import MemoryWatch
from megafp8.training.opening import opening_lines
from megafp8.training.profiling import Profile
from megafp8.training.progress import IterationRecord, Progress, read_records
from megafp8.training.rerun import Reruns, StopRun
from megafp8.training.run_log import RunLog
from megafp8.training.saving import Outcome, Saves
from megafp8.training.signals import StopSignal
from megafp8.training.step import evaluate
from megafp8.training.throughput import IntervalTimer, max_memory_gib, utilization
from megafp8.training.timers import DATA, over_ranks, table
from megafp8.training.wandb_board import WandbBoard
from megafp8.training.watchdog import build_watchdog


class Trainer:
    """Runs `parts` to the end of training or to a reason to stop; `run()` returns the process's exit code."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config: Config = parts.config
        self.state = RunState(parts)
        self._saves = Saves(parts, self.state)
        self.progress = Progress()
        self._batch_size = BatchSize.of(self.config.train)
        self.schedule = parts.schedule
        self._start = time.monotonic()
        self._agreement = Agreement(parts.parallel, parts.device)
        self._stopped_by, self._starting = 0, True
        self._saved_iteration: int | None = None
        self._save_failed = False
        self._ended = "done"
        notes = self._resume()
        self.total_iterations = self._total_iterations()
        if self.progress.iteration < self.total_iterations and not self.config.train.skip_train:
            check_data_left(parts, self.progress)
        notes += self._saves.prepare()
        self.log = self._open_log()
        begun = self.progress.iteration
        origin = f"went on from {self.config.checkpoint.load}" if begun else "a new run"
        self.log.record("start", begun, origin, data=parts.datasets.fingerprints)
        if parts.parallel.is_first:
            for note in (*opening_lines(parts), *self.config.notes, *parts.datasets.notes, *notes):
                self.log.note(note)
        self._runner = self._build_runner()
        self._watchdog = build_watchdog(self.config, parts.parallel)
        self._memory = MemoryWatch(parts, self.log.note)
        self._profile = Profile.of(parts, self.progress.iteration + 1, self.total_iterations, self.log.note)

    def _build_runner(self) -> IterationRunner:
        fp8, train, since = self.config.fp8, self.config.train, self.progress.fallen
        if since and fp8.fp8_forget_fallbacks:
            self.log.note(f"FP8 again (--fp8-forget-fallbacks): {', '.join(sorted(since))}")
            since = {}
        elif since:
            self.log.note(f"BF16, as before the checkpoint: {', '.join(sorted(since))}")
        fallbacks = Fallbacks(self.parts, since)
        self.progress.fallen = fallbacks.since  # what is saved is what is so
        reruns = Reruns(
            train,
            saves=self.config.checkpoint.save is not None,
            suspect=self.progress.take_suspect(),
            say=self.log.event,
        )
        return IterationRunner(self.parts, self.log, self.schedule, fallbacks, reruns)

    def _resume(self) -> list[str]:
        found = find_to_resume(self.config, self.parts.parallel)
        if found is None:
            load = self.config.checkpoint.load
            if load is None:
                return []
            below = checkpoints_below(load)
            return [f"--load {load} holds no checkpoint{f' ({below} does)' if below else ''}: a new run starts"]
        self.progress, self.schedule, notes = resume(self.parts, self.state, found)
        self._saved_iteration = self.progress.iteration or None
        return notes

    def _open_log(self) -> RunLog:
        logging = self.config.logging
        log_dir = Path(logging.log_dir) if logging.log_dir else None
        writes = self.parts.parallel.is_first
        if writes and log_dir is not None:
            write_args(self.config, log_dir / "args.json")
        return RunLog(
            log_dir,
            tensorboard_dir=Path(logging.tensorboard_dir) if logging.tensorboard_dir else None,
            writes=writes,
            total_iterations=self.total_iterations,
            first_iteration=self.progress.iteration,
            show_throughput=logging.log_throughput,
            wandb=WandbBoard.open(self.config, self.progress.iteration, self.parts.parallel),
        )

    def _total_iterations(self) -> int:
        train = self.config.train
        return train.train_iters or self._batch_size.iterations(train.train_samples)

    def run(self) -> int:
        """Trains; returns 0, 128 + the signal's number when a signal ended the run (after a save), 1 when the last save
        failed, or one of rerun.py's codes. Out of memory it raises SystemExit (memory_watch.py)."""
        with StopSignal() as stop, self._memory, self._watchdog:
            try:
                if not self.config.train.skip_train:
                    self._train(stop)
                    self._runner.finish()
                if self.config.train.skip_train or self.progress.iteration >= self.total_iterations:
                    self._evaluate_all(final=True)
                self._report(self._saves.finish())
                self.log.record("end", self.progress.iteration, self._ended)
            except StopRun as decision:
                return self._give_up(decision)
            except Exception as error:
                self._report(self._saves.rescue())
                self.log.record("end", self.progress.iteration, f"{type(error).__name__}: {error}")
                if lacks_memory(error):
                    self._watchdog.stand_down()
                    raise self._memory.run_out(error, self.progress.iteration + 1, self._watchdog.end_all) from error
                raise
            finally:
                if self._profile is not None:
                    self._profile.close()
                self.log.close()
            self.release()
            number = self._stopped_by or stop.received  # the latter: while the last evaluation ran
            return 128 + number if number else int(self._save_failed)

    def release(self) -> None:
        """Frees what groups of ranks wait for when they are destroyed. `run()` does, unless it raises."""
        self._runner.release()

    def _give_up(self, decision: StopRun) -> int:
        """Saves the state before the iteration in hand, and returns the exit code that says why."""
        self.progress.suspect = decision.suspect
        if self.config.checkpoint.save is not None and self.progress.iteration:
            self._save()
        self._report(self._saves.finish())
        self.log.event("stop", self.progress.iteration, f"exit code {decision.code}: {decision.reason}")
        self.release()
        return decision.code

    def _train(self, stop: StopSignal) -> None:
        batches = None
        pending: list[IterationRecord] = []
        timer = IntervalTimer()
        logging, train = self.config.logging, self.config.train
        if self.progress.iteration >= self.total_iterations:
            self.log.note(f"all {self.total_iterations} iterations are done: nothing left to train")
        while self.progress.iteration < self.total_iterations:
            self._watchdog.at(self.progress.iteration + 1, "data")
            if batches is None:
                batches = self._training_batches()
            try:
                pending += self._profiled(batches, timer)
            except StopRun:
                if pending:
                    self._write_lines(pending, timer.lap())
                raise
            iteration = self.progress.iteration
            self.log.advance(iteration)
            reason = self._reason_to_stop(stop)
            last = iteration == self.total_iterations
            if pending and (iteration % logging.log_interval == 0 or last or reason):
                self._watchdog.at(iteration, "log")
                self._write_lines(pending, timer.lap())
                pending = []
                with timer.paused():
                    self._memory.at_line()
            with timer.paused():
                self._memory.poll(iteration)
                self._report(self._saves.poll())
                if train.eval_interval and iteration % train.eval_interval == 0 and not last:
                    self._evaluate_all()
                if self._save_due(iteration, last or reason is not None):
                    self._save()
            if reason:
                self.log.note(f"stopping at iteration {iteration}: {reason}")
                self._ended = f"stopped: {reason}"
                return

    def _training_batches(self) -> Iterator[Batch]:
        parts, data = self.parts, self.config.data
        return build_loader(
            parts.datasets.train,
            parts.datasets.masks,
            seq_length=data.seq_length,
            micro_batch_size=self.config.train.micro_batch_size,
            consumed_samples=self.progress.consumed_samples,
            dp_rank=parts.parallel.dp.rank,
            dp_size=parts.parallel.dp.size,
            num_workers=data.num_workers,
            pin_memory=parts.device.type == "cuda",
        )

    def _profiled(self, batches: Iterator[Batch], timer: IntervalTimer) -> list[IterationRecord]:
        if self._profile is None:
            return self._iteration(batches)
        with timer.paused():
            self._profile.before(self.progress.iteration + 1)
        records = self._iteration(batches)
        with timer.paused():
            self._profile.after(self.progress.iteration)
        return records

    def _iteration(self, batches: Iterator[Batch]) -> list[IterationRecord]:
        """One optimizer step; an iteration of --iterations-to-skip only consumes its data and leaves no record."""
        parts, train = self.parts, self.config.train
        batch_size = self._batch_size.at(self.progress.consumed_samples)
        count = batch_size // (train.micro_batch_size * parts.parallel.dp.size)
        samples = self.progress.schedule_samples
        iteration = self.progress.iteration + 1
        consumed = self.progress.consumed_samples
        watch = {"at": self._watchdog.at, "spans": parts.timers}
        own = IterationBatches(iteration, batches, count, consumed, batch_size, **watch)
        if any(first <= iteration <= last for first, last in train.skipped_ranges):
            for _ in own:
                pass
            self._advance(batch_size)
            self.log.note(f"iteration {iteration}: its data is passed over (--iterations-to-skip)")
            return []
        self._runner.traced = self._profile is not None and self._profile.is_tracing
        lr, output, stats = self._runner.run(own, samples)
        self._advance(batch_size)
        return [
            IterationRecord.of(
                self.progress,
                learning_rate=lr,
                global_batch_size=batch_size,
                output=output,
                stats=stats,
            )
        ]

    def _advance(self, samples: int) -> None:
        self.progress.iteration += 1
        self.progress.consumed_samples += samples
        self.progress.consumed_tokens += samples * self.config.data.seq_length

    def _reason_to_stop(self, stop: StopSignal) -> str | None:
        train = self.config.train
        minutes = (time.monotonic() - self._start) / 60
        too_long = train.exit_duration_in_mins is not None and minutes > train.exit_duration_in_mins
        self._stopped_by, too_long = self._agreement.agree([stop.received or 0, int(too_long)])
        if self._stopped_by:
            return f"signal {self._stopped_by}"
        if train.exit_interval and self.progress.iteration % train.exit_interval == 0:
            return f"--exit-interval {train.exit_interval}"
        if too_long:
            return f"--exit-duration-in-mins {train.exit_duration_in_mins}"
        return None

    def _write_lines(self, records: list[IterationRecord], seconds: float) -> None:
        """Writes the interval's lines; times are means over it."""
        per_iteration = seconds / len(records)
        samples = sum(record.host["global_batch_size"] for record in records) / len(records)
        tokens = samples * self.config.data.seq_length
        flops = tokens * training_flops_per_token(self.config)
        world = self.parts.parallel.world_size
        times = {
            "elapsed_ms": 1e3 * per_iteration,
            "tokens_per_second": tokens / per_iteration,
            "tflops_per_gpu": flops / per_iteration / world / 1e12,
            "max_memory_gib": max_memory_gib(self.parts.device),
        }
        mfu = utilization(self.config, self.parts.device, tokens / per_iteration / world)
        times |= {} if mfu is None else {"mfu": mfu}
        lines = read_records(records)
        parallel, device, timers = self.parts.parallel, self.parts.device, self.parts.timers
        seconds, held_up = timers.take()
        waited, worked = self._runner.times.take(held_up)
        numbers, notes = balance(parallel, device, (waited, worked), len(records), per_iteration, self._starting)
        self._starting = False
        seconds = {name: value / len(records) for name, value in (seconds | {DATA: waited}).items()}
        phases = over_ranks(parallel, device, timers.names, seconds)
        numbers |= {"timers": {phase.name: phase.numbers() for phase in phases}} if phases else {}
        self.log.training([line | times | numbers for line in lines])
        if self.config.logging.log_timers_to_tensorboard:
            self.log.scalars(self.progress.iteration, {f"{p.name}-time": max(p.ranks) / 1e3 for p in phases})
        for note in (*table(phases, self.config.logging.timing_log_option), *notes):
            self.log.note(note)

    def _evaluate_all(self, final: bool = False) -> None:
        """Every validation set, and after the last step the test set: the same samples each time."""
        train, datasets = self.config.train, self.parts.datasets
        if train.eval_iters == 0:
            return
        sets = {"" if name == "valid" else name: dataset for name, dataset in datasets.valid.items()}
        if final and datasets.test is not None:
            sets["test"] = datasets.test
        for name, dataset in sets.items():
            loss = self._evaluate(dataset)
            line = {"iteration": self.progress.iteration, "valid_loss": loss, "valid_ppl": math.exp(min(loss, 700.0))}
            self.log.validation(name, line)

    def _evaluate(self, dataset) -> float:
        parts, train = self.parts, self.config.train
        batches = build_loader(
            dataset,
            parts.datasets.masks,
            seq_length=self.config.data.seq_length,
            micro_batch_size=train.micro_batch_size,
            dp_rank=parts.parallel.dp.rank,
            dp_size=parts.parallel.dp.size,
        )
        self._watchdog.at(self.progress.iteration, "evaluation")
        count = train.eval_iters * train.global_batch_size // (train.micro_batch_size * parts.parallel.dp.size)
        return evaluate(
            parts.model,
            self._watchdog.passing(batches),
            count=count,
            scaling=parts.scaling,
            device=parts.device,
            parallel=parts.parallel,
            plan=parts.pipeline,
        )

    def _save_due(self, iteration: int, stopping: bool) -> bool:
        checkpoint = self.config.checkpoint
        if checkpoint.save is None or iteration == self._saved_iteration:
            return False
        return stopping or bool(checkpoint.save_interval and iteration % checkpoint.save_interval == 0)

    def _save(self) -> None:
        self._watchdog.at(self.progress.iteration, "save")
        self._saved_iteration = self.progress.iteration
        self._report(self._saves.save(self.progress))

    def _report(self, outcomes: list[Outcome]) -> None:
        """Logs what became of saves."""
        for outcome in outcomes:
            self._save_failed = not outcome.saved
            if self._save_failed and self._saved_iteration == outcome.iteration:
                self._saved_iteration = None
            what = "saved" if outcome.saved else "could not save"
            where = f"to {self.config.checkpoint.save}{outcome.note}"
            self.log.note(f"{what} iteration {outcome.iteration} {where}")
            self.log.record("save" if outcome.saved else "save-failed", outcome.iteration, f"{what} {where}")
