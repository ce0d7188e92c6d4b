"""Dataclasses as JSON and back: bytes as base64, enums by value, fields that are not known passed over."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from moonpool.core.errors import InvalidRequest

T = TypeVar("T")


def to_json(value: Any) -> bytes:
    """One line, without its end."""
    return msgspec.json.encode(value)


def from_json(data: bytes, kind: type[T]) -> T:
    """InvalidRequest says what does not fit and where."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"json: {e}") from e
