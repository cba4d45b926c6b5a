"""Out of memory: a page that helps, flags that do save what it says, an exit code, and every rank's end."""

import json
import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megafp8.config import parse_args, with_vocab_size
from megafp8.config.logging import LoggingConfig
from megafp8.parallel import ParallelContext
from megafp8.plan.memory import plan_memory
from megafp8.training import build, trainer
from megafp8.training.build import lacks_memory
from megafp8.training.live_memory import END, _Storages, graph_bytes
from megafp8.training.memory_savings import savings
from megafp8.training.memory_watch import EXIT_OUT_OF_MEMORY, MemoryWatch, _what
from megafp8.training.watchdog import Watchdog
from tests.training.runs import RECIPES, flags, run, write_corpus
from tests.training.test_watchdog import Shelf

CPU = torch.device("cpu")
SHORT = ("--train-iters", "4", "--eval-iters", "0", "--hidden-size", "64", "--ffn-hidden-size", "128")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def bytes_in(line: str) -> list[float]:
    return [float(number.replace(",", "")) * UNITS[unit] for number, unit in re.findall(r"([\d,.]+) (.iB)", line)]


def test_the_page_has_planned_and_live_memory_by_owner_and_flags(corpus, tmp_path, capsys, monkeypatch):
    """Memory runs out when backward is about to begin: then all that forward keeps is there."""
    backward, calls = torch.autograd.backward, []

    def no_memory(*args):
        calls.append(None)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
        return backward(*args)

    monkeypatch.setattr(torch.autograd, "backward", no_memory)
    argv = flags(corpus, *SHORT, *RECIPES["blockwise"], "--log-dir", str(tmp_path), "--record-memory-history")
    with pytest.raises(SystemExit) as end:
        run(*argv)
    assert end.value.code == EXIT_OUT_OF_MEMORY == 19
    out, err = capsys.readouterr()
    assert "--record-memory-history: only CUDA's allocator has a history" in out
    lines = err[err.index("rank 0 of 1 ran out of memory in iteration 2: CUDA out of memory. Tried") :].splitlines()
    assert "pipeline stage 0 of 1 (pipeline rank 0 of 1), backward of microbatch 1, schedule 1f1b" in lines[2]
    table = {line[:44].strip(): bytes_in(line) for line in lines if len(bytes_in(line)) == 2}
    for owner in ("weights", "main gradients (fp32)", "master weights", "Adam moments", "FP8 copies of weights"):
        planned, now = table[owner]
        assert now == pytest.approx(planned, rel=0.02), owner
    planned, now = table["activations"]
    assert now == pytest.approx(planned, rel=0.12), "the CPU's RMSNorm keeps FP32 copies"
    now = {line.strip().rsplit("  ", 1)[0].strip(): bytes_in(line)[0] for line in lines if re.match("  .*layers", line)}
    token = 2 * 32  # of a microbatch
    assert now["layers.*.mlp.fc2"] == pytest.approx(2 * token * 2 * 128 * 2, rel=0.1), "its input, [gate; up] in BF16"
    assert "snapshot: only CUDA's allocator has one" in lines
    file = tmp_path / "out_of_memory_rank0.txt"
    assert lines[-1] == f"this page: {file}"
    assert file.read_text().startswith("\n".join(lines[:-1]))
    assert "Traceback" in file.read_text()
    saves = [line for line in lines if "saves" in line]
    assert len(saves) == 3
    for line in saves:
        shown = lines[lines.index(line) - 1].split()
        config = with_vocab_size(parse_args([*argv, "--global-batch-size", "4", *shown]), 257)
        assert bytes_in(line)[0] == pytest.approx(plan_memory(config).total, rel=0.01), shown


BIG = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4 --lr 1e-4 "
BIG += "--train-iters 10 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data --swiglu --bf16 "
BIG += "--position-embedding-type rope --disable-bias-linear --global-batch-size 64"
JOBS = {
    "dense": BIG,
    "fp8": f"{BIG} --fp8-format e4m3 --use-distributed-optimizer --fp8-param-gather --recompute-granularity full",
    "experts": f"{BIG} --num-experts 8 --fp8-format hybrid --expert-model-parallel-size 2 --use-distributed-optimizer",
    "stages": f"{BIG} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --recompute-activations",
}


@pytest.mark.parametrize("job", JOBS)
def test_what_flags_save_is_what_the_plan_of_that_command_line_saves(job):
    """Three different things, each a valid command line for the same processes, the largest saving first."""
    env = {"WORLD_SIZE": "8"}
    config = with_vocab_size(parse_args(JOBS[job].split(), env=env), 32000)
    found = savings(config, CPU)
    assert len(found) == 3
    assert sorted(found, key=lambda saving: -saving.saves) == found
    before = plan_memory(config).total
    for saving in found:
        changed = with_vocab_size(parse_args([*JOBS[job].split(), *saving.flags.split()], env=env), 32000)
        stages = range(changed.parallel.pipeline_model_parallel_size if "pipeline" in saving.flags else 1)
        total = max(plan_memory(changed, CPU, stage).total for stage in stages)
        assert (saving.saves, saving.total) == (before - total, total), saving.flags
    if job == "fp8":
        assert not any("recompute" in saving.flags or "param-gather" in saving.flags for saving in found)


def test_what_counts_as_out_of_memory():
    assert lacks_memory(MemoryError())
    assert lacks_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))
    assert lacks_memory(RuntimeError("CUDA error: out of memory"))
    assert not lacks_memory(RuntimeError("integer overflow"))
    behind = RuntimeError("backward failed")
    behind.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert lacks_memory(behind)


def test_other_errors_are_what_they_were(corpus, tmp_path, monkeypatch):
    def breaks(*args):
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.autograd, "backward", breaks)
    with pytest.raises(RuntimeError, match="planted"):
        run(*flags(corpus, *SHORT, "--log-dir", str(tmp_path)))
    assert not list(tmp_path.glob("out_of_memory*"))


def test_all_ranks_end_by_the_code_and_one_shows_the_page(capfd, monkeypatch):
    store, ended = Shelf(), []
    with monkeypatch.context() as before:
        before.setenv("TORCHELASTIC_RESTART_COUNT", "3")
        Watchdog(1, 3, store, 4.0).end_all(19, "what ended an earlier start")
    with Watchdog(0, 3, store, 4.0, end=ended.append) as first, Watchdog(1, 3, store, 4.0, end=ended.append) as second:
        for dog in (first, second):
            dog.stand_down()
        assert first.end_all(19, "rank 0 of 3 ran out of memory")
        assert not second.end_all(19, "rank 1 of 3 ran out of memory")
    assert not ended
    ends = [lambda code, rank=rank: ended.append((rank, code)) for rank in (0, 2)]
    with Watchdog(0, 3, store, 4.0, end=ends[0]), Watchdog(2, 3, store, 4.0, end=ends[1]):
        deadline = time.monotonic() + 10
        while (0, 19) not in ended and time.monotonic() < deadline:
            time.sleep(0.05)
    assert ended[0] == (2, 19), "rank 0, whose process may hold the store, lets the others read first"
    assert (0, 19) in ended
    assert "rank 2: ended, for rank 0 of 3 ran out of memory" in capfd.readouterr().err


def test_a_model_that_does_not_fit_is_told_with_flags(corpus, capsys, monkeypatch):
    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("megafp8.training.build.build_model", no_memory)
    assert pretrain_gpt.main(flags(corpus, *SHORT)) == 2
    err = capsys.readouterr().err.strip()
    assert "do not fit in the memory of cpu" in err
    assert "most would save --" in err
    assert "\n" not in err


def test_a_page_or_snapshot_that_cannot_be_made_ends_no_run(tmp_path, capsys, monkeypatch):
    """A full disk, an allocator that refuses, a plan that fails: the line says so, and the exit stays what it was."""

    def refuses(*args):
        raise OSError("no space left")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", refuses)
    monkeypatch.setattr("megafp8.training.memory_watch.publish", refuses)
    logging = LoggingConfig(log_dir=str(tmp_path), record_memory_history=True)
    config = SimpleNamespace(logging=logging)
    parts = SimpleNamespace(config=config, parallel=ParallelContext(), device=torch.device("cuda"))
    watch = MemoryWatch(parts, print)
    watch.at_line()
    watch.at_line()
    assert watch.run_out(MemoryError("all"), 3, lambda code, reason: True).code == EXIT_OUT_OF_MEMORY
    err = capsys.readouterr().err
    assert err.count(f"no snapshot: {tmp_path / 'snapshot_rank0.pickle'}: OSError: no space left") == 1
    assert "rank 0 of 1 ran out of memory in iteration 3: all" in err
    assert "what is there now: not known, AttributeError at " in err
    assert "the plan: not known, AttributeError at " in err
    assert f"no snapshot: {tmp_path / 'snapshot_rank0_oom.pickle'}: OSError: no space left" in err
    assert "this page is in no file: no space left" in err


def test_a_graph_that_an_error_ended_is_counted_as_far_as_it_is_known():
    """PyTorch 2.11 takes the edges from a node whose forward failed."""

    class Ended:
        def __init__(self):
            self.tensor = torch.ones(64)

        @property
        def next_functions(self):
            raise RuntimeError("Attribute 'next_functions' is invalid")

    x = torch.ones(8, requires_grad=True)
    assert graph_bytes([Ended(), (x * x).grad_fn], _Storages()) == {END: 4 * 64 + 4 * 8}


def test_a_device_without_word_is_the_one_that_runs(corpus, tmp_path, capsys, monkeypatch):
    """--device auto on a CPU: nothing of a GPU's is planned."""

    def no_memory(*args):
        raise MemoryError

    monkeypatch.setattr(trainer.Trainer, "_iteration", no_memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv = flags(corpus, *SHORT, "--log-dir", str(tmp_path), "--device", "auto")
    with pytest.raises(SystemExit):
        run(*argv)
    err = capsys.readouterr().err
    assert "ran out of memory in iteration 1: MemoryError" in err
    (line,) = (line for line in err.splitlines() if line.startswith("  workspaces and tables "))
    assert " MiB" not in line, "cuBLAS's"


def test_what_a_gpu_says_of_others_is_left_out():
    said = "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 97.37"
    assert _what(torch.OutOfMemoryError(said)) == "CUDA out of memory. Tried to allocate 256.00 MiB."
    assert _what(torch.OutOfMemoryError("more\nlines")) == "more"


def test_a_signal_asks_for_the_page(corpus, tmp_path, capsys, monkeypatch):
    original = trainer.Trainer._iteration

    def asks(self, batches):
        if self.progress.iteration == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
        return original(self, batches)

    before = signal.getsignal(signal.SIGUSR2)
    monkeypatch.setattr(trainer.Trainer, "_iteration", asks)
    assert run(*flags(corpus, *SHORT, "--log-dir", str(tmp_path))) == 0
    (page,) = tmp_path.glob("memory_rank*.txt")
    assert page.name == "memory_rank0_iter2.txt"
    assert page.read_text() in capsys.readouterr().out
    assert "snapshot: only CUDA's allocator has one" in page.read_text()
    assert signal.getsignal(signal.SIGUSR2) is before
    assert len([json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]) == 4


def test_a_signal_before_the_iterations_ends_nothing(corpus, monkeypatch):
    """By default it would."""
    original, killed = build.build_parts, []

    def sends(*args):
        os.kill(os.getpid(), signal.SIGUSR2)
        return original(*args)

    previous = signal.signal(signal.SIGUSR2, lambda number, frame: killed.append(number))
    try:
        monkeypatch.setattr(build, "build_parts", sends)
        assert run(*flags(corpus, *SHORT)) == 0
        assert not killed
    finally:
        signal.signal(signal.SIGUSR2, previous)
