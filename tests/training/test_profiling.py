"""--profile: a trace that viewers open, with spans of every phase and module, and nothing left behind."""

import gzip
import json
from threading import Thread, get_ident

import pytest
import torch

from megafp8.config import build_config, with_vocab_size
from megafp8.core.gpt import build_model
from megafp8.fp8 import Linear
from megafp8.lone import fake_parallel
from megafp8.training import trainer
from megafp8.training.profiling import Marks, global_names, mark_modules
from tests.training.runs import RECIPES, flags, run, write_corpus

TINY = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 1,
    "lr": 1e-3,
    "train_iters": 1,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,
    "mock_data": True,
    "position_embedding_type": "rope",
}
SHORT = ("--train-iters", "4", "--eval-iters", "0", "--log-interval", "4")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def model_of(rank: int = 0, **changes):
    world = changes.get("pipeline_model_parallel_size", 1)
    config = build_config(env={"WORLD_SIZE": str(world)}, **(TINY | changes))
    config = with_vocab_size(config, 256)
    with fake_parallel(config, rank) as parallel:
        return build_model(config, parallel, "meta")


def test_modules_carry_their_global_names():
    for model in (model_of(), model_of(1, pipeline_model_parallel_size=2)):
        names = global_names(model)
        linears = {module.name: names[module] for module in model.modules() if isinstance(module, Linear)}
        head = {"lm_head.weight": "lm_head", "embedding.word_embeddings.weight": "lm_head"}  # named by its weight
        assert linears == {name: head.get(name, name) for name in linears}
    assert "layers.3.mlp.fc2" in linears
    assert "layers.1.mlp.fc2" not in linears


def test_marks_are_taken_back():
    model = model_of()
    before = {module: dict(vars(module)) for module in model.modules()}
    restore = mark_modules(model, Marks(torch.device("cpu")))
    assert {module: dict(vars(module)) for module in model.modules()} != before
    restore()
    assert {module: dict(vars(module)) for module in model.modules()} == before


def test_the_trace_has_every_phase_module_and_operator(corpus, tmp_path, capsys):
    more = ("--profile", "--profile-step-start", "1", "--profile-step-end", "2", "--log-dir", str(tmp_path))
    assert run(*flags(corpus, *SHORT, *RECIPES["blockwise"], *more)) == 0
    out = capsys.readouterr().out
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "rank0_iter2-2.pt.trace.json.gz"
    assert f"profile: {file}" in out
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    spans = {}
    for event in complete:
        if event["cat"] == "user_annotation":
            spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    for layer in range(2):
        for part in ("attention.qkv", "attention.core", "attention.proj", "mlp.fc1", "mlp.fc2"):
            for name in (f"layers.{layer}.{part}", f"backward layers.{layer}.{part}"):
                assert len(spans[name]) == 2, f"{name}: two microbatches"
        assert f"layers.{layer}.input_norm" in spans, "inside of a linear"
    for name in ("embedding.word_embeddings", "final_norm", "lm_head", "all-grads-sync", "optimizer"):
        assert name in spans
    assert set(spans) >= {"iteration 2", "batch-generator microbatch 1"}
    assert not set(spans) & {"iteration 1", "iteration 3"}
    (outer, *_), inner = spans["forward-compute microbatch 0 stage 0"], spans["layers.1.mlp.fc2"][0]
    assert outer[0] <= inner[0] <= inner[1] <= outer[1]
    (outer, *_), inner = spans["backward-compute microbatch 0 stage 0"], spans["backward layers.0.mlp.fc1"][0]
    assert outer[0] <= inner[0] <= inner[1] <= outer[1]
    operators = [event for event in complete if event["cat"] == "cpu_op"]
    assert any(event["name"] == "aten::rms_norm" for event in operators)


def test_spans_of_backward_begin_and_end_on_autograds_thread(monkeypatch):
    """A GPU has one of its own; here a thread that calls backward stands for it. Spans of a thread nest."""
    spans, ends = {}, []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: spans.setdefault(get_ident(), []).append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ends.append((get_ident(), spans[get_ident()].pop())))
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    marks, own = Marks(torch.device("cuda")), []

    def backward(loss):
        own.append(get_ident())
        loss.backward()
        assert not spans[get_ident()], "the last one ends with the graph"

    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        for name, part in module.named_children():
            with marks(name):
                x = part(x)
            x.register_hook(lambda grad, name=name: marks.begin_backward(name))
        with marks("backward-compute"):
            thread = Thread(target=backward, args=(x.sum(),))
            thread.start()
            thread.join()
    here = get_ident()
    per_step = [(here, "0"), (here, "1"), (None, "backward 1"), (None, "backward 0"), (here, "backward-compute")]
    assert ends == [(thread or number, name) for number in own for thread, name in per_step]
    x = torch.ones(2, requires_grad=True)
    y = module[0](x)
    y.register_hook(lambda grad: marks.begin_backward("0"))
    x.register_hook(_breaks)
    with pytest.raises(RuntimeError, match="planted"), marks("backward-compute"):
        y.sum().backward()
    assert ends[-2:] == [(here, "backward 0"), (here, "backward-compute")]


def _breaks(grad):
    raise RuntimeError("planted")


def test_a_run_that_ends_early_leaves_what_there_was_and_others_nothing(corpus, tmp_path, capsys, monkeypatch):
    """Iterations beyond the end are named, and a run that ends when all is warm; an error leaves a trace."""
    argv = flags(corpus, *SHORT, "--profile", "--log-dir", str(tmp_path))
    assert run(*argv, "--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")) == 0
    assert "--profile: iterations 11 to 12 will not run, only 1 to 4; nothing is traced" in capsys.readouterr().out
    assert run(*argv, "--load", str(tmp_path / "save")) == 0
    out = capsys.readouterr().out
    assert "nothing left to train" in out
    assert "profile" not in out
    assert run(*argv, "--profile-step-start", "2", "--profile-step-end", "3", "--exit-interval", "2") == 0
    assert "the run ended before the first iteration to be traced" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()

    (tmp_path / "profile").touch()
    assert run(*argv, "--profile-step-start", "0", "--profile-step-end", "1") == 0, "nowhere to write ends no run"
    (tmp_path / "profile").unlink()

    original = trainer.Trainer._iteration

    def breaks(self, batches):
        if self.progress.iteration == 2:
            raise RuntimeError("planted")
        return original(self, batches)

    monkeypatch.setattr(trainer.Trainer, "_iteration", breaks)
    with pytest.raises(RuntimeError, match="planted"):
        run(*argv, "--profile-step-start", "0", "--profile-step-end", "4")
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["rank0_iter1-3.pt.trace.json.gz"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--profile-step-end", "10", "--log-dir", "x"), "is not after --profile-step-start 10"),
        (("--profile-ranks", "0", "1", "--log-dir", "x"), "--profile-ranks 1: the job's ranks are 0 to 0"),
        ((), "add --log-dir"),
    ],
)
def test_mistakes(corpus, capsys, given, words):
    assert run(*flags(corpus, "--profile", *given)) == 2
    assert words in capsys.readouterr().err
