"""Block keys: 16-byte keyed BLAKE2b over (namespace, parent key, token ids of the block).

128 bits of a keyed cryptographic digest: finding two blocks with one key takes about 2**64 work for someone who holds
the key and is infeasible for someone who does not, so a hit needs no comparison of token ids.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

from moonpool.core import key_files
from moonpool.core.layout import KVLayout

KEY_BYTES = 16
HASH_KEY_BYTES = key_files.KEY_FILE_BYTES
ROOT = bytes(KEY_BYTES)  # parent of a first block
TOKEN_BYTES = 4


def namespace(layout: KVLayout, *, adapter: str = "", tenant_salt: bytes = b"") -> bytes:
    """16 bytes that keep apart everything that may not share KV: model and layout, adapter, tenant."""
    mix = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (layout.fingerprint.encode(), adapter.encode(), tenant_salt):
        mix.update(len(part).to_bytes(4, "little") + part)
    return mix.digest()


class BlockHasher:
    """Chains block keys for one namespace. Cheap to make; holds no state between calls."""

    def __init__(self, hash_key: bytes, namespace: bytes, block_tokens: int) -> None:
        self._begun = hashlib.blake2b(namespace, digest_size=KEY_BYTES, key=hash_key)  # common to all blocks
        self.block_tokens = block_tokens
        self.root = self._begun.digest()  # tells hashers of different keys and namespaces apart

    def keys(self, ids: Sequence[int], *, known: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of all whole blocks of ``ids`` (0 to 2**32 - 1); ``known`` are those of its leading blocks, not hashed again."""
        return self.add_keys(known, token_bytes(ids[len(known) * self.block_tokens :] if known else ids))

    def add_keys(self, known: Sequence[bytes], raw: bytes) -> list[bytes]:
        """``known`` and the keys of the whole blocks after them, whose ``token_bytes`` are ``raw``."""
        out, step = list(known), TOKEN_BYTES * self.block_tokens
        parent, copy, add = out[-1] if out else ROOT, self._begun.copy, out.append
        for at in range(0, len(raw) - step + 1, step):
            block = copy()
            block.update(parent)
            block.update(raw[at : at + step])
            parent = block.digest()
            add(parent)
        return out


def token_bytes(ids: Sequence[int]) -> bytes:
    """``TOKEN_BYTES`` for each id (0 to 2**32 - 1), little-endian."""
    numbers = array("I", ids)  # twice as fast as numpy, from a list
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def key_id(hash_key: bytes) -> str:
    """A public name of a hash key, compared at registration so that two different keys never meet silently."""
    return key_files.key_id(hash_key, "hash key")


def load_hash_key(path: Path) -> bytes:
    """The cluster's hash key from ``path``; the first start makes it (mode 0600). Safe when several start at once."""
    return key_files.load_key(path, "key_file")


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks (or pages) that ``tokens`` tokens occupy, a partly filled last one included."""
    return -(-tokens // block_tokens)


def chunk_end(start: int, total: int, budget: int, block_tokens: int) -> int:
    """Where a chunk that begins at ``start`` ends: at most ``budget`` tokens, on a block border unless it is the last one.

    A budget below one block is raised to the next border, so a chunk always makes progress.
    """
    end = min(start + max(budget, 1), total)
    if end < total:
        end = max(end // block_tokens * block_tokens, (start // block_tokens + 1) * block_tokens)
    return min(end, total)
