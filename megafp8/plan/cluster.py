"""What a cluster offers: GPUs, their memory and peaks, and the links between them; from a TOML or JSON file."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cluster:
    """Of one GPU, links in one direction; peaks are dense.

    reserved_gib: of its memory, what PyTorch's tensors can't have: CUDA context, kernels, NCCL, fragmentation.
    efficiency: part of the links' bandwidth that collectives reach. Latencies: of a step of a collective.
    """

    name: str
    gpus_per_node: int
    memory_gib: float
    reserved_gib: float
    fp32_tflops: float
    bf16_tflops: float
    fp8_tflops: float
    hbm_gb_per_s: float
    nvlink_gb_per_s: float
    network_gb_per_s: float
    multiprocessors: int = 132
    efficiency: float = 0.8
    nvlink_latency_us: float = 5.0
    network_latency_us: float = 10.0

    @property
    def usable_bytes(self) -> int:
        """What a rank's tensors may take."""
        return int((self.memory_gib - self.reserved_gib) * 2**30)


def read_cluster(path: str | Path) -> Cluster:
    """Returns the cluster that a file describes.

    Raises:
        ValueError: one line that names the file and what is wrong with it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"--cluster {path}: {error.strerror}; see examples/clusters") from None
    except ValueError as error:  # TOML's, JSON's and UTF-8's
        raise ValueError(f"--cluster {path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--cluster {path}: holds no table; see examples/clusters")
    return _checked(path, values)


def _checked(path: Path, values: dict) -> Cluster:
    fields = {field.name: field for field in dataclasses.fields(Cluster)}
    for name, value in values.items():
        if name not in fields:
            raise ValueError(f"--cluster {path}: unknown key {name}; keys are {', '.join(fields)}")
        if name == "name":
            if not isinstance(value, str):
                raise ValueError(f"--cluster {path}: name = {value!r} must be text")
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"--cluster {path}: {name} = {value!r} must be a number above 0")
        if fields[name].type == "int" and int(value) != value:
            raise ValueError(f"--cluster {path}: {name} = {value} must be a whole number")
    missing = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in values]
    if missing:
        raise ValueError(f"--cluster {path}: {missing[0]} is missing; add it")
    cluster = Cluster(**values)
    if cluster.usable_bytes <= 0:
        raise ValueError(f"--cluster {path}: reserved_gib {cluster.reserved_gib} is all of memory_gib; lower it")
    return cluster
