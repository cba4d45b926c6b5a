"""Flags whose values are small expressions: which layers are of a kind, and attention windows.

Megatron-LM evaluates such lists as Python; here only lists, whole numbers, `+` and `*` are understood.
"""

import ast
from functools import cache

LONGEST = 100_000
"""Longest list that an expression may make."""


@cache
def layer_pattern(flag: str, text: str, layers: int) -> tuple[bool, ...]:
    """Returns which of `layers` layers are marked by `text`.

    Args:
        flag: option string, for messages.
        text: `N`: the first and every N-th after it; or a list expression of zeros and ones, e.g. `[0]*3+[1]*58`.

    Raises:
        ValueError: neither a positive number nor a list of `layers` zeros and ones.
    """
    value = _evaluate(flag, text)
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"{flag} {text}: give 1 or more, or a list such as [0]*3+[1]*58")
        return tuple(i % value == 0 for i in range(layers))
    if any(item not in (0, 1) for item in value):
        raise ValueError(f"{flag} {text}: the list must hold zeros and ones")
    if len(value) != layers:
        raise ValueError(f"{flag} {text} is for {len(value)} layers, not --num-layers {layers}; make them equal")
    return tuple(map(bool, value))


def left_window(text: str) -> int:
    """Returns the keys before its own that a token sees, from `LEFT,0` (brackets around it are allowed).

    Raises:
        ValueError: not of that form, or a window to the right.
    """
    parts = [part.strip() for part in text.strip().strip("()[]").split(",")]
    if len(parts) != 2 or not all(part.lstrip("-").isdigit() for part in parts):
        raise ValueError(f"--window-size {text}: give the keys before and after a token, e.g. 4095,0")
    left, right = map(int, parts)
    if left < 0 or right != 0:
        raise ValueError(f"--window-size {text}: give 0 or more keys before, and 0 after, as attention is causal")
    return left


def iteration_ranges(flag: str, texts: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Returns (first, last) of each of `texts`: `N`, or `A:B` for A to B, both included; counted from 1.

    Raises:
        ValueError: not of that form, or an empty range.
    """
    ranges = []
    for text in texts:
        first, colon, last = text.partition(":")
        if not first.isdigit() or not (last.isdigit() if colon else True):
            raise ValueError(f"{flag} {text!r}: give int numbers such as 7, or ranges such as 100:110")
        ends = int(first), int(last or first)
        if ends[0] < 1 or ends[1] < ends[0]:
            raise ValueError(f"{flag} {text}: iterations count from 1, and a range goes up; give 1 or more")
        ranges.append(ends)
    return tuple(ranges)


def multipliers(flag: str, texts: tuple[str, ...]) -> dict[str, float]:
    """Returns pattern -> factor of each of `texts`, `PATTERN=FACTOR`, in their order.

    Raises:
        ValueError: not of that form, or a factor that is negative or no number.
    """
    factors = {}
    for text in texts:
        pattern, equals, factor = text.rpartition("=")
        try:
            value = float(factor)
        except ValueError:
            value = -1.0
        if not (equals and pattern.strip() and 0 <= value < float("inf")):
            raise ValueError(f"{flag} {text}: give PATTERN=FACTOR, a factor of 0 or more, e.g. 'layers.*.mlp.*=0.5'")
        factors[pattern.strip()] = value
    return factors


def _evaluate(flag: str, text: str) -> int | list:
    wrong = ValueError(f"{flag} {text}: give a number, or a list of zeros and ones such as [0]*3+[1]*58")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, OverflowError, RecursionError, MemoryError):
        raise wrong from None


def _value(node: ast.expr) -> int | list:
    """Raises TypeError for anything but whole numbers, lists, `+` and `*`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Mult):
            size = (len(left) if isinstance(left, list) else left) * (len(right) if isinstance(right, list) else right)
            if abs(size) > LONGEST:
                raise OverflowError
            return left * right
    raise TypeError(ast.dump(node))
