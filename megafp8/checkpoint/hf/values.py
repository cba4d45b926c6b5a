"""Values of a config.json: typed, with the defaults of the model's class, and every message naming file and key.

The file may come from anywhere: a value of another type, or a number beyond any real model, is refused here, before
anything is sized by it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_INTEGER = 1 << 31
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
MAX_BYTES = 64 << 20
"""Of a JSON file."""
_REQUIRED = object()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, one line, when it is missing, too large, or none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path} is larger than {MAX_BYTES >> 20} MiB: not a configuration or index")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} can't be read as JSON: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


class Values:
    """The content of a config.json, or of an object inside it. where: named in messages."""

    def __init__(self, content: Mapping[str, Any], where: str = "config.json"):
        self.content, self.where = content, where

    def _get(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        if value is None and default is _REQUIRED:
            raise ValueError(f"{self.where} has no '{key}'")
        return default if value is None else value

    def _wrong(self, key: str, value: Any, kind: str) -> ValueError:
        return ValueError(f"{self.where}: '{key}' is {str(value)[:60]!r}, not {kind}")

    def integer(self, key: str, default: Any = _REQUIRED, *, largest: int = MAX_INTEGER) -> int:
        """A positive integer; or the default where the key is absent or null."""
        value = self._get(key, default)
        if value is default:
            return default
        if type(value) is not int or not 1 <= value <= largest:
            raise self._wrong(key, value, f"an integer from 1 to {largest}")
        return value

    def count(self, key: str) -> int:
        """An integer, 0 where the key is absent or null."""
        return 0 if self.content.get(key) == 0 else self.integer(key, 0, largest=MAX_LAYERS)

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive finite number."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        value = self._get(key, default)
        if value is not default and type(value) is not str:
            raise self._wrong(key, value, "a text")
        return value

    def section(self, key: str) -> Values:
        """The object under a key, an empty one where it is absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Values(value, f"{self.where}: {key}")

    def require(self, key: str, *allowed: Any, default: Any = None) -> None:
        """Raises ValueError unless the value is one that is built here; an absent key counts as `default`."""
        value = self._get(key, default)
        if value not in allowed:
            shown = " or ".join(str(a) for a in allowed)
            raise ValueError(f"{self.where}: '{key}' is {str(value)[:60]!r}; only {shown} is built here")
