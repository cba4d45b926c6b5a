"""What tools/bench_step.py runs: a configuration's layers, the same in plain PyTorch, steps of the training loop."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from unittest import mock

import torch
from bench_layer_memory import Gradients, PlainLayer, lay_side_by_side
from torch import Tensor, nn

from megafp8.config import Config
from megafp8.core.build import BuildContext
from megafp8.core.gpt import initialize
from megafp8.core.transformer import activation, attention
from megafp8.core.transformer.block import TransformerBlock
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.rope import inverse_frequencies, rotation
from megafp8.fp8 import DelayedScaling, linear_function, policy, wgrad
from megafp8.parallel import ParallelContext
from megafp8.params import InitialValues, ParamSpec, unpadded
from megafp8.step import StepContext
from megafp8.training import build as job
from megafp8.training.progress import read_records
from megafp8.training.trainer import Trainer


def quick_values(device: torch.device) -> InitialValues:
    """Random initial values made on the device, the same for each recipe; the CPU's take minutes at these sizes."""

    def initial(spec: ParamSpec, seed: int) -> Tensor:
        value = torch.zeros(spec.local_shape, device=device)
        own, generator = unpadded(value, spec), torch.Generator(device).manual_seed(zlib.crc32(spec.name.encode()))
        own.fill_(1.0) if spec.init.kind == "ones" else own.normal_(std=0.02, generator=generator)
        return value

    return initial


class Layers:
    """Forward and backward of a configuration's layers; weight gradients in FP32 buffers, or BF16 in `.grad`."""

    def __init__(self, config: Config, device: torch.device, gradients: str) -> None:
        build = BuildContext.of(config, ParallelContext(), device, policy.from_config(config))
        self.config, batch, length = config, config.train.micro_batch_size, config.data.seq_length
        self.block = TransformerBlock(range(config.model.num_layers), build)
        initialize(self.block, 0, quick_values(device))
        self.x = torch.randn(batch * length, config.model.hidden_size, device=device).bfloat16().requires_grad_()
        self.dy = torch.randn_like(self.x)
        positions = torch.arange(length, device=device).repeat(batch)
        turn = rotation(positions, inverse_frequencies(config.model, device))
        self.scaling = DelayedScaling.of(self.block)
        sink = Gradients(self.block) if gradients == "fp32" else None
        lay_side_by_side(self.block, sink.buffers if sink is not None else {})
        self.arguments = Sequences(batch, length, turn), StepContext(grads=sink, scaling=self.scaling)
        self.leaves, self.forward = (self.x, *self.block.parameters()), self.block.__call__

    def __call__(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None
        self.forward(self.x, *self.arguments).backward(self.dy)
        if self.scaling is not None:
            self.scaling.advance()


class Compiled(Layers):
    """The same under torch.compile, in PyTorch's operations, which it can look into; what it can't take runs as it
    is."""

    def __init__(self, config: Config, device: torch.device, gradients: str) -> None:
        super().__init__(config, device, gradients)
        self.forward = torch.compile(self.block)

    def __call__(self) -> None:
        with without_own_kernels(), torch._dynamo.config.patch(suppress_errors=True):
            super().__call__()


@contextmanager
def without_own_kernels() -> Iterator[None]:
    """Inside, modules in high precision use PyTorch's operations where they have kernels of our own."""
    with ExitStack() as stack:
        for owner, name, value in (
            (attention, "split_heads", lambda *args: None),
            (activation.Activation, "__call__", lambda self, x, weights=None: self.formula(x)),
            (linear_function, "multiply_wgrad", _multiply_wgrad),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _multiply_wgrad(dy: Tensor, x: Tensor, out: Tensor | None, adds: bool = True) -> Tensor:
    if out is None:
        return dy.t() @ x
    put_product(dy, x, out, adds)
    return out


@torch.library.custom_op("megafp8_bench::put_product", mutates_args=("out",))
def put_product(dy: Tensor, x: Tensor, out: Tensor, adds: bool) -> None:
    """`dY.T @ X` in an FP32 tensor, as `fp8.wgrad` does it: the fake `addmm` of torch 2.11 doesn't know `out_dtype`."""
    wgrad.multiply_wgrad(dy, x, out, adds)


class Plain:
    """The same layers in plain PyTorch under torch.compile, BF16 gradients."""

    def __init__(self, config: Config, device: torch.device) -> None:
        count, batch, length = config.model.num_layers, config.train.micro_batch_size, config.data.seq_length
        self.layers = nn.ModuleList(torch.compile(PlainLayer(config, device)) for _ in range(count))
        self.x = torch.randn(batch, length, config.model.hidden_size, device=device).bfloat16().requires_grad_()
        self.dy = torch.randn_like(self.x)
        self.turn = rotation(torch.arange(length, device=device), inverse_frequencies(config.model, device))

    def __call__(self) -> None:
        for leaf in (self.x, *self.layers.parameters()):
            leaf.grad = None
        y = self.x
        for layer in self.layers:
            y = layer(y, self.turn)
        y.backward(self.dy)


class Steps:
    """Whole steps of the training loop on mock data. losses: of all steps so far."""

    def __init__(self, config: Config, device: torch.device) -> None:
        with quickly_initialized(device), redirect_stdout(io.StringIO()):
            self.trainer = Trainer(job.build_parts(config, ParallelContext(), device))
        self.batches, self.records = self.trainer._training_batches(), []

    def __call__(self) -> None:
        self.records += self.trainer._iteration(self.batches)

    @property
    def data_wait_ms(self) -> float:
        """Mean time of a step so far in which the loop waited for data."""
        return 1e3 * self.trainer._runner.times.waited / len(self.records)

    @property
    def losses(self) -> list[float]:
        return [line["lm_loss"] for line in read_records(self.records)]


@contextmanager
def quickly_initialized(device: torch.device) -> Iterator[None]:
    """Inside, weights and masters that are built start from `quick_values`."""
    originals, initial = (job.build_model, job.build_optimizer), quick_values(device)
    job.build_model, job.build_optimizer = (partial(original, initial=initial) for original in originals)
    try:
        yield
    finally:
        job.build_model, job.build_optimizer = originals
