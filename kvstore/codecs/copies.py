"""How a lossy copy of a block is named, and whom it may serve.

A copy is a block like any other, under a key and a layout of its own: its digests, its eviction, its way to other tiers
and its clearing are those of every block. A full block decoded from it has a third key, because it is not the block that
the first key names: whoever asks by that key gets it only where lossy copies are allowed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from moonpool.core.blocks import KEY_BYTES
from moonpool.core.config import StoreConfig
from moonpool.core.layout import CODED_ITEM_BYTES, KVLayout
from moonpool.core.use import Use

LOSSY = tuple(CODED_ITEM_BYTES)


def copy_key(key: bytes, codec: str) -> bytes:
    """The key of what ``codec`` wrote of block ``key``."""
    return _derived(key, b"copy", codec)


def decoded_key(copy: bytes) -> bytes:
    """The key of the full block that was decoded from the copy with key ``copy``."""
    return _derived(copy, b"read", "")


def read_key(key: bytes, codec: str) -> bytes:
    """The key of the full block that was decoded from ``codec``'s copy of block ``key``."""
    return decoded_key(copy_key(key, codec))


def all_keys(key: bytes) -> list[bytes]:
    """``key`` and whatever copies of its block may be called; ``key`` may be a copy's own."""
    copies = [copy_key(key, codec) for codec in LOSSY]
    return [key, *copies, *map(decoded_key, (key, *copies))]


def _derived(key: bytes, kind: bytes, codec: str) -> bytes:
    return hashlib.blake2b(key + codec.encode(), digest_size=KEY_BYTES, person=b"moonpool " + kind).digest()


def allows_lossy(config: StoreConfig, layout: KVLayout, model_names: Iterable[str], use: Use) -> bool:
    """Whether ``store.lossy_for`` names the tenant, or the model by fingerprint or by one of ``model_names``."""
    return not {use.tenant, layout.model, *model_names}.isdisjoint(config.lossy_for)
