"""Times the saving of a state: at once, and in the background beside work; how long the work stands still for it.

    python tools/bench_checkpoint.py --save /mnt/ckpt --size-gb 1                 # on a GPU, where there is one
    python tools/bench_checkpoint.py --save /tmp/ckpt --size-gb 0.1 --device cpu

The work is a loop of matrix products whose steps take `--step-ms` alone. What a save costs it is all time beyond that:
planning, the copy to host memory, slower steps while the copy is written, and publishing. Checksums are timed by
themselves and as their share of a write. All times are seconds; GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import time
import zlib
from pathlib import Path

import torch

from megafp8.checkpoint import BackgroundSaver, CheckpointWriter, load_checkpoint, save_checkpoint, tensor_file
from megafp8.params import StateItem

TENSOR_BYTES = 16 << 20


def make_items(size: int, device: torch.device) -> dict[str, StateItem]:
    """`size` bytes of FP32 tensors of 16 MiB, as large as an optimizer's."""
    count = max(1, size // TENSOR_BYTES)
    shape = (TENSOR_BYTES // 4 // 1024, 1024)
    return {f"optimizer/master/{i}": StateItem.whole(torch.randn(shape, device=device)) for i in range(count)}


class Work:
    """A loop whose steps take about so many seconds."""

    def __init__(self, step_s: float, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        n = 4096 if self._cuda else 512
        self._a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if self._cuda else torch.float32)
        self._count = 1
        for _ in range(3):
            self._count = max(1, round(self._count * step_s / self.step()))

    def step(self) -> float:
        start = time.perf_counter()
        for _ in range(self._count):
            torch.mm(self._a, self._a)
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def timed_save(save: Path, items: dict[str, StateItem], iteration: int) -> float:
    start = time.perf_counter()
    if save_checkpoint(save, iteration, items, {}) is None:
        sys.exit(f"--save {save}: the save failed")
    return time.perf_counter() - start


def background(saver: BackgroundSaver, save: Path, items: dict[str, StateItem], iteration: int, work: Work) -> dict:
    """One save beside work."""
    alone = statistics.median(work.step() for _ in range(20))
    begin = time.perf_counter()
    saver.start(CheckpointWriter(save, iteration), items)
    started = time.perf_counter()
    steps = []
    while not saver.written:
        steps.append(work.step())
    written = time.perf_counter()
    saver.finish()
    end = time.perf_counter()
    slower = sum(steps) - alone * len(steps)
    stalled = (started - begin) + slower + (end - written)
    return {
        "start": started - begin,
        "slower steps": slower,
        "publish": end - written,
        "stalled": stalled,
        "write": end - begin,
        "stalled / write": stalled / (end - begin),
        "steps beside it": len(steps),
    }


def checksum_gb_per_s(nbytes: int) -> float:
    block = memoryview(bytearray(torch.randint(256, (tensor_file.BLOCK,), dtype=torch.uint8).numpy().tobytes()))
    start = time.perf_counter()
    for _ in range(nbytes // len(block)):
        zlib.crc32(block)
    return nbytes // len(block) * len(block) / (time.perf_counter() - start) / 1e9


def without_checksum(save: Path, items: dict[str, StateItem], iteration: int) -> float:
    """A save whose files have no checksums."""

    class Plain(tensor_file.ChecksumWriter):
        def write(self, data) -> None:
            self._stream.write(data)
            self.size += len(data)

    kept, tensor_file.ChecksumWriter = tensor_file.ChecksumWriter, Plain
    try:
        return timed_save(save, items, iteration)
    finally:
        tensor_file.ChecksumWriter = kept


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, required=True, metavar="DIR", help="A directory that isn't there yet.")
    parser.add_argument("--size-gb", type=float, default=1.0, metavar="X", help="Size of the state (default: 1).")
    parser.add_argument("--step-ms", type=float, default=20.0, metavar="X", help="A step of the work (default: 20).")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="Saves of each kind (default: 3).")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.save.exists():
        parser.error(f"--save {args.save}: is there already; name a new directory")
    logging.basicConfig(level=logging.WARNING)
    device = torch.device(args.device)
    items = make_items(int(args.size_gb * 1e9), device)
    size = sum(item.tensor.nbytes for item in items.values())
    print(f"{size / 1e9:.2f} GB in {len(items)} tensors on {device}")
    print(f"checksum: {checksum_gb_per_s(size):.2f} GB/s")
    try:
        run(args, items, size, device)
    finally:
        shutil.rmtree(args.save, ignore_errors=True)
    return 0


def run(args: argparse.Namespace, items: dict[str, StateItem], size: int, device: torch.device) -> None:
    iterations = iter(range(1, 10**6))
    for name, action in (("save at once", timed_save), ("without checksums", without_checksum)):
        times = [action(args.save, items, next(iterations)) for _ in range(args.repeats)]
        print(f"{name}: " + " ".join(f"{t:.3f}" for t in times) + f" s, {size / 1e9 / min(times):.2f} GB/s")
        directory = args.save / f"iter_{args.repeats:07d}"
    start = time.perf_counter()
    load_checkpoint(directory, items)
    print(f"load: {time.perf_counter() - start:.3f} s")
    work = Work(args.step_ms / 1e3, device)
    saver = BackgroundSaver(device=device)
    start = time.perf_counter()
    saver.prepare(items)
    print(f"host memory: {time.perf_counter() - start:.3f} s, once")
    for _ in range(args.repeats):
        result = background(saver, args.save, items, next(iterations), work)
        print("in the background: " + ", ".join(f"{k} {v:.4g}" for k, v in result.items()))


if __name__ == "__main__":
    sys.exit(main())
