"""Small and large models that the self-test trains, and a Runner that trains them. Used by all checks."""

from __future__ import annotations

import gc
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megafp8.config import parse_args
from megafp8.meter import Meter
from megafp8.parallel import Axis, ParallelContext, build_parallel
from megafp8.training.build import Parts, build_parts, pick_device
from megafp8.training.run_log import read_metrics
from megafp8.training.trainer import Trainer

Flags = tuple[str, ...]
Check = tuple[str, Callable[[], dict]]
"""A name, and what gives the rest of its row."""
Pairs = list[tuple[float, float]]
"""(loss, gradient norm) of every step."""
STEPS = 10
SMALL = {"cuda": (4, 512, 1024, 256, 4), "cpu": (4, 32, 64, 16, 4)}  # layers, hidden, ffn, sequence, samples a step
FP8 = ("--bf16", "--fp8-small-linears", "fp8", "--fp8-format")
RECIPES: dict[str, Flags] = {
    "fp32": (),
    "bf16": ("--bf16",),
    "tensorwise": (*FP8, "hybrid", "--fp8-recipe", "tensorwise"),
    "blockwise": (*FP8, "e4m3", "--fp8-recipe", "blockwise"),
    "mxfp8": (*FP8, "e4m3", "--fp8-recipe", "mxfp8"),
    "delayed": (*FP8, "hybrid", "--fp8-recipe", "delayed", "--fp8-amax-history-len", "4"),
}
ZERO1 = ("--use-distributed-optimizer",)
GRAPHS = ("--cuda-graph-impl=local", "--cuda-graph-warmup-steps=1")
UNTIED = ("--untie-embeddings-and-output-weights",)
MOE = ("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "128", "--moe-aux-loss-coeff", "1e-2")
MODELS: dict[str, Flags] = {"dense": UNTIED, "moe": (*UNTIED, *MOE), "tied": ()}
"""What layouts are compared on; tied: the first and the last stage of a pipeline share a weight."""
LLAMA_8B = (
    *("--num-layers", "2", "--hidden-size", "4096", "--ffn-hidden-size", "14336", "--num-attention-heads", "32"),
    *("--num-query-groups", "8", "--seq-length", "4096", "--max-position-embeddings", "4096"),
    *("--global-batch-size", "8"),
)
LLAMA_8B_WHOLE = (
    *(*LLAMA_8B, "--num-layers", "32", "--seq-length", "8192", "--max-position-embeddings", "8192"),
    *("--vocab-size", "128256", "--rotary-base", "500000", "--norm-epsilon", "1e-5"),
)
"""As examples/llama3_8b.sh has it; the tokens of the text take few of the vocabulary's places."""
WHOLE_TILES = ("--num-layers", "2", "--hidden-size", "256", "--ffn-hidden-size", "256")
"""The least that two tensor-parallel ranks can hold in FP8."""
QWEN_30B = (
    *("--num-layers", "2", "--hidden-size", "2048", "--ffn-hidden-size", "768", "--num-attention-heads", "32"),
    *("--num-query-groups", "4", "--kv-channels", "128", "--seq-length", "4096", "--max-position-embeddings", "4096"),
    *("--global-batch-size", "8", *MOE, "--num-experts", "128", "--moe-router-topk", "8"),
    *("--moe-ffn-hidden-size", "768"),
)


def tp(n: int) -> Flags:
    return ("--tensor-model-parallel-size", str(n))


def model_flags(device: str, folder: Path) -> Flags:
    layers, hidden, ffn, length, samples = SMALL[device]
    return (
        *("--num-layers", str(layers), "--hidden-size", str(hidden), "--ffn-hidden-size", str(ffn)),
        *("--num-attention-heads", "8", "--group-query-attention", "--num-query-groups", "8"),
        *("--seq-length", str(length), "--max-position-embeddings", str(length), "--position-embedding-type", "rope"),
        *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        *("--micro-batch-size", "1", "--global-batch-size", str(samples)),
        *("--train-iters", str(STEPS), "--lr", "1e-4", "--min-lr", "1e-4", "--deterministic-mode", "--seed", "11"),
        *("--data-path", str(folder / "data_text_document"), "--split", "100,0,0", "--tokenizer-type", "ByteTokenizer"),
        *("--eval-iters", "0", "--num-workers", "0", "--log-interval", "1", "--device", device),
    )


@dataclass
class Runner:
    """Trains in this process; what has been trained with the same flags is remembered.

    device: cuda or cpu. lane: a name that no process beside this one has, for its files.
    """

    folder: Path
    device: str
    lane: str
    _known: dict[Flags, list[dict]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Of a small model's sequence."""
        return SMALL[self.device][3]

    def small(self, recipe: str, model: str, flags: Flags = ()) -> Pairs:
        """(loss, gradient norm) of a small model's steps."""
        every = (*model_flags(self.device, self.folder), *RECIPES[recipe], *MODELS[model], *flags)
        if every not in self._known:
            self._known[every] = self.train(every)
        return pairs(self._known[every])

    def train(self, flags: Flags) -> list[dict]:
        """The run's training lines. A new one each time."""
        log_dir = self.folder / "runs" / self.lane
        if int(os.environ.get("RANK", "0")) == 0:
            shutil.rmtree(log_dir, ignore_errors=True)
        parts = self.build((*flags, "--log-dir", str(log_dir)))
        parallel = parts.parallel
        if code := Trainer(parts).run():
            raise RuntimeError(f"exit code {code}")
        parallel.barrier()
        lines = read_metrics(log_dir)[0]
        parallel.barrier()
        groups = list(parts.pipeline.groups.values())
        del parts
        leave(parallel, groups)
        return lines

    def build(self, flags: Flags) -> Parts:
        """What a run with these flags works with, all ranks together; `parallel.meter` counts its traffic. `leave` it
        when done."""
        config, device = parse_args([*flags, "--distributed-timeout-minutes", "5"]), pick_device(self.device)
        parallel = build_parallel(config, device, meter=Meter())
        parallel.barrier()
        return build_parts(config, parallel, device)

    def reference(self, recipe: str, model: str) -> Pairs:
        """What one process gave; waits until it is there. Raises ValueError when it won't come."""
        path, failure = self.folder / f"reference_{recipe}_{model}.json", self.folder / f"reference_{recipe}.failed"
        while not path.exists():
            if failure.exists():
                raise ValueError(f"one process could not train {recipe}: {failure.read_text()}")
            time.sleep(0.2)
        return [tuple(pair) for pair in json.loads(path.read_text())]

    def write_reference(self, recipe: str, model: str) -> None:
        whole = self.folder / f"reference_{recipe}_{model}.new"
        whole.write_text(json.dumps(self.small(recipe, model)))
        whole.rename(whole.with_suffix(".json"))


def leave(parallel: ParallelContext, others: list[dist.ProcessGroup]) -> None:
    """Frees a layout's communicators; the job's own group stays."""
    axes = [value for value in vars(parallel).values() if isinstance(value, Axis)]
    groups = {id(group): group for group in (*(axis.group for axis in axes), *others)}
    for group in groups.values():
        if group not in (None, dist.group.WORLD):
            dist.destroy_process_group(group)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def pairs(lines: list[dict]) -> Pairs:
    return [(line["lm_loss"], line["grad_norm"]) for line in lines]
