"""A job without data and logs: the trainer's iteration on random tokens, for studies of what it takes and sends."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megafp8.config import Config
from megafp8.core.gpt import GPTModel, ModelChunks, build_model
from megafp8.data import Batch
from megafp8.fp8 import DelayedScaling
from megafp8.optimizer import Optimizer, build_optimizer
from megafp8.parallel import ParallelContext
from megafp8.params import InitialValues, ParamSpec, named_specs, specs_in_order
from megafp8.training.agreement import Agreement
from megafp8.training.step import PipelinePlan, advance_scaling, forward_backward


class BareJob:
    """config: resolved, with the vocabulary known. static: bytes on the GPU when the last backward was over."""

    def __init__(self, config: Config, parallel: ParallelContext, device: torch.device) -> None:
        self.config, self.parallel, self.device = config, parallel, device
        self.model: GPTModel | ModelChunks = build_model(config, parallel, device, initial=initial_on(device))
        ends = self.model.ends() if config.optimizer.decoupled_lr is not None else ()
        decoupled = frozenset(spec.name for module in ends for spec, _ in named_specs(module))
        self.scaling, self.plan = DelayedScaling.of(self.model), PipelinePlan.of(config, parallel)
        self.optimizer: Optimizer = build_optimizer(
            specs_in_order(self.model), config, parallel, decoupled=decoupled, scaling=self.scaling,
            initial=initial_on(device),
        )  # fmt: skip
        if config.parallel.overlap_param_gather:
            self.optimizer.wait_before_use(self.model)
        self.agreement, self.static = Agreement(parallel, device), 0
        train = config.train
        self.count = train.global_batch_size // (train.micro_batch_size * parallel.dp.size)

    def step(self, iteration: int) -> Tensor:
        """As the trainer's iteration; whether gradients were finite."""
        config, optimizer, logging = self.config, self.optimizer, self.config.logging
        optimizer.zero_grad(self.count)
        output = forward_backward(
            self.model,
            optimizer,
            self._batches(iteration),
            iteration=iteration,
            seed=config.train.seed,
            scaling=self.scaling,
            device=self.device,
            count=self.count,
            plan=self.plan,
        )
        if self.device.type == "cuda":
            self.static = torch.cuda.memory_allocated(self.device)
        if self.scaling is not None:
            advance_scaling(self.scaling, self.parallel)
        stats = optimizer.step(
            lr=config.optimizer.lr or 0.0,
            weight_decay=config.optimizer.weight_decay,
            valid_tokens=output.valid_tokens,
            loss=output.loss,
            with_num_zeros=logging.log_num_zeros_in_grad,
            with_params_norm=logging.log_params_norm,
        )
        self.agreement.agree([0, 0])
        return ~stats.nan

    def _batches(self, iteration: int) -> Iterator[Batch]:
        """Random tokens, each sequence one document."""
        shape = (self.config.train.micro_batch_size, self.config.data.seq_length)
        generator = torch.Generator().manual_seed(iteration)
        for _ in range(self.count):
            ids = torch.randint(self.config.model.unpadded_vocab_size, shape, generator=generator)
            positions = torch.arange(shape[1]).expand(shape).contiguous()
            yield Batch(ids, ids.roll(-1, 1), torch.ones(shape), positions)


def initial_on(device: torch.device) -> InitialValues:
    """Initial values of a local tensor, drawn on the device: of the spec's distribution, in a fraction of the time."""

    def initial(spec: ParamSpec, seed: int) -> Tensor:
        value = torch.empty(spec.local_shape, device=device)
        if spec.init.kind == "normal":
            return value.normal_(std=spec.init.std)
        return value.fill_(float(spec.init.kind == "ones"))

    return initial
