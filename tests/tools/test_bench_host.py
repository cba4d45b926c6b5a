"""tools/bench_host.py on ranks of layouts: what a layer launches there does not grow unseen."""

import json

import bench_host
import host_ranks
import pytest
import torch

from megafp8.meter import Meter

# layout -> of blockwise: operations, kernels and products, collectives, at most
MOST = {
    "tp2": (6, 21, 10),
    "tp2-overlap": (22, 35, 34),
    "ep2": (14, 43, 5),
    "ep2-fp8": (16, 44, 5),
}


@pytest.mark.parametrize("layout", MOST)
def test_what_a_rank_launches(layout, tmp_path):
    path = tmp_path / "found"
    before = torch.Tensor.is_cuda, torch.mm, torch.nn.functional.rms_norm
    options = ["--repeats", "1", "--warmup", "2", "--profile", "3", "--output", str(path)]
    assert bench_host.main(["--layouts", layout, "--recipes", "blockwise", *options]) == 0
    (found,) = json.loads(path.read_text()).values()
    operations, others, collectives = MOST[layout]
    assert 0 < found["operations"] <= operations
    assert 0 < found["kernels"] + found["products"] <= others
    assert found["collectives"] == collectives
    assert found["calls"] > 1000
    assert found["ms"] > 0
    assert (torch.Tensor.is_cuda, torch.mm, torch.nn.functional.rms_norm) == before


def test_bf16_has_no_other_collectives(tmp_path):
    path = tmp_path / "found"
    options = ["--repeats", "1", "--warmup", "2", "--output", str(path)]
    assert bench_host.main(["--layouts", "tp2", "ep2", "ep2-fp8", "--recipes", "bf16", *options]) == 0
    found = json.loads(path.read_text())
    assert {name: record["collectives"] for name, record in found.items()} == {"tp2 bf16": 10, "ep2 bf16": 5}


def test_operations_are_counted_where_they_are_called():
    """Views and allocations are none; what is called outside of the package is nobody's."""
    x = torch.ones(4, 4)

    def run() -> None:
        (x.t().expand(2, 4, 4).reshape(8, 4) + torch.empty(8, 4)).sum()

    found = host_ranks.launched_by(run, Meter(), host_ranks.Counter())
    assert found.operations == {"clone at autograd": 1, "add at autograd": 1, "sum at autograd": 1}
    assert found.totals() == {"operations": 3, "kernels": 0, "products": 0, "collectives": 0}
