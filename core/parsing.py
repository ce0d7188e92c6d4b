"""JSON and TOML that others wrote. Whatever does not parse is a ValueError, however deep it nests or long its numbers are."""

from __future__ import annotations

import json
import tomllib
from typing import Any

MAX_TOML_CHARS = 1 << 20  # of a configuration, a file of keys, a profile: reading one takes time in the square of its nesting


def read_json(text: str | bytes) -> Any:
    """ValueError: no JSON, not UTF-8, or nested deeper than Python goes."""
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("it nests too deeply") from e


def read_toml(text: str) -> dict[str, Any]:
    """ValueError: no TOML (with the place), too long, or nested deeper than Python goes."""
    if len(text) > MAX_TOML_CHARS:
        raise ValueError(f"{len(text)} characters are more than the {MAX_TOML_CHARS} of such a file")
    try:
        return tomllib.loads(text)
    except RecursionError as e:
        raise ValueError("it nests too deeply") from e
