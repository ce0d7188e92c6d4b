"""What keys in a message must look like."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.core.blocks import KEY_BYTES
from moonpool.core.errors import InvalidRequest
from moonpool.core.use import DEFAULT_TENANT, Use

MAX_NAME = 256
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


def checked_use(use: Use) -> Use:
    """``use`` as it came over a wire: what was left out says nothing. InvalidRequest where names are too long."""
    for field, name in (("tenant", use.tenant), ("kind", use.kind)):
        if len(name) > MAX_NAME:
            raise InvalidRequest(f"use.{field}: {len(name)} characters; at most {MAX_NAME}", param=f"use.{field}")
    return Use(use.tenant or DEFAULT_TENANT, use.kind, max(use.turn, 1), use.prompt_tokens)
