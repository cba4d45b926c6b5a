"""Saved at one layout, resumed at five others: everything that is state is equal, and training goes on (CASES 15, 57).

Real runs of pretrain_gpt.py's parts: dense and with experts, FP8 primary weights on and off, layers, shards and
vocabularies that don't divide evenly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megafp8.config import parse_args
from megafp8.parallel import build_parallel, close_parallel
from megafp8.training.build import build_parts
from megafp8.training.run_log import read_metrics
from megafp8.training.trainer import Trainer
from tests.distributed.layouts import assemble, parts_of
from tests.training.runs import flags, write_corpus

BATCH = ("--num-layers", "3", "--global-batch-size", "12", "--log-interval", "1")
SMOOTH = ("--lr", "1e-4", "--min-lr", "1e-4", "--eval-iters", "0", "--train-iters", "3", "--lr-warmup-iters", "1")
TWO_MICROBATCHES = {1: "6", 2: "3", 3: "2", 4: "1"}  # micro-batch size by data-parallel ranks (three, of four ranks)
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "24", "--moe-layer-freq", "[0,1,1]"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--moe-aux-loss-coeff", "0.01"),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-shared-expert-intermediate-size", "16"),
)
FP8 = ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-amax-history-len", "4")
ZERO = ("--use-distributed-optimizer",)
KINDS = {
    "dense": (),
    "dense fp8": (*FP8, *ZERO, "--fp8-param-gather"),
    "experts": EXPERTS,
    "experts fp8": (*EXPERTS, *FP8, *ZERO, "--fp8-param-gather"),
}


def tp(size: int) -> tuple[str, ...]:
    return ("--tensor-model-parallel-size", str(size), "--sequence-parallel")


def pp(size: int) -> tuple[str, ...]:
    return ("--pipeline-model-parallel-size", str(size), "--decoder-first-pipeline-num-layers", "1")


EP = ("--expert-model-parallel-size", "2")
# name -> processes, how many of them are data-parallel, and flags
DENSE_LAYOUTS = {
    "one": (1, 1, ()),
    "dp3": (3, 3, ZERO),
    "tp4": (4, 1, tp(4)),
    "pp2 dp2": (4, 2, (*pp(2), *ZERO)),
    "cp2 tp2": (4, 1, (*tp(2), "--context-parallel-size", "2")),
}
EXPERT_LAYOUTS = {
    "one": (1, 1, ()),
    "dp3": (3, 3, ZERO),
    "pp2 ep2": (4, 2, (*pp(2), *EP, *ZERO)),
    "tp2 dp2": (4, 2, (*tp(2), *ZERO)),
    "dp4 ep2": (4, 4, (*EP, *ZERO)),
}
SAVED_AT = {False: (4, 2, (*tp(2), *ZERO)), True: (4, 2, (*tp(2), *ZERO, *EP))}
QUICK = {("experts fp8", "pp2 ep2")}
CASES = [
    pytest.param(kind, name, marks=[] if (kind, name) in QUICK else pytest.mark.slow, id=f"{kind}-{name}")
    for kind in KINDS
    for name in (EXPERT_LAYOUTS if "experts" in kind else DENSE_LAYOUTS)
]


def session(argv: list[str]) -> dict:
    """Starts or resumes a run, and trains to its end: the state it started from, by part, and its exit code."""
    config = parse_args(argv)
    parallel = build_parallel(config, "cpu")
    trainer = Trainer(build_parts(config, parallel, torch.device("cpu")))
    items = {key: item for key, item in trainer.state.items().items() if not key.startswith("rng/")}
    found = parts_of(items)
    assert trainer.run() == 0
    close_parallel(parallel)
    return found


def run(pool, corpus: Path, log_dir: Path, kind: str, layout: tuple, *extra: str) -> dict[str, torch.Tensor]:
    world, dp, more = layout
    argv = [*flags(corpus), *BATCH, *SMOOTH, *KINDS[kind], "--micro-batch-size", TWO_MICROBATCHES[dp], *more]
    return assemble(pool.run_on(world, session, [*argv, "--log-dir", str(log_dir), *extra]))


def lines(log_dir: Path, key: str) -> list[float]:
    return [line[key] for line in read_metrics(log_dir)[0]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def saved(pool_of_module, corpus, tmp_path_factory):
    """kind -> (directory of checkpoints after 1 of 3 iterations, log of the run that went on, its state then)."""
    done = {}

    def of(kind: str):
        if kind not in done:
            top, layout = tmp_path_factory.mktemp("saved"), SAVED_AT["experts" in kind]
            run(pool_of_module, corpus, top / "log", kind, layout, "--save", str(top / "c"), "--save-interval", "1")
            load = ("--load", str(top / "c"), "--ckpt-step", "1")
            state = run(pool_of_module, corpus, top / "again", kind, layout, *load)
            done[kind] = top, state
        return done[kind]

    return of


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_saved_at_one_layout_resumed_at_another(pool, corpus, tmp_path, saved, kind, name):
    top, expected = saved(kind)
    layout = (EXPERT_LAYOUTS if "experts" in kind else DENSE_LAYOUTS)[name]
    load = ("--load", str(top / "c"), "--ckpt-step", "1", "--save", str(tmp_path / "c"))
    state = run(pool, corpus, tmp_path / "log", kind, layout, *load)
    assert state.keys() == expected.keys()
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in state)
    assert any(name.endswith(".expert_bias") for name in state) == ("experts" in kind)
    assert any(name.startswith("fp8_scaling/") for name in state) == ("fp8" in kind)
    different = [name for name, value in state.items() if not torch.equal(value, expected[name])]
    assert not different
    assert lines(tmp_path / "log", "iteration") == [2, 3]
    tolerance = 2e-3 if "fp8" in kind else 2e-6
    for key in ("lm_loss", "grad_norm"):
        pairs = list(zip(lines(tmp_path / "log", key), lines(top / "log", key)[1:], strict=True))
        assert all(abs(a - b) <= tolerance * (30 if key == "grad_norm" else 1) * abs(b) for a, b in pairs), (key, pairs)


@pytest.mark.parametrize("kind", [k if k == "experts fp8" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_resumed_at_the_same_layout_every_bit_is_the_same(saved, kind):
    top, _ = saved(kind)
    for key in ("lm_loss", "grad_norm"):
        assert lines(top / "again", key) == lines(top / "log", key)[1:]


DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")


@pytest.mark.slow
def test_every_file_is_the_same_after_a_resume(pool, corpus, tmp_path):
    """CASES 15: experts over two ranks, dropout on; each rank has its own random states again."""
    noise = (*DROPOUT, "--async-save", "--save-interval", "1")
    layout = (2, 2, (*EP, *ZERO))
    whole, again = tmp_path / "whole", tmp_path / "again"
    run(pool, corpus, whole / "log", "experts fp8", layout, *noise, "--save", str(whole / "c"))
    load = ("--load", str(whole / "c"), "--ckpt-step", "1", "--save", str(again / "c"))
    run(pool, corpus, again / "log", "experts fp8", layout, *noise, *load)
    one, other = whole / "c" / "iter_0000003", again / "c" / "iter_0000003"
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert {"rng-00000.safetensors", "rng-00001.safetensors", "model-00001.safetensors"} <= set(files)
    for name in files:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    for key in ("lm_loss", "grad_norm", "learning_rate"):
        assert lines(again / "log", key) == lines(whole / "log", key)[1:]
