#!/usr/bin/env python3
"""A drill: one training job on the CPU through every fault there is, and the proof from its logs that nothing was lost.

    tools/fault_drill.py --output runs/drill

Two ranks under torchrun train a tiny model. On the way a gradient becomes NaN, a rank is killed, a rank falls behind
its collectives, the disk is full while a checkpoint is saved, and the newest checkpoint is damaged just before another
kill. Beside it runs a job that has only the NaN. In the end both must have the same losses in every iteration, and the
same tensors in their last checkpoints, bit for bit. Exit code 0: nothing was lost. Takes some minutes.

The full disk is a small tmpfs where one can be mounted (root), else a limit on the size of files.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ITERATIONS, SAVE_INTERVAL = 40, 4
LATE = 5.0  # seconds
NAN, KILL, DELAY, DISK, DAMAGE = 6, 11, 15, 20, 27
"""The iteration of each fault: DISK's is one that saves."""
ROOT = Path(__file__).resolve().parents[1]


def flags(data: Path, directory: Path) -> list[str]:
    """A tiny model's command line."""
    text = (
        "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu "
        "--disable-bias-linear --micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --lr-warmup-iters 3 --bf16 "
        "--fp8-format hybrid --fp8-recipe delayed --attention-dropout 0 --hidden-dropout 0.1 --eval-iters 1 "
        "--eval-interval 10 --tokenizer-type ByteTokenizer --num-workers 2 --log-interval 1 --device cpu "
        f"--train-iters {ITERATIONS} --save-interval {SAVE_INTERVAL} --load-fallback"
    )
    saving = ["--log-dir", str(directory), "--save", str(directory / "c"), "--load", str(directory / "c")]
    return [*text.split(), "--data-path", str(data), "--split", "80,20,0", *saving]


class Faults:
    """What happens to one rank; each fault once in the job, whatever restarts there are."""

    def __init__(self, directory: Path, rank: int, names: set[str]) -> None:
        self.directory, self.rank, self.names = directory, rank, names

    def strikes(self, name: str, *, rank: int | None = None) -> bool:
        """Whether the fault is due on this rank: then it never is again."""
        if name not in self.names or (rank is not None and rank != self.rank):
            return False
        mark = self.directory / f"struck-{name}-{self.rank}"
        if mark.exists():
            return False
        mark.touch()
        return True

    def before(self, optimizer, batches) -> None:
        """At the start of an iteration."""
        iteration = batches.iteration
        optimizer.spoil = iteration == NAN and self.rank == 1 and "nan" in self.names
        if iteration == KILL and self.strikes("kill", rank=1):
            os.kill(os.getpid(), signal.SIGKILL)
        if iteration == DELAY and self.strikes("delay", rank=0):
            batches.source = after(LATE, batches.source)
        if iteration == DAMAGE and self.rank == 0 and self.strikes("damage"):
            damage_newest(self.directory / "c")
            os.kill(os.getpid(), signal.SIGKILL)


def after(seconds: float, source: Iterator) -> Iterator:
    """`source`, that late."""
    time.sleep(seconds)
    yield from source


def damage_newest(save: Path) -> None:
    """Flips a byte in the middle of every file of tensors of the newest checkpoint."""
    newest = max(save.glob("iter_*"))
    for file in newest.glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        file.write_bytes(raw)


def run_rank(directory: Path, names: set[str], argv: list[str]) -> int:
    """One rank of the job, with the faults planted."""
    import torch

    import pretrain_gpt
    from megafp8.optimizer import Optimizer
    from megafp8.training.iteration import IterationRunner
    from megafp8.training.trainer import Trainer

    faults = Faults(directory, int(os.environ["RANK"]), names)
    iterate, reduce, save = IterationRunner.run, Optimizer.reduce_gradients, Trainer._save

    def run(self, batches, samples):
        faults.before(self._parts.optimizer, batches)
        return iterate(self, batches, samples)

    def reduce_gradients(self):
        if self.spoil:
            self.grads.state.views["layers.0.mlp.fc1.weight"][0, 0] = torch.nan
        reduce(self)

    def full_disk(self):
        if self.progress.iteration != DISK or not faults.strikes("disk"):
            return save(self)
        return with_full_disk(directory / "c", lambda: save(self))

    IterationRunner.run, Optimizer.reduce_gradients, Trainer._save = run, reduce_gradients, full_disk
    return pretrain_gpt.main(argv)


def with_full_disk(place: Path, act) -> None:
    """Runs `act` while nothing fits on the disk: that is filled, if it is a small one of its own, else files may not
    grow."""
    if os.path.ismount(place):
        filler = place / f"filler-{os.getpid()}"
        try:
            with filler.open("wb", buffering=0) as stream:
                while stream.write(b"\0" * 4096):
                    pass
        except OSError:
            pass
        try:
            act()
        finally:
            filler.unlink(missing_ok=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        act()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, previous)


def start_job(directory: Path, data: Path, names: list[str], log: Path) -> int:
    """The job under torchrun, in the foreground; returns its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts"]
    command += ["4", __file__, "--output", str(directory), "--rank-with", ",".join(names), *flags(data, directory)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with log.open("w") as out:
        return subprocess.run(command, env=env, stdout=out, stderr=subprocess.STDOUT, check=False).returncode


def write_data(directory: Path) -> Path:
    """Bytes of this repository's own sources, as documents in Megatron's format."""
    import numpy as np

    from megafp8.data import IndexedDatasetBuilder

    with IndexedDatasetBuilder(directory / "data", np.uint16) as builder:
        for path in sorted((ROOT / "megafp8").rglob("*.py"))[:60]:
            builder.add_document(np.array([*path.read_bytes()[:400], 256]))
    return directory / "data"


def tensors_of(checkpoint: Path) -> dict:
    from safetensors.torch import load_file

    return {name: value for file in sorted(checkpoint.glob("*.safetensors")) for name, value in load_file(file).items()}


def check(drill: Path, calm: Path, log: str) -> list[tuple[bool, str]]:
    """(holds, claim) of all that must be true of the two jobs' logs and checkpoints."""
    import torch

    from megafp8.training.run_log import read_metrics

    (mine, valid), (theirs, valid_calm) = read_metrics(drill), read_metrics(calm)
    events = [json.loads(line) for line in (drill / "events.jsonl").read_text().splitlines()]
    last = f"iter_{ITERATIONS:07d}"
    one, other = tensors_of(drill / "c" / last), tensors_of(calm / "c" / last)
    number = ["lm_loss", "grad_norm", "skipped", "consumed_samples", "learning_rate"]
    lines, lines_calm = ([[str(line[n]) for n in number] for line in x] for x in (mine, theirs))
    return [
        ([line["iteration"] for line in mine] == list(range(1, ITERATIONS + 1)), "every iteration is in the log"),
        ([line["iteration"] for line in mine if line["skipped"]] == [NAN], "only the NaN's step was skipped"),
        (any(event["event"] == "nonfinite" and event["iteration"] == NAN for event in events), "the NaN was told"),
        (log.count("resumed from") >= 2, "after both kills the job went on by itself"),
        (f"could not save iteration {DISK}" in log, "the full disk was told, and didn't end the job"),
        ("--load-fallback: " in log and " is damaged: " in log, "the damaged checkpoint was told, and passed over"),
        (
            any(line["data_ms"] > 900 * LATE for line in mine) and "slow data: rank 0" in log,
            "the late rank is in the log",
        ),
        (lines == lines_calm, "losses, norms, samples and rates are those of the job without these faults"),
        ([v["valid_loss"] for v in valid] == [v["valid_loss"] for v in valid_calm], "validation losses as well"),
        (one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one), "the last checkpoint as well"),
    ]


def drill(output: Path) -> int:
    output.mkdir(parents=True, exist_ok=True)
    hit, calm = output / "drill", output / "calm"
    for directory in (hit, calm):
        (directory / "c").mkdir(parents=True, exist_ok=True)
    data = write_data(output)
    small = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "drill", hit / "c"], capture_output=True, check=False
    )
    try:
        codes = [
            start_job(calm, data, ["nan"], output / "calm.log"),
            start_job(hit, data, ["nan", "kill", "delay", "disk", "damage"], output / "drill.log"),
        ]
        print(
            f"exit codes: {codes[0]} calm, {codes[1]} drill; disk: {'tmpfs' if small.returncode == 0 else 'file limit'}"
        )
        claims = [] if any(codes) else check(hit, calm, (output / "drill.log").read_text())
    finally:
        if small.returncode == 0:
            subprocess.run(["umount", hit / "c"], check=False)
    for holds, claim in claims:
        print(f"{'ok  ' if holds else 'LOST'} {claim}")
    return 0 if claims and all(holds for holds, _ in claims) else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="empty or new directory")
    parser.add_argument("--rank-with", metavar="NAMES", help=argparse.SUPPRESS)  # torchrun starts ranks so
    args, rest = parser.parse_known_args(argv)
    if args.rank_with is not None:
        return run_rank(args.output, set(args.rank_with.split(",")), rest)
    if rest or (args.output.exists() and any(args.output.iterdir())):
        print(f"fault_drill.py: error: --output {args.output} takes one directory, empty or new", file=sys.stderr)
        return 2
    return drill(args.output)


if __name__ == "__main__":
    sys.exit(main())
