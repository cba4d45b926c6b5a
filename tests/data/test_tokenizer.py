"""Tokenizers: round trips, ids of special tokens, fingerprints, mistakes."""

import base64
import json
import shutil
from dataclasses import replace

import pytest

from megafp8.data import build_tokenizer
from megafp8.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, TikTokenizer
from tests.data.helpers import ASSETS, SHAKESPEARE, data_flags

TEXTS = [
    "",
    "Hello world",
    "  two  blanks\n\nand lines\t",
    "naïve café — 東京 🙂",
    "a" * 3000,
    "\u200b\x00zero",
    "</s> <s> <|endoftext|>",
]
GPT2 = {
    "tokenizer_type": "GPT2BPETokenizer",
    "vocab_file": str(ASSETS / "gpt2" / "vocab.json"),
    "merge_file": str(ASSETS / "gpt2" / "merges.txt"),
}


def sentencepiece_model(path, eos=True, vocab_size=400, extra=()):
    import sentencepiece

    specials = {"bos_id": 1, "eos_id": 2} if eos else {"bos_id": -1, "eos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        input=str(SHAKESPEARE),
        model_prefix=str(path),
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        input_sentence_size=2000,
        user_defined_symbols=list(extra),
        minloglevel=2,
        **specials,
    )
    return f"{path}.model"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {
        "eos": sentencepiece_model(directory / "eos"),
        "no-eos": sentencepiece_model(directory / "no-eos", eos=False),
        "piece": sentencepiece_model(directory / "piece", eos=False, extra=("<|endoftext|>",)),
    }


def huggingface_directory(path, eos="<|end_of_text|>", bos="<|begin_of_text|>"):
    """A byte-level BPE in the style of Llama 3: GPT-2's words, BOS put in front by a post-processor."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    backend = Tokenizer(models.BPE.from_file(GPT2["vocab_file"], GPT2["merge_file"]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|begin_of_text|>", "<|end_of_text|>")])
    begin = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
    )
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    config = {"eos_token": eos, "bos_token": {"content": bos} if bos else None}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def tiktoken_file(path, words=("he", "ll", "hell", "hello", " w")):
    tokens = [bytes([i]) for i in range(256)] + [w.encode() for w in words]
    path.write_text(
        json.dumps(
            [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
        )
    )
    return str(path)


@pytest.fixture
def every(models, tmp_path):
    flags = {
        "byte": {},
        "gpt2": GPT2,
        "sentencepiece": {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": models["eos"]},
        "huggingface": {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(huggingface_directory(tmp_path / "hf")),
        },
        "tiktoken": {"tokenizer_type": "TikTokenizer", "tokenizer_model": tiktoken_file(tmp_path / "tik.json")},
    }
    return {name: build_tokenizer(data_flags(**values)) for name, values in flags.items()}


def test_round_trips(every):
    """Any text comes back; ids are in range; neither BOS nor EOD comes in, even where a text spells them out
    (CASES 73: exactly one EOD a document is the tool's to add)."""
    for name, tokenizer in every.items():
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text, name
            assert all(0 <= i < tokenizer.vocab_size for i in ids), name
            assert tokenizer.eod not in ids, name
            assert tokenizer.bos is None or tokenizer.bos not in ids, name
            assert tokenizer.decode([*ids, tokenizer.eod]) == text, name
        assert [list(ids) for ids in tokenizer.encode_batch(TEXTS)] == [tokenizer.encode(t) for t in TEXTS], name
        assert tokenizer.decode([tokenizer.vocab_size + 5]) == "", name  # padded rows of the vocabulary


def test_special_ids(every):
    expected = {
        "byte": (257, 256, None),
        "gpt2": (50257, 50256, None),
        "huggingface": (50259, 50258, 50257),
        "sentencepiece": (400, 2, 1),
        "tiktoken": (1261, 2, 1),
    }
    assert {name: (t.vocab_size, t.eod, t.bos) for name, t in every.items()} == expected


def test_gpt2_counts(every):
    """The published count for this text."""
    assert len(every["gpt2"].encode(SHAKESPEARE.read_text())) == 338_025


def test_against_transformers(every, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    text = SHAKESPEARE.read_text()[:20_000] + "".join(TEXTS[:-1])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "hf" / "tokenizer.json"))
    assert every["huggingface"].encode(text) == theirs.encode(text, add_special_tokens=False)
    assert every["huggingface"].vocab_size == len(theirs)


def test_against_megatrons_tiktoken(tmp_path):
    theirs = pytest.importorskip(
        "megatron.core.tokenizers.text.libraries.tiktoken_tokenizer", reason="megatron-core is not installed"
    )
    path = tiktoken_file(tmp_path / "tik.json")
    for pattern in ("v1", "v2"):
        megatron = theirs.TikTokenTokenizer(path, pattern=pattern, vocab_size=1261)
        ours = TikTokenizer(path, pattern)
        text = "hello world, hell 2024 \n\n naïve"
        assert ours.encode(text) == megatron.text_to_ids(text)
        assert (ours.eod, ours.bos, ours.vocab_size) == (megatron.eod, megatron.bos_id, megatron.vocab_size)


def test_tiktoken_options(tmp_path):
    path = tiktoken_file(tmp_path / "tik.json")
    small = TikTokenizer(path, num_special_tokens=10, vocab_size=268)
    assert (small.vocab_size, small.encode("hello")) == (268, [266, 267, ord("o") + 10])
    named = TikTokenizer(path, special_tokens=["<pad>", "</s>", "<s>", "<unk>", "<mask>", "<cls>", "<sep>", "<mine>"])
    assert (named.eod, named.bos) == (1, 2)
    for options, message in (
        ({"pattern": "v3"}, "--tiktoken-pattern v3: choose v1 or v2"),
        ({"vocab_size": 5000}, "--vocab-size 5000: .*serves 1256 to 1261 ids"),
        ({"special_tokens": ["<s>"]}, "--tiktoken-special-tokens <s>: <unk> is missing"),
        ({"num_special_tokens": 3}, "--tiktoken-num-special-tokens 3: there are 7 named ones"),
    ):
        with pytest.raises(ValueError, match=message):
            TikTokenizer(path, **options)


def test_sentencepiece_without_eos(models):
    """CASES 73: a model without EOS serves, but what needs an EOD is a clear error; a piece that is named like one
    counts as one."""
    plain = SentencePieceTokenizer(models["no-eos"])
    assert (plain.eod, plain.bos) == (None, None)
    assert plain.decode(plain.encode("To be, or not")) == "To be, or not"
    with pytest.raises(ValueError, match="--append-eod: this SentencePieceTokenizer has no end-of-document token"):
        plain.require_eod("--append-eod")
    assert SentencePieceTokenizer(models["piece"]).eod is not None
    assert SentencePieceTokenizer(models["eos"]).require_eod("--append-eod") == 2


def test_huggingface_files(tmp_path):
    """A directory, or the tokenizer.json itself; the configuration decides on EOS and BOS, names are the fallback."""
    directory = huggingface_directory(tmp_path / "a")
    whole, bare = (HuggingFaceTokenizer(str(path)) for path in (directory, directory / "tokenizer.json"))
    assert whole.eod == bare.eod == 50258
    (directory / "tokenizer_config.json").unlink()
    assert HuggingFaceTokenizer(str(directory)).eod == 50256  # <|endoftext|>, the first name that is there
    assert HuggingFaceTokenizer(str(huggingface_directory(tmp_path / "b", eos=None))).eod is None
    with pytest.raises(ValueError, match="its eos_token '<nope>' is not in its vocabulary"):
        HuggingFaceTokenizer(str(huggingface_directory(tmp_path / "c", eos="<nope>")))


def test_huggingface_hub(tmp_path, monkeypatch):
    """A hub name is fetched through the hub's cache; without network that is one clear line."""
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    directory = huggingface_directory(tmp_path / "a")
    monkeypatch.setattr(hub, "hf_hub_download", lambda repo, file: str(directory / file))
    assert HuggingFaceTokenizer("org/model").eod == 50258

    def offline(*_):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(hub, "hf_hub_download", offline)
    with pytest.raises(ValueError, match="--tokenizer-model org/model: no such path, and .*no network") as error:
        HuggingFaceTokenizer("org/model")
    assert "\n" not in str(error.value)


def test_added_tokens_count(tmp_path):
    """CASES 72: 65000 base ids and 1000 added ones: the vocabulary is 66000, and the last id round-trips."""
    from tokenizers import AddedToken, Tokenizer, models

    vocabulary = {f"w{i}": i for i in range(65_000)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.add_tokens([AddedToken(f"<new{i}>") for i in range(1000)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 66_000
    assert tokenizer.encode("<new999>") == [65_999]
    assert tokenizer.decode([65_999]) == "<new999>"


def test_fingerprints(models, tmp_path):
    """Equal for equal content wherever it lies, different for everything that changes ids."""

    def of(**values):
        return build_tokenizer(data_flags(**values)).fingerprint

    copy = shutil.copy(models["eos"], tmp_path / "copy.model")
    piece = {"tokenizer_type": "SentencePieceTokenizer"}
    assert of(**piece, tokenizer_model=models["eos"]) == of(**piece, tokenizer_model=str(copy))
    null = {"tokenizer_type": "NullTokenizer"}
    a, b = (huggingface_directory(tmp_path / name, eos=eos) for name, eos in (("a", "<|end_of_text|>"), ("b", None)))
    face = {"tokenizer_type": "HuggingFaceTokenizer"}
    different = [
        of(),
        of(**GPT2),
        of(**piece, tokenizer_model=models["eos"]),
        of(**piece, tokenizer_model=models["piece"]),
        of(**null, vocab_size=10),
        of(**null, vocab_size=11),
        of(**face, tokenizer_model=str(a)),
        of(**face, tokenizer_model=str(b)),
    ]
    assert len(set(different)) == len(different)


def test_null_tokenizer():
    tokenizer = build_tokenizer(data_flags(tokenizer_type="NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode("5 99\n0") == [5, 99, 0]
    assert tokenizer.decode([5, 99, 100, 0]) == "5 99 0"
    for text, message in (("5 100", "outside --vocab-size 100"), ("five", "reads numbers only")):
        with pytest.raises(ValueError, match=message):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("Llama2Tokenizer", "use SentencePieceTokenizer"),
        ("GPTSentencePieceTokenizer", "use SentencePieceTokenizer"),
        ("BertWordPieceLowerCase", "use GPT2BPETokenizer"),
        ("MultimodalTokenizer", "use HuggingFaceTokenizer"),
        ("NoSuchTokenizer", "choose one of ByteTokenizer"),
        (None, "choose one of ByteTokenizer"),
    ],
)
def test_other_types_are_refused_with_the_mend(name, mend):
    with pytest.raises(ValueError, match=f"--tokenizer-type.*{mend}"):
        build_tokenizer(data_flags(tokenizer_type=name))


def test_file_mistakes(tmp_path, models):
    """One line that names the flag, for files that are missing or of another kind."""
    (tmp_path / "junk").write_text("{]")
    (tmp_path / "empty").mkdir()
    llama2 = tmp_path / "llama2"
    llama2.mkdir()
    shutil.copy(models["eos"], llama2 / "tokenizer.model")
    junk, missing = str(tmp_path / "junk"), str(tmp_path / "missing")
    cases = [
        ("SentencePieceTokenizer", None, "--tokenizer-model: not given"),
        ("SentencePieceTokenizer", missing, "--tokenizer-model .*missing: no such file"),
        ("SentencePieceTokenizer", junk, "--tokenizer-model .*junk: not a SentencePiece model"),
        ("SentencePieceTokenizer", str(llama2), "llama2: a directory; it names a SentencePiece .model file"),
        ("TikTokenizer", str(llama2), "llama2: a directory; it names a JSON vocabulary"),
        ("HuggingFaceTokenizer", junk, "--tokenizer-model .*junk: junk can't be read"),
        ("HuggingFaceTokenizer", missing, "--tokenizer-model .*missing: no such file"),
        ("HuggingFaceTokenizer", str(tmp_path / "empty"), "has no tokenizer.json"),
        ("HuggingFaceTokenizer", str(llama2), "use --tokenizer-type SentencePieceTokenizer with its tokenizer.model"),
        ("TikTokenizer", junk, "--tokenizer-model .*junk: not a JSON list"),
        ("TikTokenizer", models["eos"], "not a JSON list"),
    ]
    for kind, model, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            build_tokenizer(data_flags(tokenizer_type=kind, tokenizer_model=model))
        assert "\n" not in str(error.value)
    flags = data_flags(**GPT2)
    for changed, message in (
        (replace(flags, vocab_file=None), "--vocab-file: not given"),
        (replace(flags, merge_file=missing), "--merge-file .*missing: no such file"),
        (replace(flags, vocab_file=junk), "--vocab-file .*junk.*can't be read"),
    ):
        with pytest.raises(ValueError, match=message):
            build_tokenizer(changed)
    for size in (None, 0):
        with pytest.raises(ValueError, match="--vocab-size .*NullTokenizer needs it"):
            build_tokenizer(data_flags(tokenizer_type="NullTokenizer", vocab_size=size))
