"""One iteration: forward, backward, update, and all that watches over them as the flags ask.

Whether a step was skipped is known on the host one step later, when the device has long been at the next one: so its
trace runs then, before the next update, while the weights are still those of the skipped step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from megafp8.core.transformer.graphs import LayerGraphs
from megafp8.fp8.guard import WEIGHTS, Finding, Trace
from megafp8.fp8.monitor import Monitor, Piece, Watch
from megafp8.optimizer import Schedule, StepStats
from megafp8.training.balance import LocalTimes
from megafp8.training.batches import IterationBatches
from megafp8.training.build import Parts
from megafp8.training.fallback import Fallbacks
from megafp8.training.held import Held, HostCopy
from megafp8.training.rerun import Reruns, StopRun
from megafp8.training.run_log import RunLog
from megafp8.training.step import StepOutput, advance_scaling, forward_backward


def layer_graphs(parts: Parts, say: Callable[[str], None]) -> LayerGraphs | None:
    """The CUDA graphs of `--cuda-graph-impl local`."""
    train, wait = parts.config.train, parts.optimizer.weights.arrivals.wait
    if train.cuda_graph_impl == "none":
        return None
    meter, warmup_steps = parts.parallel.meter, train.cuda_graph_warmup_steps
    return LayerGraphs(parts.device, warmup_steps=warmup_steps, wait=wait, say=say, meter=meter)


class _ReadOnly:
    """Delayed scaling's history for a run that leaves no trace in it."""

    def __init__(self, scaling) -> None:
        self.scale, self.scales, self._slot = scaling.scale, scaling.scales, scaling.slot

    def slot(self, name: str) -> torch.Tensor:
        return torch.zeros_like(self._slot(name))

    def record(self, name: str, amax: torch.Tensor) -> None:
        pass

    def record_all(self, names: tuple[str, ...], amaxes: torch.Tensor) -> None:
        pass


class IterationRunner:
    """Runs iterations one after the other. `finish()` looks at the last one.

    traced: modules are looked at while they run, so they are called, not replayed from graphs.
    """

    traced = False

    def __init__(self, parts: Parts, log: RunLog, schedule: Schedule, fallbacks: Fallbacks, reruns: Reruns) -> None:
        self._parts, self._log, self._schedule = parts, log, schedule
        self._fallbacks, self._reruns = fallbacks, reruns
        self._monitor = Monitor(parts.model, parts.parallel, parts.device)
        self._graphs = layer_graphs(parts, log.note)
        self._last: tuple[IterationBatches, HostCopy] | None = None
        self._reported: Finding | str | None = None
        self.times = LocalTimes(parts.device, parts.timers)

    def run(self, batches: IterationBatches, schedule_samples: int) -> tuple[float, StepOutput, StepStats]:
        """Learning rate, what forward and backward gave, and what the update found. Raises StopRun, before it."""
        parts = self._parts
        before = Held.of_routers(parts), Held.of_amaxes(parts)
        output, watch = self._forward_backward(batches, None if self.traced else self._graphs)
        if self._look_back():  # its gradients took the place of this iteration's
            output, watch = self._again(batches, before)
        if self._reruns.active:
            output, watch = self._checked(batches, output, watch, before)
        totals = self._totals(watch) if watch is not None else None
        batches.at(batches.iteration, "update")
        with parts.timers("optimizer"):
            stats = self._update(output, schedule_samples)
        before[0].restore_where(stats.nan)
        self._last = batches, HostCopy(stats.nan)
        noisy = self._report(watch, totals, batches.iteration) if watch is not None else set()
        self._change_precisions(noisy, batches.iteration)
        self.times.waited += batches.waited
        return self._schedule.lr(schedule_samples), output, stats

    def finish(self) -> None:
        """Traces the last iteration, if it was skipped."""
        self._look_back()

    def release(self) -> None:
        """Frees the CUDA graphs: to be called before the groups of ranks are gone, whose messages they hold."""
        if self._graphs is not None:
            self._graphs.release()

    def _forward_backward(
        self, batches: IterationBatches, graphs: LayerGraphs | None = None
    ) -> tuple[StepOutput, Watch | None]:
        interval = self._parts.config.fp8.fp8_monitor_interval
        watch = self._monitor.watch() if interval and batches.iteration % interval == 0 else None
        self.times.start()
        graphs = None if watch is not None else graphs
        return self._run(batches, self._parts.scaling, watch=watch, layers=graphs), watch

    def _run(
        self, batches: IterationBatches, scaling, *, watch: Watch | None = None, sink=None, layers=None
    ) -> StepOutput:
        parts = self._parts
        parts.optimizer.zero_grad(batches.count)
        with parts.timers("forward-backward"):
            return forward_backward(
                parts.model,
                parts.optimizer,
                batches,
                iteration=batches.iteration,
                seed=parts.config.train.seed,
                scaling=scaling,
                device=parts.device,
                count=batches.count,
                plan=parts.pipeline,
                observe=lambda executor: self.times.stop(),
                observer=watch,
                sink=sink,
                layers=layers,
                spans=parts.timers,
            )

    def _again(self, batches: IterationBatches, before: tuple[Held, ...]) -> tuple[StepOutput, Watch | None]:
        for held in before:
            held.restore()
        return self._forward_backward(batches)

    def _checked(
        self, batches: IterationBatches, output: StepOutput, watch: Watch | None, before: tuple[Held, ...]
    ) -> tuple[StepOutput, Watch | None]:
        runs = [(output, watch)]

        def again() -> float:
            runs.append(self._again(batches, before))
            return runs[-1][0].loss.item()

        try:
            self._reruns.check(batches.iteration, output.loss.item(), again)
        except StopRun:
            for held in before:
                held.restore()
            raise
        return runs[-1]

    def _update(self, output: StepOutput, schedule_samples: int) -> StepStats:
        parts, schedule, logging = self._parts, self._schedule, self._parts.config.logging
        if parts.scaling is not None:
            # Before the update: weights are quantized with the new scales.
            advance_scaling(parts.scaling, parts.parallel)
        return parts.optimizer.step(
            lr=schedule.lr(schedule_samples),
            decoupled_lr=schedule.decoupled_lr(schedule_samples),
            weight_decay=schedule.weight_decay(schedule_samples),
            valid_tokens=output.valid_tokens,
            loss=output.loss,
            with_num_zeros=logging.log_num_zeros_in_grad,
            with_params_norm=logging.log_params_norm,
        )

    def _totals(self, watch: Watch) -> HostCopy:
        """What the monitor has seen, on its way to the host. Before the update: of the weights that the step used."""
        self._monitor.see_weights(watch, self._parts.scaling, self._masters())
        return HostCopy(self._monitor.totals(watch))

    def _report(self, watch: Watch, totals: HostCopy, iteration: int) -> set[str]:
        """Writes the monitor's lines; returns the linears whose operands are too noisy for FP8.

        After the update has been queued, so that the device has something to do while the host reads and writes.
        """
        lines = self._monitor.report(watch, totals.read(), iteration)
        self._log.monitor(lines)
        return {line["linear"] for line in lines if self._fallbacks.is_too_noisy(line["sqnr_db"])}

    def _masters(self) -> Iterator[Piece]:
        for piece, values in self._parts.optimizer.masters.values().pieces():
            yield piece.name, piece.start, values

    def _change_precisions(self, noisy: set[str], iteration: int) -> None:
        """Linears that fall back to BF16, or return from it, with the next step."""
        if back := self._fallbacks.return_due(iteration):
            self._log.event("fp8-return", iteration, f"FP8 again: {', '.join(back)}", linears=back)
        if noisy:
            limit = self._fallbacks.flags.fp8_fallback_sqnr
            self._fall_back(noisy, iteration, f"signal to noise below {limit:g} dB (--fp8-fallback-sqnr)")

    def _fall_back(self, names: set[str], iteration: int, why: str) -> None:
        fallen = self._fallbacks.fall_back(names, iteration)
        if fallen:
            self._log.event("fp8-fallback", iteration, f"BF16 from now on: {', '.join(fallen)}; {why}", linears=fallen)

    def _look_back(self) -> bool:
        """Traces the iteration before, if it was skipped; whether that used the gradient buffers."""
        last, self._last = self._last, None
        if last is None:
            return False
        if not last[1].read().item():
            self._reported = None
            return False
        batches = last[0]
        counts = self._fallbacks.flags.fp8_fallback_after is not None
        if self._reported is not None and not counts:  # one trace is enough for a row of bad steps
            return False
        finding = self._trace(batches)
        if (finding or "transient") != self._reported:
            self._reported = finding or "transient"
            self._tell(finding, batches)
        linear = finding.name.removesuffix(".weight") if finding is not None else ""
        if linear and counts and self._fallbacks.strike(linear):
            number = self._fallbacks.flags.fp8_fallback_after
            self._fall_back({linear}, batches.iteration, f"--fp8-fallback-after {number} non-finite steps")
        return True

    def _trace(self, batches: IterationBatches) -> Finding | None:
        parts, trace, routers = self._parts, Trace(), Held.of_routers(self._parts)
        scaling = None if parts.scaling is None else _ReadOnly(parts.scaling)
        with trace.watching(parts.model):
            self._run(batches, scaling, sink=trace.sink(parts.optimizer.grads))
        routers.restore()
        return trace.first(parts.parallel)

    def _tell(self, finding: Finding | None, batches: IterationBatches) -> None:
        p = self._parts.parallel
        if finding is None or finding.phase == WEIGHTS:
            samples = range(batches.first_sample, batches.first_sample + batches.samples)
        else:
            dp_rank = finding.rank // (p.tp.size * p.cp.size) % p.dp.size
            samples = batches.sample_numbers(finding.microbatch, dp_rank, p.dp.size)
        what = f"non-finite values, first in {finding}"
        if finding is None:
            what = "loss or gradient was not finite, but is when the step runs again: a transient fault"
        message = f"skipped; {what}; samples {samples.start} to {samples.stop - 1} of the training data"
        details = {"first": finding and finding.name, "role": finding and finding.role}
        self._log.event("nonfinite", batches.iteration, message, **details, samples=[samples.start, samples.stop - 1])
