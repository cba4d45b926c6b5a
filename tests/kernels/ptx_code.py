"""PTX as the emulator reads it: instructions, which method executes each, and arithmetic that needs no registers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Instruction(NamedTuple):
    """`@predicate opcode.parts operands`"""

    predicate: str
    parts: list[str]
    operands: list[str]


@functools.cache
def parse(ptx: str) -> tuple[list[Instruction], dict[str, int], list[str], int]:
    """(instructions, label -> index, parameter names, threads a program) of a module with one kernel."""
    header, _, rest = ptx[ptx.index(".entry") :].partition("{")
    parameters = re.findall(r"(\w+_param_\d+)", header)
    threads = int(re.search(r"\.reqntid\s+(\d+)", header).group(1))
    text = re.sub(r"//[^\n]*", "", rest[: rest.index("// -- End function")])
    text = re.sub(r"^\s*\.loc[^\n]*", "", text, flags=re.M)
    text = re.sub(r"(\$L\w+):", r"label \1;", text)
    program: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in text.split(";"):
        # Braces around inline assembly open a scope, those inside an operand list make a vector.
        statement = re.sub(r"^[{}\s]+", "", " ".join(statement.split()))
        if statement.startswith("label"):
            labels[statement.split()[1]] = len(program)
        elif statement and not statement.startswith("."):
            match = re.match(r"(?:@(!?%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)$", statement)
            operands = re.findall(r"[^,{}\[\]\s][^,{}\[\]]*|\{[^}]*\}|\[[^\]]*\]", match.group(3))
            program.append(Instruction(match.group(1) or "", match.group(2).split("."), [o.strip() for o in operands]))
    return program, labels, parameters, threads


def _truncated_quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return np.where((a < 0) != (b < 0), -quotient, quotient)


BY_NAME = {
    "ld": "load",
    "st": "store",
    "ldmatrix": "matrix",
    "stmatrix": "matrix",
    "mov": "move",
    "setp": "compare",
    "selp": "select",
    "shfl": "shuffle",
    "cvt": "convert",
    "prmt": "permute_bytes",
    "atom": "atomic",
    "vote": "ballot",
    "popc": "count_bits",
    "redux": "reduce_warp",
}
FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda a, b, c: a.astype(np.float64) * b + c,
    "max": lambda *v: np.fmax(np.fmax(v[0], v[1]), v[-1]),
    "min": lambda *v: np.fmin(np.fmin(v[0], v[1]), v[-1]),
    "abs": np.abs,
    "neg": np.negative,
    "div": np.divide,
    "sqrt": np.sqrt,
    "rcp": lambda a: np.float32(1) / a,
    "ex2": lambda a: np.where(a < -126, 0, np.exp2(a.astype(np.float64))),
}
SHORT = {("mul", "bf16"), ("add", "bf16"), ("abs", "f16x2")}  # what is done in 16 bits
INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "min": np.minimum,
    "max": np.maximum,
    "div": _truncated_quotient,
    "rem": lambda a, b: a - _truncated_quotient(a, b) * b,
}


@functools.cache
def handlers(ptx: str) -> list[str]:
    """By instruction, the name of the method that executes it."""
    return [_handler(instruction) for instruction in parse(ptx)[0]]


def _handler(instruction: Instruction) -> str:
    name, last = instruction.parts[0], instruction.parts[-1]
    if name in BY_NAME or name in ("bra", "ret", "bar"):
        return BY_NAME.get(name, "")
    if last == "pred":
        return "logic"
    if (last in ("f32", "f64", "bf16x2") and name in FLOATS) or (name, last) in SHORT:
        return "arithmetic"
    if re.fullmatch(r"[bus]\d+", last) and (name in INTEGERS or name in ("shl", "shr", "bfe")):
        return "integer"
    raise NotImplementedError(".".join(instruction.parts))
