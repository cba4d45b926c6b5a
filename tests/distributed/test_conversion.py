"""Converted models under tensor parallelism: the same losses as transformers at every size, and back to the same bytes.

CASES 25, 26, 28, 84.
"""

import json
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from megafp8.config import Config, with_vocab_size
from megafp8.core.gpt import build_model
from megafp8.optimizer import ModelWeights
from megafp8.parallel import build_parallel
from megafp8.params import named_specs
from megafp8.step import Phase, StepContext
from megafp8.training.hf_export import ExportOptions, export_hf
from tests.checkpoint.hf.models import LLAMA, VOCAB, Case, assert_same_bytes, convert, make, weights

SHAPE = {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 60}


def sample() -> torch.Tensor:
    return torch.randint(VOCAB, (4, 17), generator=torch.Generator().manual_seed(0))


def losses_and_save(load: str, save: str, tp: int) -> list[float]:
    """On every rank: loads at this tensor-parallel size, and saves; the losses of the sample's sequences."""
    found = find_checkpoint(load)
    config = Config.from_dict(found.metadata["args"]).replace(world_size=tp, tensor_model_parallel_size=tp)
    config = with_vocab_size(config, VOCAB)
    parallel = build_parallel(config, "cpu")
    model = build_model(config, parallel, "cpu")
    state = ModelWeights(named_specs(model))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(77)
        state.load_state(load_checkpoint(found.directory, state.state()))
        step = StepContext(phase=Phase.EVAL)
        found_losses = [model(row[None, :-1], step=step, labels=row[None, 1:]).item() for row in sample()]
    save_checkpoint(save, 1, state.state(), {**found.metadata, "args": config.to_dict()}, parallel=parallel)
    return found_losses


def expected_losses(source: Path) -> list[float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source).eval()
    with torch.no_grad():
        logits = model(sample()[:, :-1]).logits
    return [
        torch.nn.functional.cross_entropy(row, target[1:], reduction="sum").item()
        for row, target in zip(logits, sample(), strict=True)
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_every_size_computes_the_same(pool, tmp_path, tied):
    """One process saves for two ranks, two for four, four for two: losses stay those of transformers, rows of the
    padded vocabulary (128, 256, 512) never leave."""
    source = make(Case("tp", "Llama", {**SHAPE, "tie_word_embeddings": tied}), tmp_path / "hf")
    expected = expected_losses(source)
    convert(source, tmp_path / "tp1")
    for before, after in ((1, 2), (2, 4), (4, 2)):
        load, save = tmp_path / f"tp{before}", tmp_path / f"tp{after}"
        for losses in pool.run_on(after, losses_and_save, str(load), str(save), after):
            assert losses == pytest.approx(expected, rel=1e-5)
        target = tmp_path / f"hf-from-{before}-to-{after}"
        export_hf(find_checkpoint(save), target, ExportOptions())
        assert_same_bytes(weights(target), weights(source))
        assert json.loads((target / "config.json").read_text())["vocab_size"] == VOCAB
