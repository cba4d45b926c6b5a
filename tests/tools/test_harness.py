"""An exported model in the hands of others: transformers, and lm-evaluation-harness where it is installed, find the
log-likelihood that tools/evaluate.py finds."""

import json
import math
from pathlib import Path

import convert_checkpoint
import evaluate
import preprocess_data
import pytest

from megafp8.data.arguments import run

ASSETS = Path(__file__).parents[1] / "assets"
MODEL = str(ASSETS / "stories260K" / "tok512.model")
STORY = (ASSETS / "tinystories_sample.txt").read_text().split("<|endoftext|>")[0].strip()[:900]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(directory of the Hugging Face model, JSONL with one story, what evaluate.py says of it)"""
    home = tmp_path_factory.mktemp("harness")
    save, hf, text = home / "stories", home / "hf", home / "story.jsonl"
    text.write_text(json.dumps({"text": STORY}) + "\n")
    stories = ("--bin", str(ASSETS / "stories260K" / "stories260K.bin"), "--tokenizer-model", MODEL, "--dtype", "fp32")
    assert convert_checkpoint.main(["from-llama2c", *stories, "--save", str(save)]) == 0
    assert convert_checkpoint.main(["to-hf", "--load", str(save), "--hf", str(hf)]) == 0
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", MODEL, "--prepend-bos")
    argv = ["--input", str(text), *tokenizer, "--output-prefix", str(home / "data"), "--workers", "1"]
    assert run(preprocess_data.main, argv) == 0
    sets = ["--valid-data-path", f"story={home / 'data_text_document'}", "--output", str(home / "r.json")]
    assert evaluate.main(["--load", str(save), *sets, "--device", "cpu"]) == 0
    return hf, text, json.loads((home / "r.json").read_text())["story"]


def test_transformers_sees_the_same_text_and_likelihood(exported):
    """What lm-evaluation-harness asks of a model: both classes load, ids are ours, so is the sum of log-likelihoods."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    hf, _, ours = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    model = transformers.AutoModelForCausalLM.from_pretrained(hf)
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(STORY, add_special_tokens=False).input_ids]])
    assert ids.shape[1] - 1 == ours["tokens"]
    with torch.no_grad():
        logp = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None]).sum().item()
    assert -logp / ours["tokens"] == pytest.approx(ours["loss"], rel=1e-5)
    assert ours["bytes"] == len(STORY.encode())
    assert ours["bits_per_byte"] == pytest.approx(-logp / math.log(2) / len(STORY.encode()), rel=1e-5)


def test_tokenizers_of_our_own_keep_their_ids(tmp_path):
    """They put no space before a text, and transformers must be told so."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import train_tokenizer

    from megafp8.checkpoint.hf.companions import export_tokenizer
    from megafp8.data.tokenizer import SentencePieceTokenizer

    source = ASSETS.parents[1] / "examples" / "data" / "tinyshakespeare.txt"
    argv = ["--input", str(source), "--vocab-size", "400", "--output-prefix", str(tmp_path / "tok")]
    assert run(train_tokenizer.main, argv) == 0
    own, target = str(tmp_path / "tok.model"), tmp_path / "hf"
    target.mkdir()
    assert export_tokenizer({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": own}, target)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(target), SentencePieceTokenizer(own)
    for text in ("To be, or not  to be\nthat", " leading", "naïve 東", "\n\nx"):
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)


TASK = """
task: story
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {path}}}}}
output_type: loglikelihood_rolling
validation_split: validation
doc_to_text: ""
doc_to_target: text
metric_list: [{{metric: bits_per_byte}}]
metadata: {{version: 1}}
"""


def test_lm_evaluation_harness(exported, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    from lm_eval.tasks import TaskManager

    hf, text, ours = exported
    (tmp_path / "story.yaml").write_text(TASK.format(path=text))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(hf), "dtype": "float32"},
        tasks=["story"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        batch_size=1,
    )
    assert results["results"]["story"]["bits_per_byte,none"] == pytest.approx(ours["bits_per_byte"], rel=1e-5)
