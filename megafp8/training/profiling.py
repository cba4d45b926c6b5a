"""`--profile`: a trace of some iterations, a file a rank, which Perfetto, Chrome and TensorBoard's plugin open.

In it are every operator and kernel, the phases of the step (timers.py), and the model's modules under their global
names: forward as calls within calls, backward as a row of spans, each from the gradient of a module's output to the
next one's. Under nsys, which wants the GPU's tracing for itself, the same marks are NVTX ranges, and its capture range
is opened and closed; `--use-pytorch-profiler` writes the trace all the same.

Outside of the iterations that are profiled nothing is installed anywhere.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from pathlib import Path
from threading import get_ident

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from megafp8.core.gpt import GPTModel, ModelChunks
from megafp8.training.build import Parts

CALLED = ("core",)
"""Parts of modules that are no modules themselves, and have a span of their own."""
METHODS = {"forward": "", "after": "", "produce": "", "remake": " again", "gradient": " gradient"}
"""Of modules: by which they run, alone or inside of a linear; and what a span's name says after the module's."""
FOLDER = "profile"
HOW_TO_OPEN = "open it at https://ui.perfetto.dev or chrome://tracing"
_log = logging.getLogger(__name__)


def global_names(model: GPTModel | ModelChunks) -> dict[nn.Module, str]:
    """Every module's name in the whole model: in a pipeline layers are counted from the first stage's."""
    names = {}
    for chunk in model.chunks:
        for path, module in chunk.named_modules():
            parts = path.split(".")
            if parts[0] == "layers" and len(parts) > 1:
                parts[1] = str(chunk.stage.layers[int(parts[1])])
            names[module] = ".".join(parts) if path else "model"
    return names


class _Span:
    """Open from its making to `end`, in PyTorch's trace, and on a GPU as an NVTX range."""

    def __init__(self, name: str, thread: int, nvtx: bool, backward: bool) -> None:
        self.backward, self._thread, self._nvtx = backward, thread, nvtx
        self._record = torch.profiler.record_function(name)
        self._record.__enter__()
        if nvtx:
            torch.cuda.nvtx.range_push(name)

    def end(self, thread: int) -> None:
        self._record.__exit__(None, None, None)
        if self._nvtx and thread == self._thread:  # NVTX has a stack a thread, and no way to another's
            torch.cuda.nvtx.range_pop()


class Marks:
    """Named spans in traces: PyTorch's, and on a GPU NVTX ranges. Those of a thread nest.

    Autograd runs a GPU's backward on a thread of its own, so the spans of backward begin and end there: each ends
    where the next one begins, and the last one when autograd is done with the graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvtx = device.type == "cuda"
        self._open: dict[int, list[_Span]] = {}  # by thread

    @contextmanager
    def __call__(self, name: str):
        spans = self._here()
        before = len(spans)
        self._begin(name)
        try:
            yield
        finally:
            self._end_down_to(before, spans)

    def begin_backward(self, name: str) -> None:
        """A module's backward begins, so the one before has ended. Called by autograd."""
        spans = self._here()
        if spans and spans[-1].backward:
            spans.pop().end(get_ident())
        else:  # the first one of a graph
            before = len(spans)
            Variable._execution_engine.queue_callback(lambda: self._end_down_to(before, spans))
        self._begin(f"backward {name}", backward=True)

    def end_all(self) -> None:
        """What an error has left open."""
        for spans in self._open.values():
            self._end_down_to(0, spans)

    def _here(self) -> list[_Span]:
        return self._open.setdefault(get_ident(), [])

    def _begin(self, name: str, backward: bool = False) -> None:
        self._here().append(_Span(name, get_ident(), self._nvtx, backward))

    @staticmethod
    def _end_down_to(count: int, spans: list[_Span]) -> None:
        while len(spans) > count:
            spans.pop().end(get_ident())


def mark_modules(model: GPTModel | ModelChunks, marks: Marks) -> Callable[[], None]:
    """Lets every module mark its runs; returns what takes that back."""
    wrapped = []
    for module, name in global_names(model).items():
        for method, suffix in METHODS.items():
            if callable(getattr(type(module), method, None)) and not isinstance(module, nn.ParameterList):
                setattr(module, method, _marked(getattr(module, method), name, suffix, marks))
                wrapped.append((module, method, None))
        for part in CALLED:
            if callable(own := vars(module).get(part)):
                setattr(module, part, _marked(own, f"{name}.{part}", "", marks))
                wrapped.append((module, part, own))

    def restore() -> None:
        for module, attribute, before in wrapped:
            if before is None:
                delattr(module, attribute)
            else:
                setattr(module, attribute, before)

    return restore


def _marked(method: Callable, name: str, suffix: str, marks: Marks) -> Callable:
    @wraps(method, updated=())
    def run(*args, **kwargs):
        with marks(name + suffix):
            output = method(*args, **kwargs)
        if not suffix:
            _mark_backward(output, name, marks)
        return output

    return run


def _mark_backward(output: object, name: str, marks: Marks) -> None:
    """At the gradient of a module's output its backward begins; of modules with one output, the innermost's."""
    y = output[0] if isinstance(output, tuple) and output else output
    if isinstance(y, Tensor) and y.grad_fn is not None and not getattr(y, "marked", False):
        y.marked = True
        y.register_hook(lambda grad: marks.begin_backward(name))


class Profile:
    """The trace of iterations `first` to `last`; told of every iteration, before and after.

    say: takes a line for the log.
    """

    def __init__(self, parts: Parts, directory: Path, say: Callable[[str], None]) -> None:
        flags, parallel = parts.config.logging, parts.parallel
        self.first, self.last = flags.profile_step_start + 1, flags.profile_step_end
        self._parts, self._say, self._directory = parts, say, directory
        self._stem = f"rank{parallel.rank:0{len(str(parallel.world_size - 1))}d}"
        self._cuda = parts.device.type == "cuda"
        self._under_nsys = self._cuda and "NSYS_PROFILING_SESSION_ID" in os.environ
        self._profiler: torch.profiler.profile | None = None
        self._restore: Callable[[], None] | None = None
        self._iteration: AbstractContextManager | None = None
        self._marks = Marks(parts.device)
        self._traced: list[int] = []

    @staticmethod
    def of(parts: Parts, next_iteration: int, total: int, say: Callable[[str], None]) -> Profile | None:
        """This rank's, if it has any; says what will be traced."""
        flags = parts.config.logging
        if not flags.profile:
            return None
        directory = Path(flags.log_dir or flags.tensorboard_dir) / FOLDER
        profile = Profile(parts, directory, say)
        several = profile.last > profile.first
        which = f"iterations {profile.first} to {profile.last}" if several else f"iteration {profile.first}"
        if next_iteration > total:
            return None  # the log says that nothing is left to train
        if next_iteration > profile.last or profile.first > total:
            say(f"--profile: {which} will not run, only {next_iteration} to {total}; nothing is traced")
            return None
        ranks = f"rank{'s' if len(flags.profile_ranks) > 1 else ''} {' '.join(map(str, flags.profile_ranks))}"
        say(f"profile: {which} on {ranks}, to {directory}")
        return profile if parts.parallel.rank in flags.profile_ranks else None

    @property
    def is_tracing(self) -> bool:
        return self._restore is not None

    def before(self, iteration: int) -> None:
        warm_up = iteration == self.first - 1
        if self._restore is None and (warm_up or self.first <= iteration <= self.last):
            self._start(iteration, warm_up)
        if self._restore is not None:
            if not warm_up:
                if self._under_nsys and not self._traced:
                    torch.cuda.profiler.start()  # its capture range
                self._traced.append(iteration)
            self._iteration = self._marks(f"iteration {iteration}")
            self._iteration.__enter__()

    def after(self, iteration: int) -> None:
        if self._restore is None:
            return
        self._end_iteration()
        if self._profiler is not None:
            self._profiler.step()
        if iteration >= self.last:
            self.close()

    def close(self) -> None:
        """Ends what is being traced, and writes it."""
        if self._restore is None:
            return
        self._end_iteration()
        self._restore()
        self._restore = self._parts.timers.traced = None
        if self._under_nsys and self._traced:
            torch.cuda.profiler.stop()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _start(self, iteration: int, warm_up: bool) -> None:
        self._restore = mark_modules(self._parts.model, self._marks)
        self._parts.timers.traced = self._marks
        flags = self._parts.config.logging
        if self._under_nsys and not flags.use_pytorch_profiler:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self._cuda else []
        active = self.last - max(self.first, iteration) + 1
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=int(warm_up), active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=flags.pytorch_profiler_collect_shapes,
            with_stack=flags.pytorch_profiler_collect_callstack,
        )
        self._profiler.start()

    def _end_iteration(self) -> None:
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.__exit__(None, None, None)
            self._marks.end_all()

    def _write(self, profiler: torch.profiler.profile) -> None:
        if not self._traced:
            self._say("profile: the run ended before the first iteration to be traced; there is no trace")
            return
        name = f"{self._stem}_iter{self._traced[0]}-{self._traced[-1]}.pt.trace.json.gz"
        partial = self._directory / f".partial-{name}"  # its end says that it is to be compressed
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(partial))
            os.replace(partial, self._directory / name)
        except OSError as error:  # a full disk is no reason to end a training run
            _log.warning("profile: %s is not written: %s", self._directory / name, error)
        else:
            self._say(f"profile: {self._directory / name}; {HOW_TO_OPEN}")
        finally:
            with suppress(OSError):  # what kept it from being written may keep it from being removed
                partial.unlink(missing_ok=True)
