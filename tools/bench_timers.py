#!/usr/bin/env python3
"""What timers and profiles cost a step: when they are off, against the same code without their calls, and when on.

    tools/bench_timers.py                                               a small model, which the host bounds
    tools/bench_timers.py --size tiny --device cpu --rounds 1           whether it works; no figure counts

The modes take turns in rounds of STEPS steps each, from an empty queue to an empty queue; `removed` is the code of a
step with every span taken out of its source. A row has the median milliseconds of a step, and the median over rounds
of its ratio to `removed` in the same round, with the least and the largest. Rounds of a step that the host bounds
scatter by more than a span takes, so the last line says how many a step has, and what one costs the host when off.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
import textwrap
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median

import bench_timing
import torch

from megafp8.config import parse_args
from megafp8.config.tool_parser import ToolParser, check_least, check_output
from megafp8.core.pipeline.executor import Executor
from megafp8.data import Batch
from megafp8.parallel import build_parallel, close_parallel
from megafp8.training import iteration
from megafp8.training.batches import IterationBatches
from megafp8.training.build import Parts, build_parts, pick_device
from megafp8.training.fallback import Fallbacks
from megafp8.training.iteration import IterationRunner
from megafp8.training.profiling import Marks, mark_modules
from megafp8.training.rerun import Reruns
from megafp8.training.run_log import RunLog
from megafp8.training.timers import Timers

FLAGS = (
    "--num-layers 4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --lr 1e-4 "
    "--eval-iters 0 --bf16 --mock-data --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 "
    "--num-workers 0 --train-iters 1000 --fp8-format e4m3 --fp8-recipe blockwise "
    "--fp8-small-linears fp8"
)
SIZES = {
    "small": "--hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 4 --global-batch-size 8 "
    "--vocab-size 4096",
    "tiny": "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 4 "
    "--vocab-size 64",
}
STEPS = {"small": 20, "tiny": 2}
MODES = ("removed", "off", "level 1", "level 2", "profile")
"""profile: spans of phases and modules as in a trace, without PyTorch's profiler."""
SPANS = ("spans", "_span", "timers")
PLACES = (
    (Executor, "_run"),
    (Executor, "_backward"),
    (Executor, "_receive"),
    (IterationBatches, "__iter__"),
    (IterationRunner, "run"),
    (IterationRunner, "_run"),
    (iteration, "forward_backward"),
)


def without_spans(function: Callable) -> Callable:
    """The same function without its `with` statements of spans; ValueError where it has none."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = _Remover()
    tree = ast.fix_missing_locations(found.visit(tree))
    if not found.removed:
        raise ValueError(f"{function.__qualname__} has no span")
    code = compile("from __future__ import annotations\n" + ast.unparse(tree), f"<{function.__name__}>", "exec")
    made: dict[str, Callable] = {}
    exec(code, vars(sys.modules[function.__module__]), made)
    return made[function.__name__]


class _Remover(ast.NodeTransformer):
    removed = 0

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:  # noqa: N802 - ast's name
        self.generic_visit(node)
        call = node.items[0].context_expr
        name = getattr(call.func, "attr", getattr(call.func, "id", None)) if isinstance(call, ast.Call) else None
        if name not in SPANS:
            return node
        self.removed += 1
        return node.body


@contextmanager
def no_spans_in_code() -> Iterator[None]:
    """Inside, the step's code has no spans."""
    before = [(owner, name, getattr(owner, name)) for owner, name in PLACES]
    try:
        for owner, name, function in before:
            setattr(owner, name, without_spans(function))
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


class Mode:
    """Steps of the trainer's iteration under a mode, on random tokens that lie on the device."""

    def __init__(self, name: str, parts: Parts) -> None:
        self.name, self._number = name, 0
        self.timers = Timers(parts.device, int(name.removeprefix("level ")) if name.startswith("level") else 0)
        self._parts = parts = replace(parts, timers=self.timers)
        log = RunLog(None, tensorboard_dir=None, writes=False, total_iterations=1)
        reruns = Reruns(parts.config.train, saves=False, suspect=None, say=log.event)
        self._runner = IterationRunner(parts, log, parts.schedule, Fallbacks(parts, {}), reruns)
        train = parts.config.train
        self._count = train.global_batch_size // train.micro_batch_size
        shape = (train.micro_batch_size, parts.config.data.seq_length)
        ids = torch.randint(parts.config.model.unpadded_vocab_size, shape, device=parts.device)
        where = torch.arange(shape[1], device=parts.device).expand(shape).contiguous()
        self._batch = Batch(ids, ids.roll(-1, 1), torch.ones(shape, device=parts.device), where)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._number += 1
            source = iter([self._batch] * self._count)
            batches = IterationBatches(self._number, source, self._count, 0, 0, spans=self.timers)
            self._runner.run(batches, 0)
        self.timers.take()

    @contextmanager
    def installed(self) -> Iterator[None]:
        if self.name == "removed":
            with no_spans_in_code():
                yield
        elif self.name == "profile":
            marks = Marks(self._parts.device)
            restore, self.timers.traced = mark_modules(self._parts.model, marks), marks
            yield
            restore()
            self.timers.traced = None
        else:
            yield


def measure(parts: Parts, rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of a step, by mode and round."""
    modes = [Mode(name, parts) for name in MODES]
    times: dict[str, list[float]] = {name: [] for name in MODES}
    for number in range(rounds + 1):  # the first one compiles kernels
        for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
            taken: list[float] = []
            with mode.installed(), bench_timing.timed(parts.device, taken):
                mode.run(steps)
            if number:
                times[mode.name].append(taken[0] / steps)
        if number:
            print(f"round {number}: " + ", ".join(f"{name} {ms[-1]:.3f}" for name, ms in times.items()), flush=True)
    return times


def cost_when_off(parts: Parts) -> tuple[int, float]:
    """Spans of a step, and microseconds of the host for one that is off."""
    mode, seen = Mode("off", parts), []

    def mark(name: str) -> AbstractContextManager:
        seen.append(name)
        return nullcontext()

    mode.timers.traced = mark
    mode.run(1)
    timers = Timers(parts.device)

    def one() -> None:
        with timers("forward-compute"):
            pass

    return len(seen), 1e6 * min(timeit.repeat(one, number=10_000, repeat=5)) / 10_000


def rows(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    found = {}
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times["removed"], strict=True)]
        found[name] = {"ms": median(own), "ratio": median(ratios), "least": min(ratios), "most": max(ratios)}
    return found


def main(argv: list[str] | None = None) -> int:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--rounds", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file: mode -> {ms, ratio, least, most}; spans, us_when_off")
    args = parser.parse_args(argv)
    try:
        check_least(args, 1, "rounds")
        check_output(args.output)
        device = pick_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    config = parse_args([*FLAGS.split(), *SIZES[args.size].split(), "--device", args.device])
    parallel = build_parallel(config, device)
    parts = build_parts(config, parallel, device)
    found = rows(measure(parts, args.rounds, STEPS[args.size]))
    spans, each = cost_when_off(parts)
    close_parallel(parallel)
    print(f"{'spans':<10}{'ms a step':>12}{'of removed':>12}{'least':>9}{'most':>9}")
    for name, row in found.items():
        print(f"{name:<10}{row['ms']:>12.3f}{row['ratio']:>12.4f}{row['least']:>9.4f}{row['most']:>9.4f}")
    share = spans * each / (10 * found["off"]["ms"])
    print(f"off: {spans} spans a step, {each:.2f} us of the host each: {share:.4f} % of its time")
    if args.output:
        args.output.write_text(json.dumps(found | {"spans": spans, "us_when_off": each}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
