"""A trained model from its checkpoint, for tools that evaluate it or sample from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megafp8.checkpoint import check_tokenizer, find_checkpoint, load_checkpoint
from megafp8.checkpoint.directory import checkpoints_below
from megafp8.config import Config, with_vocab_size
from megafp8.core.gpt import GPTModel, build_model
from megafp8.data import Tokenizer, build_tokenizer
from megafp8.fp8 import DelayedScaling
from megafp8.fp8.monitor import quantized_modules
from megafp8.optimizer import ModelWeights
from megafp8.parallel import ParallelContext, build_parallel
from megafp8.params import named_specs
from megafp8.step import Phase, StepContext
from megafp8.training.build import tokenizer_identity
from megafp8.training.step import PipelinePlan


@dataclass(frozen=True)
class TrainedModel:
    """A model in the precision it was trained in, its tokenizer, and the configuration of its run."""

    model: GPTModel
    tokenizer: Tokenizer
    config: Config
    iteration: int
    scaling: DelayedScaling | None
    device: torch.device
    parallel: ParallelContext = ParallelContext()
    pipeline: PipelinePlan = PipelinePlan()

    @property
    def step(self) -> StepContext:
        return StepContext(phase=Phase.EVAL, scaling=self.scaling)


def load_trained(
    load: str | Path,
    device: torch.device,
    *,
    step: int | None = None,
    layout: Callable[[Config], Config] | None = None,
    **overrides,
) -> TrainedModel:
    """The model of the checkpoint in `load` (latest, or of iteration `step`), with weights alone.

    Args:
        layout: makes of the run's configuration the one to load it in, on WORLD_SIZE processes; None is one process.
        overrides: configuration fields to change, e.g. tokenizer_model where the file has moved; None changes nothing.

    Raises ValueError, in one line, when there is no such checkpoint, it is damaged, or its tokenizer is another one.
    """
    found = find_checkpoint(load, step)
    if found is None:
        below = checkpoints_below(load)
        mend = f"there is {below}" if below else "give a directory written by --save"
        raise ValueError(f"--load {load}: no checkpoint there; {mend}")
    config = Config.from_dict(found.metadata["args"])
    config = config.replace(**{name: value for name, value in overrides.items() if value is not None})
    tokenizer = build_tokenizer(config.data)
    config = with_vocab_size(config, tokenizer.vocab_size)
    check_tokenizer(found, tokenizer_identity(tokenizer))
    parallel = ParallelContext()
    if layout is not None:
        config = with_vocab_size(layout(config), tokenizer.vocab_size)
        parallel = build_parallel(config, device)
        if len(set(parallel.everyone.exchange(found.iteration))) > 1:
            raise ValueError(f"--load {load}: ranks see different checkpoints there; give --ckpt-step")
    model = build_model(config, parallel, device)
    for name, linear in quantized_modules(model).items():
        if name in found.metadata["progress"].get("fallen", {}):  # to BF16, see training/fallback.py
            linear.use_recipe(None)
    weights, scaling = ModelWeights(named_specs(model)), DelayedScaling.of(model)
    owners = [owner for owner in (weights, model, scaling) if owner is not None]
    wanted = {name: item for owner in owners for name, item in owner.state().items()}
    ignored = ("optimizer/", "rng/", "fp8_scaling/", "balance/")
    tensors = load_checkpoint(found.directory, wanted, ignored=ignored, parallel=parallel)
    for owner in owners:
        owner.load_state(tensors)
    plan = PipelinePlan.of(config, parallel)
    return TrainedModel(model, tokenizer, config, found.iteration, scaling, device, parallel, plan)


def pick_token(logits: Tensor, *, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One token id from logits `[vocabulary]`; temperature 0 takes the largest (the lowest id among equals)."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.to(torch.float64).cpu() / temperature
    values, order = scaled.sort(descending=True, stable=True)
    if top_k:
        values, order = values[:top_k], order[:top_k]
    probabilities = values.softmax(0)
    # The first token always stays: mass before a token, not including it, decides.
    keep = probabilities.cumsum(0) - probabilities < top_p
    probabilities = probabilities * keep
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


@torch.no_grad()
def generate(
    trained: TrainedModel,
    prompt: list[int],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterable[int]:
    """Yields up to `count` tokens after `prompt` (not empty); ends after an end-of-document token.

    Runs the training forward over the whole context for each token, without a cache: simple, and exactly the numbers
    of training. A context longer than the model's positions loses its oldest tokens.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        context = ids[-trained.config.model.max_position_embeddings :]
        tokens = torch.tensor([context], device=trained.device)
        logits = trained.model(tokens, step=trained.step)[0, -1]
        token = pick_token(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        ids.append(token)
        yield token
        if token == trained.tokenizer.eod:
            return
