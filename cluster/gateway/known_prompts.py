"""Keys of prompts hashed before: a conversation's next turn looks up what it begins with, and hashes only what is new.

Prompts are cut into strides of ``STRIDE_TOKENS``. A stride is known by the key of the block before it, which names
everything before, and by its own tokens, byte for byte.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from moonpool.core.blocks import TOKEN_BYTES, BlockHasher, token_bytes

STRIDE_TOKENS = 1_024
MOST_STRIDES = 4_096  # about 24 MB, 4 M tokens


class KnownPrompts:
    """Thread-safe. The strides used longest ago are forgotten first."""

    def __init__(self, most: int = MOST_STRIDES) -> None:
        self._most = most
        self._keys: dict[tuple[bytes, bytes], list[bytes]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self, hasher: BlockHasher, ids: Sequence[int]) -> list[bytes]:
        """As ``hasher.keys(ids)``."""
        raw = token_bytes(ids)
        blocks = max(STRIDE_TOKENS // hasher.block_tokens, 1)
        step = blocks * hasher.block_tokens * TOKEN_BYTES
        with self._lock:
            known = self._known(hasher, raw, step)
        keys = hasher.add_keys(known, raw[len(known) * hasher.block_tokens * TOKEN_BYTES :])
        with self._lock:
            for first in range(len(known), len(keys) - blocks + 1, blocks):
                at = first // blocks * step
                before = keys[first - 1] if first else self._root(hasher)
                self._keys[before, raw[at : at + step]] = keys[first : first + blocks]
            while len(self._keys) > self._most:
                del self._keys[next(iter(self._keys))]
        return keys

    def _known(self, hasher: BlockHasher, raw: bytes, step: int) -> list[bytes]:
        """Keys of the leading strides that are known; they are the ones used last now."""
        out: list[bytes] = []
        for at in range(0, len(raw) - step + 1, step):
            name = (out[-1] if out else self._root(hasher), raw[at : at + step])
            keys = self._keys.pop(name, None)
            if keys is None:
                break
            self._keys[name] = keys
            out += keys
        return out

    def _root(self, hasher: BlockHasher) -> bytes:
        return hasher.root + hasher.block_tokens.to_bytes(4, "little")
