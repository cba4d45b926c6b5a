"""Any layout against one process: trains a small model on both and compares gradient by gradient.

    expected = run_layout(pool, LLAMA, Layout())
    actual = run_layout(pool, LLAMA, Layout(tp=2, sp=True))
    compare(actual, expected)

Every rank sends back its parts with their boxes (ParamSpec); here they are put together, and parts that several ranks
hold must agree to the last bit. Samples are functions of the iteration and their number in the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megafp8.checkpoint import find_checkpoint, load_found
from megafp8.config import Config
from megafp8.config.resolve import resolve
from megafp8.core.gpt import build_model
from megafp8.core.pipeline.executor import Executor
from megafp8.core.transformer.graphs import LayerGraphs
from megafp8.data import Batch
from megafp8.fp8 import DelayedScaling
from megafp8.optimizer import build_optimizer
from megafp8.parallel import ParallelContext, build_parallel
from megafp8.params import StateItem, name_of, specs_in_order
from megafp8.training.step import PipelinePlan, advance_scaling, forward_backward
from tests.distributed.pool import WorkerPool
from tests.training.recorded_ops import RecordedOps

VOCAB = 101  # no multiple of anything: ranks hold different numbers of padding rows

LLAMA = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "seq_length": 16,
    "group_query_attention": True,
    "num_query_groups": 4,
    "position_embedding_type": "rope",
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "qk_layernorm": True,
    "add_qkv_bias": True,
}
GPT2 = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 16,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
}
# Adam turns the rounding of gradient elements near zero into whole steps: a small learning rate keeps that small.
COMMON = {
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 100,
    "lr": 5e-5,
    "min_lr": 5e-5,
    "seed": 7,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 8,
    "weight_decay": 0.1,
    "device": "cpu",
}


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    dp: int = 1
    sp: bool = False
    overlap: bool = False
    pp: int = 1
    cp: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    ring: bool = False
    ep: int = 1
    etp: int | None = None
    dispatcher: str = "alltoall"

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def values(self) -> dict:
        return {
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.sp,
            "tp_comm_overlap": self.overlap,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "num_virtual_stages_per_pipeline_rank": self.chunks if self.chunks > 1 else None,
            "pipeline_schedule": self.schedule,
            "cp_comm_type": ("p2p",) if self.ring else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "moe_token_dispatcher_type": self.dispatcher,
        }

    def __str__(self) -> str:
        name = f"TP{self.tp}" + ("+SP" if self.sp else "") + ("+overlap" if self.overlap else "")
        if self.pp > 1:
            name += f"xPP{self.pp}" + (f"x{self.chunks}" if self.chunks > 1 else "") + f"-{self.schedule}"
        name += f"xCP{self.cp}" + "-ring" * self.ring if self.cp > 1 else ""
        name += f"xDP{self.dp}" if self.dp > 1 else ""
        name += f"-EP{self.ep}" if self.ep > 1 else ""
        name += "" if self.etp is None else f"-ETP{self.etp}"
        return name if self.dispatcher == "alltoall" else f"{name}-{self.dispatcher}"


def make_config(values: dict, layout: Layout) -> Config:
    given = COMMON | values | layout.values
    config = resolve(Config(given=given).replace(**given), {"WORLD_SIZE": str(layout.world)})
    multiple = config.model.make_vocab_size_divisible_by * layout.tp
    return config.replace(unpadded_vocab_size=VOCAB, padded_vocab_size=-(-VOCAB // multiple) * multiple)


def sample(iteration: int, number: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, labels, loss mask) of a sample; some have no valid token at all. Most labels follow from their token."""
    generator = torch.Generator().manual_seed(1000 * iteration + number)
    ids = torch.randint(VOCAB, (length + 1,), generator=generator)
    for i in (torch.rand(length, generator=generator) < 0.8).nonzero().flatten().tolist():
        ids[i + 1] = (7 * ids[i] + 3) % VOCAB
    mask = (torch.rand(length, generator=generator) < (0.0, 0.3, 0.9, 1.0)[number % 4]).float()
    return ids[:-1], ids[1:], mask


def micro_batches(config: Config, parallel: ParallelContext, iteration: int) -> Iterator[Batch]:
    """This rank's share of a global batch, dealt as the data loader does."""
    size, length, dp = config.train.micro_batch_size, config.data.seq_length, parallel.dp
    for first in range(dp.rank * size, config.train.global_batch_size, dp.size * size):
        samples = [sample(iteration, number, length) for number in range(first, first + size)]
        tokens, labels, mask = (torch.stack(part) for part in zip(*samples, strict=True))
        yield Batch(tokens, labels, mask, torch.arange(length).expand(size, length), None)


Part = tuple[tuple, tuple[int, ...], Tensor]  # box, global shape, values


@dataclass
class Run:
    """What a rank, or all of them together, saw. grads: of the first step; weights: after the last."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    grads: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    extra: object = None


Observer = Callable[..., object]
"""Called with (model, optimizer, parallel) after the last step; what it returns is sent back as `Run.extra`."""


def train(
    values: dict,
    layout: Layout,
    steps: int,
    load: str | None = None,
    fault: Callable[[ExitStack], None] | None = None,
    observe: Observer | None = None,
    watch: Callable[[Executor], object] = lambda executor: None,
) -> Run:
    """What one rank does. load: directory of checkpoints to start from; fault: patches something; watch: sees
    the executor of every step."""
    config = make_config(values, layout)
    parallel = build_parallel(config, "cpu")
    with ExitStack() as stack:
        if fault is not None:
            fault(stack)
        model = build_model(config, parallel, "cpu")
        scaling = DelayedScaling.of(model)
        optimizer = build_optimizer(specs_in_order(model), config, parallel, scaling=scaling)
        if config.parallel.overlap_param_gather:
            optimizer.wait_before_use(model)
        if load is not None:
            load_states(load, [optimizer.weights, optimizer] + [scaling] * (scaling is not None), parallel)
        count = config.train.global_batch_size // (config.train.micro_batch_size * parallel.dp.size)
        run, plan, layers = Run(), PipelinePlan.of(config, parallel), None
        if config.train.cuda_graph_impl != "none":
            wait = optimizer.weights.arrivals.wait
            layers = LayerGraphs(torch.device("cpu"), wait=wait, recorder=RecordedOps, meter=parallel.meter)
        for iteration in range(1, steps + 1):
            optimizer.zero_grad(count)
            output = forward_backward(
                model,
                optimizer,
                micro_batches(config, parallel, iteration),
                iteration=iteration,
                seed=config.train.seed,
                scaling=scaling,
                device=torch.device("cpu"),
                plan=plan,
                observe=watch,
                layers=layers,
            )
            if iteration == 1:
                run.grads = parts_of(optimizer.gradients())
            if scaling is not None:
                advance_scaling(scaling, parallel)
            stats = optimizer.step(
                lr=config.optimizer.lr,
                weight_decay=config.optimizer.weight_decay,
                valid_tokens=output.valid_tokens,
                loss=output.loss,
            )
            run.losses.append(output.loss.item())
            run.norms.append(stats.grad_norm.item())
            run.skipped.append(bool(stats.skipped))
        run.weights = parts_of(optimizer.masters.state("", optimizer.weights.specs))
        run.extra = observe(model, optimizer, parallel) if observe is not None else None
    return run


def load_states(directory: str, owners: list, parallel: ParallelContext) -> None:
    items = {name: item for owner in owners for name, item in owner.state().items()}
    tensors = load_found(find_checkpoint(directory), items, parallel=parallel)
    for owner in owners:
        owner.load_state(tensors)
    owners[1].write_weights()


def parts_of(items: dict[str, StateItem]) -> dict[str, Part]:
    return {key: (item.box, tuple(item.shape), item.tensor.clone()) for key, item in items.items()}


def assemble(parts: list[dict[str, Part]]) -> dict[str, Tensor]:
    """Global tensors of the ranks' parts; AssertionError where copies differ, or nobody holds an element."""
    whole: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for key, (box, shape, values) in (item for part in parts for item in part.items()):
        name = name_of(key)
        total, seen = whole.setdefault(name, torch.zeros(shape)), held.setdefault(name, torch.zeros(shape, dtype=bool))
        place = tuple(slice(a, b) for a, b in box)
        again = seen[place]
        assert torch.equal(total[place][again], values[again]), f"copies of {name} differ"
        total[place], seen[place] = values, True
    assert all(seen.all() for seen in held.values())
    return whole


def run_layout(pool: WorkerPool, values: dict, layout: Layout, steps: int = 2, **options) -> Run:
    """Trains on `layout.world` ranks; everything put together. Losses and norms must be the same on all ranks.

    The second step is the first that starts from what an optimizer wrote: weights, moments, scales.
    """
    ranks = pool.run_on(layout.world, train_with, values, layout, steps, options)
    first = ranks[0]
    for other in ranks[1:]:
        for name in ("losses", "norms", "skipped"):
            assert str(getattr(other, name)) == str(getattr(first, name)), name  # as text, where NaN is NaN
    return Run(
        first.losses,
        first.norms,
        first.skipped,
        assemble([rank.grads for rank in ranks]),
        assemble([rank.weights for rank in ranks]),
        [rank.extra for rank in ranks],
    )


def train_with(values: dict, layout: Layout, steps: int, options: dict) -> Run:
    return train(values, layout, steps, **options)


def distance(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference, in norms of what is expected."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def compare(actual: Run, expected: Run, *, gradient=1e-5, scalar=1e-6, weight=1e-5) -> None:
    """NUMERICS.md's tolerances; AssertionError names what is off."""
    assert actual.grads.keys() == expected.grads.keys()
    off = {name: distance(actual.grads[name], grad) for name, grad in expected.grads.items()}
    assert max(off.values()) <= gradient, {name: value for name, value in off.items() if value > gradient}
    for name in ("losses", "norms"):
        pairs = list(zip(getattr(actual, name), getattr(expected, name), strict=True))
        assert all(abs(a - b) <= scalar * abs(b) for a, b in pairs), (name, pairs)
    off = {name: distance(actual.weights[name], value) for name, value in expected.weights.items()}
    off = {name: value for name, value in off.items() if value > (1e-3 if "bias" in name else weight)}
    assert not off, off
