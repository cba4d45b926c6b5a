"""Layers replayed from CUDA graphs leave the bits that calling them leaves: losses, gradients, weights, histories."""

import gc

import pytest
import torch

from tests.training.graph_steps import GPT2, GRAPHS, LATENT, RECIPES, Run, addresses, differing, train

CUDA = torch.device("cuda")
SMALL = {"hidden_size": 256, "ffn_hidden_size": 512, "seq_length": 128}
WIDE = {"hidden_size": 1024, "ffn_hidden_size": 1536, "num_attention_heads": 8, "seq_length": 512}
WIDE |= {"fp8_small_linears": "fp8"}
MODELS = {
    "qk norms": {"qk_layernorm": True},
    "window": {"window_size": "31,0"},
    "gpt2": GPT2,
    "latent": LATENT
    | {
        "qk_layernorm": True,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_head_dim": 64,
        "qk_pos_emb_head_dim": 32,
        "v_head_dim": 64,
    },
}


@pytest.fixture
def deterministic(monkeypatch):
    """cuDNN's attention, the fastest, adds gradients up in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield {"deterministic_mode": True}
    torch.use_deterministic_algorithms(False)


def compare(flags: dict, count: int = 3, after=lambda run: None) -> Run:
    """Asserts that runs with and without graphs leave the same bits; returns the one with graphs."""
    plain, run = (train(flags | more, CUDA, count, after=after) for more in ({}, GRAPHS))
    assert run.graphs.layers, "nothing was recorded"
    found = differing(plain, run)
    losses = [[step["loss"].item() for step in each.steps] for each in (plain, run)]
    assert not found, f"{len(found)} tensors differ, the first {found[:6]}; losses {losses}"
    return run


@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_calls(deterministic, recipe):
    compare(SMALL | deterministic | RECIPES[recipe], 4)


def test_bits_of_wider_layers(deterministic):
    compare(WIDE | deterministic | RECIPES["blockwise"])


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("qk norms", "blockwise"),
        ("window", "bf16"),
        ("gpt2", "delayed"),
        ("latent", "blockwise"),
    ],
)
def test_every_kind_of_dense_layer(deterministic, model, recipe):
    compare(SMALL | deterministic | RECIPES[recipe] | MODELS[model])


@pytest.mark.parametrize("recipe", ["bf16", "blockwise", "delayed"])
def test_losses_with_the_fastest_attention(recipe):
    """At a learning rate of 0 they don't depend on gradients, whose bits differ from run to run."""
    flags = SMALL | {"lr": 0.0} | RECIPES[recipe]
    plain, again, run = (train(flags | more, CUDA, 3) for more in ({}, {}, GRAPHS))
    assert run.graphs.layers
    losses = [[step["loss"].item() for step in each.steps] for each in (plain, again, run)]
    assert losses[0] == losses[2], losses
    off = [name for name in plain.steps[2] if name.startswith("main_grad") and not close(plain, run, name)]
    assert not off, (off[:4], f"{len(differing(plain, again))} tensors differ between two runs without graphs")


def close(a: Run, b: Run, name: str) -> bool:
    x, y = a.steps[2][name].double(), b.steps[2][name].double()
    return bool((x - y).norm() <= 0.02 * x.norm() + 1e-12)


@pytest.mark.parametrize("recipe", ["blockwise", "delayed, primary"])
def test_a_linear_that_falls_back_and_returns(deterministic, recipe):
    def after(run: Run) -> None:
        runner = run.trainer._runner
        if len(run.steps) == 2:
            runner._fall_back({"layers.1.mlp.fc1", "layers.3.attention.proj"}, 2, "a test")
        if len(run.steps) == 4:
            runner._fallbacks.give_back(["layers.1.mlp.fc1"])

    compare(SMALL | deterministic | RECIPES[recipe], 6, after)


def test_watched_steps_run_between(deterministic, tmp_path):
    watched = {"fp8_monitor_interval": 3, "log_dir": str(tmp_path), "check_for_spiky_loss": True}
    compare(SMALL | deterministic | RECIPES["blockwise"] | watched, 5)


def test_one_microbatch_a_step_and_overlap(deterministic):
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    compare(SMALL | deterministic | RECIPES["delayed, primary"] | overlap | {"global_batch_size": 2})


@pytest.mark.parametrize("recipe", ["blockwise", "delayed, primary"])
def test_what_graphs_read_stays_where_it_is(recipe):
    places = []
    train(SMALL | RECIPES[recipe] | GRAPHS, CUDA, 4, after=lambda run: places.append(addresses(run.trainer)))
    assert places[1] == places[2] == places[3]


def test_nothing_more_is_held_with_every_step_and_microbatch():
    """The first run loads libraries, whose workspaces stay."""
    held, kept = [], []

    def after(run: Run) -> None:
        run.steps.clear()
        held.append(torch.cuda.memory_allocated())

    for batch in (4, 4, 16):
        gc.collect()
        kept.append(torch.cuda.memory_allocated())
        train(WIDE | RECIPES["blockwise"] | GRAPHS | {"global_batch_size": batch}, CUDA, 4, after=after)
    few, many = (torch.tensor(held[4 * i + 1 : 4 * i + 4]) - kept[i] for i in (1, 2))
    found = " ".join(f"{x / 2**20:.1f}" for x in (*kept, *held))
    assert max(*few, *many) - min(*few, *many) < 2**20, found
    assert kept[2] - kept[1] < 2**20, found


def test_counters_are_zero_at_every_replay():
    """Zeros that are filled many at a time would be somebody's counts when a graph meets them again."""
    from megafp8.kernels.zeros import zeros  # Triton is not everywhere

    device = torch.device("cuda", torch.cuda.current_device())
    zeros(4, torch.int32, device)  # there are more where this came from
    found, graph = torch.empty(4, dtype=torch.int32, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.copy_(zeros(4, torch.int32, device).add_(1))
    for _ in range(3):
        graph.replay()
    assert found.tolist() == [1] * 4
