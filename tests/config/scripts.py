"""Flag lists in the manner of public Megatron-style launch scripts (assets/scripts), and what becomes of them."""

from pathlib import Path

from megafp8.config import compat

ASSETS = Path(__file__).parent / "assets"

# Features that each list asks for and that are still to come.
SCRIPTS = {
    "llama3_8b_fp8": {"profiling", "FP8 primary weights"},
    "gpt3_175b": {"pipeline parallelism", "a batch size that grows"},
    "mixtral_8x7b": {"expert parallelism", "pipeline parallelism", "Weights & Biases"},
    "qwen3_30b_a3b": {"expert parallelism", "FP8 primary weights"},
    "deepseek_v3": {
        *("capacity, forced balance and FP8 dispatch of experts", "pipeline parallelism"),
        *("expert parallelism", "FP8 primary weights", "Weights & Biases"),
        "optimizer state below FP32",
    },
}
# Flags that contradict our rules; the message that the user gets, and the mend that the test then makes.
MENDS = {
    "llama3_8b_fp8": {"--fp8-amax-history-len 1024": "needs --fp8-recipe delayed"},
    "gpt3_175b": {"--fp16": "use --bf16"},
    "mixtral_8x7b": {"--tokenizer-type Llama2Tokenizer": "use SentencePieceTokenizer"},
    "qwen3_30b_a3b": {"--tensor-model-parallel-size 2": "not yet"},
    "deepseek_v3": {"--recompute-modules mla_up_proj": "not yet"},
}
REPLACE = {
    "--fp16": "",
    "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max": "",
    "Llama2Tokenizer": "SentencePieceTokenizer",
    "--tensor-model-parallel-size 2": "",
    "--recompute-modules mla_up_proj mlp moe_act": "--recompute-modules mlp",
}


def script(name: str) -> str:
    lines = (ASSETS / "scripts" / f"{name}.txt").read_text().splitlines()
    return " ".join(line for line in lines if not line.startswith("#"))


def without_not_yet(text: str) -> list[str]:
    """The script's flags without those whose feature is still to come."""
    kept: list[str] = []
    keep = True
    for word in text.split():
        if word.startswith("--"):
            keep = compat.verdict(word) not in ("not yet", "refused")
        if keep:
            kept.append(word)
    return kept


def mended(name: str) -> str:
    """The script's flags as a user would have to change them today."""
    text = " ".join(without_not_yet(script(name)))
    for old, new in REPLACE.items():
        text = text.replace(old, new)
    return text
