"""Which layers each pipeline stage holds: from the flags to a list of stages that is the whole model, or a ValueError.

Rank r of `pp` holds the stages r, r + pp, r + 2 pp, ... as its chunks (one chunk without virtual stages). The embedding
is on the first stage, the final norm, the LM head, multi-token prediction and the loss on the last one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from megafp8.config.model import ModelConfig
from megafp8.config.parallel import ParallelConfig

LAYOUT = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class Stage:
    """A run of layers (global numbers from 0), and whether the model's input and output ends belong to it."""

    layers: tuple[int, ...]
    embedding: bool
    loss: bool

    def __str__(self) -> str:
        layers = f"layers {self.layers[0]}-{self.layers[-1]}" if self.layers else "no layers"
        return ", ".join(["embedding"] * self.embedding + [layers] + ["loss"] * self.loss)


@lru_cache(maxsize=1 << 12)
def pipeline_stages(m: ModelConfig, p: ParallelConfig) -> tuple[Stage, ...]:
    """All stages of the model, in order; a multiple of the pipeline-parallel size.

    Raises ValueError, in one line with the mend, when the flags don't give every layer to exactly one stage.
    """
    counts = _explicit(m, p) if p.pipeline_model_parallel_layout else _dealt(m, p)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    assert sum(counts) == m.num_layers, counts
    return tuple(
        Stage(tuple(range(start, start + count)), i == 0, i == len(counts) - 1)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
    )


def stages_of_rank(stages: tuple[Stage, ...], size: int, rank: int) -> tuple[Stage, ...]:
    """The chunks of one of `size` pipeline ranks."""
    return stages[rank::size]


def chunks_per_rank(m: ModelConfig, p: ParallelConfig) -> int:
    """Virtual stages of a rank. Raises ValueError as `pipeline_stages` does."""
    return len(pipeline_stages(m, p)) // p.pipeline_model_parallel_size


def _dealt(m: ModelConfig, p: ParallelConfig) -> list[int]:
    """Layers of each stage: alike, but for first and last ranks of a given size, and ends that count as a layer."""
    size, total = p.pipeline_model_parallel_size, m.num_layers
    first, last = p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers
    given = {rank: n for rank, n in ((0, first), (size - 1, last)) if n is not None}
    ends = p.account_for_embedding_in_pipeline_split, p.account_for_loss_in_pipeline_split
    rest, ranks = total - sum(given.values()) + sum(ends), size - len(given)
    if rest < 0 or (ranks == 0 and rest) or (ranks and rest % ranks):
        raise ValueError(_uneven(m, p, rest, ranks))
    per_rank = [given.get(rank, rest // ranks if ranks else 0) for rank in range(size)]
    chunks = _virtual(p, per_rank)
    for rank, n in enumerate(per_rank):
        if n % chunks:
            raise ValueError(
                f"{_virtual_flag(p)}: the {n} layers of pipeline rank {rank} don't make {chunks} virtual stages alike; "
                f"change it, or lay the stages out by {LAYOUT}"
            )
    counts = [per_rank[stage % size] // chunks for stage in range(size * chunks)]
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    if min(counts[0], counts[-1]) < 0:
        raise ValueError(
            f"--num-layers {total} is too few for --pipeline-model-parallel-size {size} with an end that counts as a "
            "layer; drop --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split"
        )
    return counts


def _uneven(m: ModelConfig, p: ParallelConfig, rest: int, ranks: int) -> str:
    flags = [f"--num-layers {m.num_layers}", f"--pipeline-model-parallel-size {p.pipeline_model_parallel_size}"]
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if getattr(p, name) is not None:
            flags.append(f"--{name.replace('_', '-')} {getattr(p, name)}")
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if getattr(p, name):
            flags.append(f"--{name.replace('_', '-')}")
    return (
        f"{', '.join(flags)}: {rest} layers (an end that is accounted for is one) can't be dealt evenly to {ranks} "
        f"rank(s); change one of them, set --decoder-first-pipeline-num-layers, or lay the stages out by {LAYOUT}"
    )


def _virtual_flag(p: ParallelConfig) -> str:
    if p.num_virtual_stages_per_pipeline_rank is not None:
        return f"--num-virtual-stages-per-pipeline-rank {p.num_virtual_stages_per_pipeline_rank}"
    return f"--num-layers-per-virtual-pipeline-stage {p.num_layers_per_virtual_pipeline_stage}"


def _virtual(p: ParallelConfig, per_rank: list[int]) -> int:
    """Virtual stages of each rank."""
    size, count = p.num_layers_per_virtual_pipeline_stage, p.num_virtual_stages_per_pipeline_rank
    if size is not None and count is not None:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {size} and --num-virtual-stages-per-pipeline-rank {count} say "
            "the same in two ways; leave one out"
        )
    if size is None:
        return count or 1
    if any(n % size for n in per_rank):
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {size} does not divide the layers of each pipeline rank, "
            f"{', '.join(map(str, per_rank))}; change it, or lay the stages out by {LAYOUT}"
        )
    if len({n // size for n in per_rank}) > 1:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {size} gives ranks with {', '.join(map(str, per_rank))} layers "
            "different numbers of virtual stages; use --num-virtual-stages-per-pipeline-rank"
        )
    return per_rank[0] // size


def _explicit(m: ModelConfig, p: ParallelConfig) -> list[int]:
    """Layers of each stage as `--pipeline-model-parallel-layout` writes them, e.g. `Et*3|(tt|)*6tL`.

    Stages end at |; E is the embedding, t a layer, m a depth of multi-token prediction, L the loss; x*3 is xxx, (...)
    groups, commas do nothing.
    """
    text = p.pipeline_model_parallel_layout
    stages = _expanded(text).split("|")
    size, shown = p.pipeline_model_parallel_size, f"{LAYOUT} {text!r}"
    letters = "".join(stages)
    wanted = "E" + "t" * m.num_layers + "m" * (m.mtp_num_layers or 0) + "L"
    if letters != wanted:
        count = letters.count("t")
        if count != m.num_layers:
            raise ValueError(f"{shown} has {count} layers (t), --num-layers is {m.num_layers}; make them agree")
        raise ValueError(
            f"{shown}: give E first, then the layers t, then m for each of --mtp-num-layers {m.mtp_num_layers or 0}, "
            "and L last"
        )
    if not stages[0] or stages[0][0] != "E" or "L" not in stages[-1]:
        raise ValueError(f"{shown}: the first stage must start with E, and the last one must end with L")
    if any("m" in stage for stage in stages[:-1]):
        raise ValueError(f"{shown}: every m must be in the last stage, where the loss is; move it there")
    if len(stages) % size:
        raise ValueError(
            f"{shown} has {len(stages)} stages, which is no multiple of --pipeline-model-parallel-size {size}; "
            "add or join stages"
        )
    if empty := [r for r in range(size) if not "".join(stages[r::size])]:
        raise ValueError(f"{shown} gives pipeline rank {empty[0]} nothing at all; give it a layer")
    return [stage.count("t") for stage in stages]


def _expanded(text: str) -> str:
    """`text` without commas and spaces, groups and repetitions written out. Raises ValueError for other letters."""
    plain = re.sub(r"[,\s]", "", text)
    if unknown := re.search(r"[^EtmL|()*0-9]", plain):
        raise ValueError(f"{LAYOUT} {text!r}: {unknown[0]!r} is none of E t m L | ( ) * and digits; leave it out")
    pattern = re.compile(r"(?:\(([^()]*)\)|([EtmL|]))\*(\d+)|\(([^()]*)\)")
    while found := pattern.search(plain):
        group, letter, times, alone = found.groups()
        body = alone if times is None else (letter or group) * int(times)
        if len(plain) + len(body) > 100_000:
            raise ValueError(f"{LAYOUT} {text!r} writes out more than 100,000 letters; lower its repetitions")
        plain = plain[: found.start()] + body + plain[found.end() :]
    if re.search(r"[()*0-9]", plain):
        raise ValueError(f"{LAYOUT} {text!r}: brackets and *N don't fit together; write e.g. Et*3|(tt|)*6tL")
    return plain
