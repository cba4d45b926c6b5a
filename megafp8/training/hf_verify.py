"""A checkpoint's logits against those that transformers computes from the Hugging Face model, both in FP32."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from megafp8.checkpoint import Found, load_checkpoint
from megafp8.checkpoint.hf.streams import PREFIX
from megafp8.config import ParallelConfig
from megafp8.core.gpt import GPTModel, build_model
from megafp8.optimizer import ModelWeights
from megafp8.parallel import ParallelContext
from megafp8.params import named_specs
from megafp8.step import Phase, StepContext
from megafp8.training.hf_export import config_of


def largest_difference(found: Found, directory: Path, num_tokens: int, *, seed: int = 0) -> float:
    """The largest difference of a logit on two random sequences of `num_tokens`, or as many as the model's positions
    reach; NaN counts as infinite.

    Raises ValueError without transformers, for a model that it can't load, and for another vocabulary.
    """
    theirs = _theirs(directory)
    ours = _ours(found)
    if ours.vocab_size != theirs.config.vocab_size:
        raise ValueError(f"--hf {directory}: {theirs.config.vocab_size} tokens, the checkpoint has {ours.vocab_size}")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(ours.vocab_size, (2, min(num_tokens, ours.max_positions)), generator=generator)
    with torch.no_grad():
        difference = (ours(tokens, step=StepContext(phase=Phase.EVAL)) - theirs(tokens).logits).abs().max()
    return float("inf") if difference.isnan() else difference.item()


def _theirs(directory: Path):
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError:
        raise ValueError("verify: transformers is not installed; `pip install transformers`") from None
    if not sys.stderr.isatty():  # a bar in a log is noise
        disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"--hf {directory}: transformers can't load it ({reason})") from None
    return model.eval()


def _ours(found: Found) -> GPTModel:
    """The model in FP32, whatever it was trained in: the conversion is what is compared."""
    config = config_of(found).replace(bf16=False, fp8_format=None, keep_modules_in_bf16=())
    config = replace(config, parallel=ParallelConfig())
    model = build_model(config, ParallelContext(), "cpu")
    weights = ModelWeights(named_specs(model))
    biases = {PREFIX + name.removeprefix(PREFIX): item for name, item in model.state().items()}
    wanted = weights.state() | biases  # the items of biases are the model's own tensors
    weights.load_state(load_checkpoint(found.directory, wanted, ignored=("optimizer/", "rng/", "fp8_scaling/")))
    return model
