"""Flag lists in the manner of public Megatron-style launch scripts (assets/scripts), and what becomes of them."""

import math
from dataclasses import dataclass
from pathlib import Path

from megafp8.config import compat

ASSETS = Path(__file__).parent / "assets"

# Features that each list asks for and that are still to come.
SCRIPTS = {
    "llama3_8b_fp8": set(),
    "gpt3_175b": set(),
    "mixtral_8x7b": set(),
    "qwen3_30b_a3b": set(),
    "deepseek_v3": set(),
}


@dataclass(frozen=True)
class Mend:
    """What the user is told (the line has `flags` and `words`), and the change that then helps: `old` becomes `new`."""

    flags: str
    words: str
    old: str
    new: str = ""


LAYOUT = "--pipeline-model-parallel-layout"
# Flags that contradict our rules, in the order in which the user is told.
MENDS = {
    "llama3_8b_fp8": [
        Mend(
            "--fp8-amax-history-len 1024",
            "needs --fp8-recipe delayed",
            "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
        )
    ],
    "gpt3_175b": [Mend("--fp16", "use --bf16", "--fp16")],
    "mixtral_8x7b": [
        Mend(
            "--tokenizer-type Llama2Tokenizer",
            "use SentencePieceTokenizer",
            "Llama2Tokenizer",
            "SentencePieceTokenizer",
        )
    ],
    "qwen3_30b_a3b": [],
    "deepseek_v3": [
        Mend("--decoder-first-pipeline-num-layers", LAYOUT, "--decoder-first-pipeline-num-layers 4"),
        Mend("--decoder-last-pipeline-num-layers", LAYOUT, "--decoder-last-pipeline-num-layers 1"),
        Mend("--account-for-loss-in-pipeline-split", LAYOUT, "--account-for-loss-in-pipeline-split"),
        Mend(LAYOUT, "every m must be in the last stage", "(tt|)*29,m|L", "(tt|)*29|mL"),
    ],
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


def mended(name: str, count: int | None = None) -> str:
    """The script's flags as a user would have to change them today; after the first `count` mends."""
    mends = MENDS[name][:count]
    text = " ".join(without_not_yet(script(name)))
    for mend in mends:
        text = text.replace(mend.old, mend.new)
    return text


def processes(text: str) -> str:
    """The smallest job for a script's layout: WORLD_SIZE."""
    words = text.split()
    size = {name: int(words[words.index(name) + 1]) for name in words if name.endswith("-parallel-size")}
    tp, ep = size.get("--tensor-model-parallel-size", 1), size.get("--expert-model-parallel-size", 1)
    dense = tp * size.get("--context-parallel-size", 1)
    expert = ep * size.get("--expert-tensor-parallel-size", tp)
    return str(size.get("--pipeline-model-parallel-size", 1) * math.lcm(dense, expert))
