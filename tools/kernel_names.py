"""What the names in a profiler's list say: a kernel's class, a name for people, and whether the ledger knows of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from megafp8.plan.conversions import Conversion

CLASSES = {
    "communication": ("nccl",),
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated", "attention", "cudnn::fusion"),
    "optimizer": ("adamw", "squares_kernel", "grids_kernel", "scales_kernel"),
    "loss": ("loss_rows", "loss_grad"),
    "heads": ("heads_kernel", "heads_grad_kernel", "turn_tails", "keys_and_values"),
    "norm": ("norm_rows", "norm_tiles", "norm_both", "norm_grad", "sum_rows", "layer_norm", "rms_norm", "gammabeta"),
    "activation": ("swiglu", "silu", "gelu"),
    "quantize": ("quantize", "cast_kernel", "amax_kernel", "transpose_kernel", "grouped_kernel", "blockwise_to"),
    "gemm": ("gemm", "cutlass", "nvjet", "xmma", "matmul", "splitk", "::mm", "addmm", "bmm", "grouped_mm"),
    "copies": ("memcpy", "memset", "copy", "fill", "zero"),
}
"""Words in the names of kernels, by class; the first class that has one. With quantization fused, RMSNorm is `norm` and
SwiGLU is `activation`: `quantize` is what runs for nothing else, as `cast` is of PyTorch's copies."""
ORDER = (
    *("gemm", "attention", "quantize", "cast", "norm", "activation", "loss", "elementwise", "copies", "optimizer"),
    *("heads", "communication"),
)
STANDALONE = ("quantize", "cast")
"""Classes of kernels that change formats and do nothing else."""
MOVES = (
    *("cast", "copy", "quantize", "transpose", "convert", "memcpy", "memset", "amax", "grouped_kernel", "regroup"),
    *("fillfunctor", "mulfunctor", "where_kernel"),
)
"""Words in the names of kernels that change formats, move or fill bytes, or scale them, and do no other arithmetic."""
SMALL_US = 5.0
"""Launches that take less are bookkeeping: scalars, flags and counters. In that time 10 MB move at most."""


def kernel_class(name: str) -> str:
    lower = name.lower()
    if _casts(lower):
        return "cast"
    found = next((kind for kind, words in CLASSES.items() if any(word in lower for word in words)), "elementwise")
    # torch.compile puts copies into kernels that do more, and all that they do into their names.
    return "elementwise" if found == "copies" and lower.startswith("triton_") else found


def _casts(lower: str) -> bool:
    """Whether it is one of PyTorch's copies from one format to another."""
    copies = "direct_copy" in lower and "withcast" in lower
    return copies or any(word in lower for word in ("float16_copy_kernel", "float32_copy_kernel", "float8_copy_kernel"))


def short(name: str) -> str:
    """A kernel's name for people: of PyTorch's what they compute, without the rest of the template."""
    if name.startswith("_ZN"):
        return _demangled(name)
    name = name.replace("(anonymous namespace)::", "").replace("at::native::", "").removeprefix("void ")
    if "elementwise_kernel<" not in name:
        reduced = re.search(r"(\w+_functor|\w+Ops)\b(?=<)", name) if name.startswith("reduce_kernel") else None
        plain = re.split(r"[<(]", name)[0].strip()
        return f"{plain} {reduced[1]}" if reduced else plain
    wrapped = None  # BinaryFunctor<operands' and result's types, what it computes<in which type>>
    for operation, of in re.findall(r"(\w*Functor\w*)<(?:c10::)?(\w+)", name):
        if not re.fullmatch(r"(Binary|[AB]?Unary)Functor", operation):
            return f"{operation}<{wrapped or of}>"
        wrapped = of
    found = re.search(r"\b(?!gpu_)(\w+?)(?:<(?:[^<>]|<[^<>]*>)*>)?\(at::TensorIter", name)
    operands = re.search(r"\{lambda\((\w[^()]*)\)#", name)
    what = found[1] if found else "elementwise_kernel"
    cast = " with cast" if _casts(name.lower()) else ""
    return what + (f"({operands[1]})" if operands else "") + cast


def _demangled(name: str) -> str:
    """The qualified name in a mangled one, which is too long for the profiler to demangle it."""
    parts, rest = [], name.removeprefix("_ZN")
    while length := re.match(r"\d+", rest):
        start, end = length.end(), length.end() + int(length[0])
        parts.append(rest[start:end])
        rest = rest[end:]
    return "::".join(parts)


@dataclass
class Unlisted:
    """passes: short name -> [launches, ms] of what converts or moves bytes and has no entry in the ledger. small: the
    same of PyTorch's launches that are too short to matter. Of one call."""

    passes: dict[str, list[float]] = field(default_factory=dict)
    small: list[float] = field(default_factory=lambda: [0.0, 0.0])


def unlisted(launches: Iterable[tuple[str, float]], ledger: list[Conversion], microbatches: int = 1) -> Unlisted:
    """launches: (name, ms) of every kernel of a step of so many microbatches. Where entries allow a number of launches
    of a name that others have too, those beyond it are named."""
    free = {word for entry in ledger if entry.launches is None for word in entry.kernels}
    counted = [entry for entry in ledger if entry.launches is not None]
    allowed = {word: microbatches * sum(e.launches for e in counted if word in e.kernels)
               for entry in counted for word in entry.kernels}  # fmt: skip
    found = Unlisted()
    for name, ms in launches:
        lower = name.lower()
        computes = kernel_class(name) in ("gemm", "attention", "communication")
        if computes or lower.startswith("triton_") or any(word in lower for word in free):
            continue
        if 1e3 * ms < SMALL_US and ("at::native" in name or lower.startswith("mem")):
            _add(found.small, ms)
        elif any(word in short(name).lower() for word in MOVES):
            word = next((word for word in allowed if word in lower), None)
            if word is not None and allowed[word] > 0:
                allowed[word] -= 1
            else:
                _add(found.passes.setdefault(short(name), [0.0, 0.0]), ms)
    return found


def _add(entry: list[float], ms: float) -> None:
    entry[0] += 1
    entry[1] += ms
