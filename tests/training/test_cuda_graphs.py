"""`--cuda-graph-impl local` without a GPU: what a graph would replay is what was recorded of PyTorch's operations."""

import pytest
import torch

from tests.training.graph_steps import GRAPHS, RECIPES, addresses, build, differing, train
from tests.training.recorded_ops import RecordedOps

CPU = torch.device("cpu")
SMALL = {"num_layers": 2, "global_batch_size": 6}


@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_leave_the_bits_of_calls(recipe):
    plain = train(SMALL | RECIPES[recipe], CPU, 3)
    run = train(SMALL | RECIPES[recipe] | GRAPHS, CPU, 3, recorder=RecordedOps)
    assert len(run.graphs.layers) == 2
    assert differing(plain, run) == []
