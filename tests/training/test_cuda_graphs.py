"""`--cuda-graph-impl local` without a GPU: what a graph would replay is what was recorded of PyTorch's operations."""

import pytest
import torch

from tests.training.graph_steps import GPT2, GRAPHS, LATENT, RECIPES, Run, addresses, build, differing, train
from tests.training.recorded_ops import RecordedOps
from tests.training.runs import flags, metrics, run, tensors, write_corpus

CPU = torch.device("cpu")
SMALL = {"num_layers": 2, "global_batch_size": 6}
MODELS = {
    "qk norms, window": {"qk_layernorm": True, "window_size": "7,0"},
    "gpt2": GPT2 | {"untie_embeddings_and_output_weights": False},
    "latent": LATENT | {"qk_layernorm": True},
}


def compare(values: dict, count: int = 3, **options) -> Run:
    """Asserts that runs with and without graphs leave the same bits; returns the one with graphs."""
    plain = train(SMALL | values, CPU, count, **options)
    graphs = train(SMALL | values | GRAPHS, CPU, count, recorder=RecordedOps, **options)
    assert graphs.graphs.layers, "nothing was recorded"
    assert differing(plain, graphs) == []
    return graphs


@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_leave_the_bits_of_calls(recipe):
    """Losses, gradients, masters, moments, weights, histories."""
    compare(RECIPES[recipe])


@pytest.mark.parametrize(
    ("model", "recipe"), [("qk norms, window", "tensorwise"), ("gpt2", "bf16"), ("latent", "blockwise")]
)
def test_every_kind_of_dense_layer(model, recipe):
    compare(RECIPES[recipe] | MODELS[model])


def test_one_microbatch_a_step_and_a_batch_that_grows():
    compare(RECIPES["blockwise"] | {"global_batch_size": 2})
    compare({"rampup_batch_size": (2, 2, 8), "train_iters": None, "train_samples": 100}, 5)


@pytest.mark.parametrize("recipe", ["blockwise", "delayed, primary"])
def test_a_linear_that_falls_back_and_returns(recipe):
    """Its layers' addresses are others then: all is recorded again."""
    recorded = []

    def after(run: Run) -> None:
        recorded.append(run.graphs and run.graphs.layers)
        runner = run.trainer._runner
        if len(run.steps) == 2:
            runner._fall_back({"layers.1.mlp.fc1"}, 2, "a test")
        if len(run.steps) == 4:
            runner._fallbacks.give_back(["layers.1.mlp.fc1"])

    compare(RECIPES[recipe], 5, after=after)
    first, second, third, fourth, fifth = recorded[5:]
    assert (bool(first), second is third, third is fourth, fourth is fifth) == (False, False, True, False)


def test_a_watched_or_traced_step_calls_its_layers(tmp_path):
    """The monitor's, one that runs again, one whose modules are marked: between steps from graphs."""
    monitor = {"fp8_monitor_interval": 3, "log_dir": str(tmp_path), "check_for_spiky_loss": True}
    profile = {"profile": True, "profile_step_start": 4, "profile_step_end": 5, "use_pytorch_profiler": True}
    recorders, replays = [], []

    def recorder(device: torch.device, meter) -> RecordedOps:
        recorders.append(RecordedOps(device, meter))
        return recorders[-1]

    def after(run: Run) -> None:
        replays.append(sum(recorder.replays for recorder in recorders))

    values = SMALL | RECIPES["blockwise"] | monitor | profile
    run = train(values | GRAPHS, CPU, 7, after=after, recorder=recorder)
    one_step = 2 * 2 * 3  # forward and backward, layers, microbatches
    assert replays == [0, *[one_step] * 5, 2 * one_step]  # watched: 3 and 6; traced, or warming up for it: 4 and 5
    assert differing(train(SMALL | RECIPES["blockwise"], CPU, 7), run) == []


@pytest.mark.parametrize(
    "recipe", ["blockwise", "tensorwise", "delayed", "mxfp8", "blockwise, primary", "delayed, primary"]
)
def test_what_graphs_read_stays_where_it_is(recipe):
    places = []
    values = SMALL | RECIPES[recipe] | GRAPHS
    train(values, CPU, 4, after=lambda run: places.append(addresses(run.trainer)), recorder=RecordedOps)
    assert places[1] == places[2] == places[3]


def test_evaluation_save_and_resume(tmp_path):
    """Through the command line, on the CPU's own recorder."""
    corpus = write_corpus(tmp_path)
    delayed = (*("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"), "--fp8-amax-history-len", "4")
    common = flags(corpus, *delayed, "--train-iters", "6", "--eval-interval", "3", "--eval-iters", "1")
    graphs = ("--cuda-graph-impl", "local", "--cuda-graph-scope", "full", "--cuda-graph-warmup-steps", "1")

    def job(name: str, *extra: str) -> None:
        directory = str(tmp_path / name)
        assert run(*common, "--log-dir", directory, "--save", directory, "--load", directory, *extra) == 0

    job("plain")
    job("graphs", *graphs, "--exit-interval", "4")
    job("graphs", *graphs)
    assert metrics(tmp_path / "graphs") == metrics(tmp_path / "plain")
    one, other = (tensors(tmp_path / name / "iter_0000006") for name in ("plain", "graphs"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one.keys() == other.keys()


def test_a_second_microbatch_in_flight_is_an_error():
    """Not a wrong gradient."""
    graphs = train(SMALL | GRAPHS, CPU, 2, recorder=RecordedOps).graphs
    layer, x = graphs.layers[0], torch.zeros(64, 64, dtype=torch.bfloat16)
    layer.replay_forward(x)
    with pytest.raises(AssertionError, match="room for one microbatch"):
        layer.replay_forward(x)


def test_graphs_are_gone_when_training_is(monkeypatch):
    """NCCL's groups can't be left while graphs hold their messages. Those that are recorded again free the others."""
    recorders = []

    def recorder(device: torch.device, meter) -> RecordedOps:
        recorders.append(RecordedOps(device, meter))
        return recorders[-1]

    trainer = build(SMALL | RECIPES["blockwise"] | GRAPHS | {"train_iters": 4, "eval_iters": 1}, CPU)
    monkeypatch.setattr(trainer._runner._graphs, "_recorder", recorder)
    monkeypatch.setattr(
        trainer.log, "advance", lambda i: i == 2 and trainer._runner._fall_back({"layers.1.mlp.fc1"}, 2, "a test")
    )
    assert trainer.run() == 0
    assert [each.released for each in recorders] == [True, True]
    assert all(each.replays for each in recorders)
    assert not trainer._runner._graphs.layers
