"""What keys in a message must look like."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.core.blocks import KEY_BYTES
from moonpool.core.errors import InvalidRequest

MAX_KEYS = 1 << 16  # blocks of one request: 4 M tokens in blocks of 64


def checked_key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise InvalidRequest(f"keys: a block key has {KEY_BYTES} bytes, this one {len(key)}", param="keys")
    return key


def checked_keys(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """InvalidRequest unless they are block keys, all different and not too many."""
    if len(keys) > MAX_KEYS:
        raise InvalidRequest(f"keys: {len(keys)} in one call; at most {MAX_KEYS}", param="keys")
    out = tuple(map(checked_key, keys))
    if len(set(out)) != len(out):
        raise InvalidRequest("keys: one key twice in one call; keys of a sequence differ", param="keys")
    return out
