"""Loading tensors from a checkpoint into any layout.

Everything is checked before the first element is written: names, shapes, dtypes, boxes, and the checksums of the files
that are needed. Then each tensor is read by slices of the parts that hold it. Ranks find damage together: each sums up
its share of the files, and what one finds is raised on all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from megafp8.checkpoint.planner import BoxLoadPlanner
from megafp8.checkpoint.ranks import agreed, known_to_any, spread
from megafp8.checkpoint.storage import CheckpointReader
from megafp8.checkpoint.strictness import STRICT, Strictness
from megafp8.parallel import ParallelContext
from megafp8.params import StateItem, name_of

ONE_RANK = ParallelContext()


def load_checkpoint(
    directory: Path,
    wanted: Mapping[str, StateItem],
    *,
    optional: Sequence[str] = (),
    ignored: Sequence[str] = (),
    elsewhere: Collection[str] = (),
    sources: Mapping[str, str] | None = None,
    strictness: Strictness = STRICT,
    allow_narrowing: bool = False,
    parallel: ParallelContext = ONE_RANK,
) -> dict[str, Tensor]:
    """Fills `wanted[name].tensor` in place from the checkpoint in `directory`, whatever layout it was saved in.

    Args:
        directory: of one checkpoint (`.../iter_0000100`).
        wanted: global name (of several parts: `params.part_key`) -> destination, e.g. the owners' `state()`; any
            device.
        optional: prefixes of names that the checkpoint may lack; what it lacks is left untouched.
        ignored: prefixes of names that the checkpoint may have without being wanted.
        elsewhere: names that are wanted by others, whom `parallel` doesn't know.
        sources: name -> another name of the checkpoint to take its values from.
        strictness: what to make of other names that are on one side alone.
        allow_narrowing: also load floating-point tensors into a dtype that rounds them.
        parallel: the ranks that load together; every one calls it.

    Returns the tensors that were filled, by name, for the owners' `load_state()`.

    Raises, on every rank:
        DamagedFileError (a ValueError): a file is missing, cut short or changed; the line names it.
        ValueError: names are missing or unexpected, or a shape or dtype doesn't fit; nothing has been written.
    """
    reader = CheckpointReader(directory, verify=False)
    planner = BoxLoadPlanner(directory, sources=sources, allow_narrowing=allow_narrowing)
    metadata = agreed(parallel, reader.read_metadata)
    names = sorted(metadata.state_dict_metadata)
    known = known_to_any(parallel, names, {name_of(key) for key in wanted} | set(elsewhere))

    def plan() -> LoadPlan:
        unexpected = [n for n in names if n not in known and not n.startswith(tuple(ignored))]
        strictness.judge(directory, _missing(wanted, metadata, optional, sources or {}), unexpected)
        planner.set_up_planner(wanted, metadata, parallel.is_first)
        reader.set_up_storage_reader(metadata, parallel.is_first)
        return planner.create_local_plan()

    mine = planner.finish_plan(agreed(parallel, plan))
    _check_sums(reader, mine, parallel)
    mine = agreed(parallel, lambda: reader.prepare_local_plan(mine))
    agreed(parallel, lambda: reader.read_data(mine, planner).wait())
    return planner.filled


def _missing(
    wanted: Mapping[str, StateItem], metadata: Metadata, optional: Sequence[str], sources: Mapping[str, str]
) -> list[str]:
    names = {name_of(key) for key in wanted}
    lacking = (n for n in names if sources.get(n, n) not in metadata.state_dict_metadata)
    return sorted(n for n in lacking if not n.startswith(tuple(optional)))


def _check_sums(reader: CheckpointReader, plan: LoadPlan, parallel: ParallelContext) -> None:
    """Every file that some rank needs is summed up by one rank. Raises DamagedFileError on all ranks."""
    needed = known_to_any(parallel, sorted(reader.files), reader.needed(plan))
    sizes = {file: reader.files[file].size for file in needed}
    share = spread(sizes, parallel.world_size)[parallel.rank]
    agreed(parallel, lambda: reader.check_sums(share))
