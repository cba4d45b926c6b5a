"""A whole training step, from the data to new weights and what is logged of them, never waits for the device."""

import pytest
import torch

from megafp8.config import build_config, with_vocab_size
from megafp8.core.gpt import build_model
from megafp8.data import Batch
from megafp8.fp8 import DelayedScaling
from megafp8.optimizer import build_optimizer
from megafp8.parallel import ParallelContext
from megafp8.params import specs_in_order
from megafp8.training.build import build_parts
from megafp8.training.step import advance_scaling, forward_backward
from megafp8.training.trainer import Trainer
from tests.gpu.waiting import no_waiting

MODEL = {
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "seq_length": 128,
    "micro_batch_size": 2,
    "lr": 1e-3,
    "train_iters": 3,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 1023,
    "mock_data": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
    "bf16": True,
}
PRIMARY = {"use_distributed_optimizer": True, "fp8_param_gather": True}
CASES = {
    "bf16": {},
    "blockwise": {"fp8_format": "e4m3"},
    "blockwise, primary": {"fp8_format": "e4m3"} | PRIMARY,
    "tensorwise, primary": {"fp8_format": "hybrid"} | PRIMARY,
    "delayed, primary": {"fp8_format": "hybrid", "fp8_recipe": "delayed"} | PRIMARY,
    "lower state": {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": True,
        "exp_avg_dtype": "fp8",
        "exp_avg_sq_dtype": "fp8",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_no_part_of_a_step_waits(case):
    config, device = with_vocab_size(build_config(env={}, **MODEL | CASES[case]), 1024), torch.device("cuda")
    parallel = ParallelContext()
    model = build_model(config, parallel, device)
    scaling = DelayedScaling.of(model)
    optimizer = build_optimizer(specs_in_order(model), config, parallel, scaling=scaling)
    tokens = torch.randint(1023, (2, 128))
    batch = Batch(tokens, tokens, torch.ones(2, 128), torch.arange(128).repeat(2, 1), None).pin_memory()

    def step(iteration: int) -> torch.Tensor:
        optimizer.zero_grad(2)
        options = {"iteration": iteration, "seed": 1, "scaling": scaling, "device": device, "count": 2}
        output = forward_backward(model, optimizer, iter([batch, batch]), **options)
        if scaling is not None:
            advance_scaling(scaling, parallel)
        optimizer.step(
            lr=1e-3, weight_decay=0.1, valid_tokens=output.valid_tokens, loss=output.loss, with_num_zeros=True
        )
        return output.loss

    losses = [step(1), step(2)]  # kernels are compiled
    with no_waiting():
        losses += [step(3), step(4)]
    assert losses[-1] < losses[0]


def test_no_part_of_the_training_loop_waits():
    config = with_vocab_size(build_config(env={}, **MODEL | {"num_workers": 0}), 1024)
    trainer = Trainer(build_parts(config, ParallelContext(), torch.device("cuda")))
    batches = trainer._training_batches()
    records = trainer._iteration(batches) + trainer._iteration(batches)
    with no_waiting():
        records += trainer._iteration(batches)
    assert all(record.loss.item() > 0 for record in records)
