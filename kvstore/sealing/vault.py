"""Blocks at rest as AES-256-GCM: extents of the SSD tier and objects of the shared one. See docs/ssd-format.md.

A block is two messages, its header page and its slot; the slot's tag stands in the sealed header, so the two belong
together. In front of a header stand, readable by all, the id of the cluster's key, 16 random bytes that name the life of
the process that wrote it, and the number of the block in that life.

Nonces. Each life has a key of its own, HKDF-SHA256 (RFC 5869) of the cluster's key salted with the life's 16 random bytes;
two lives of 2**32 share them with probability 2**-64. Under it, block n takes the nonces 2n and 2n + 1, and n only grows.
So no nonce comes twice under one key, however often a node starts and however many write with the same cluster key, and
nothing need be remembered over a crash.

What an attacker with the disk can do: remove blocks (a miss), or put back an older copy of the same block in the same
place of the same segment's life. That is the same KV: keys of blocks are digests of their content.
"""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from moonpool.kvstore.sealing.keys import ID_BYTES, KvKey, KvKeys
from moonpool.kvstore.sealing.stream import NONCE_BYTES, TAG_BYTES
from moonpool.kvstore.ssd.format import (
    EXTENT_MAGIC,
    HEADER_BYTES,
    SEALED_BODY_BYTES,
    SEALED_FRONT,
    SEALED_VERSION,
    ExtentHeader,
    decode_body,
    encode_body,
)

LIFE_BYTES = 16
KEPT_LIVES = 256  # derived keys that are remembered; deriving one takes microseconds
KEPT_STRANGERS = 8
_MEANING = b"moonpool kv at rest 1"
_KEY_BYTES = 32
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Sealed:
    """An opened header, and what opens the slot that belongs to it."""

    header: ExtentHeader
    front: bytes
    tag: bytes


class Vault:
    """Seals with the current key, opens with that and the previous one. Methods may be called from any thread."""

    def __init__(self, keys: KvKeys) -> None:
        self._keys = keys
        self._life = os.urandom(LIFE_BYTES)
        self._cipher = _derived(keys.current, self._life)
        self._numbers = itertools.count()  # one atomic step for each block
        self._lives: dict[bytes, AESGCM] = {}
        self._lock = threading.Lock()
        self._strangers: dict[str, None] = {}

    @property
    def strangers(self) -> tuple[str, ...]:
        """Ids of keys that blocks were sealed with and that are not here."""
        with self._lock:
            return tuple(self._strangers)

    def seal(self, header: ExtentHeader, slot: Bytes, out: Bytes) -> bytes:
        """The [HEADER_BYTES] header page; ``out`` [slot + TAG_BYTES] gets the sealed slot, and may begin where ``slot`` does.

        What follows the slot in ``out`` is scratch: its tag, which the header carries.
        """
        number = next(self._numbers)
        front = SEALED_FRONT.pack(EXTENT_MAGIC, SEALED_VERSION, 0, self._keys.current.id_bytes, self._life, number)
        self._cipher.encrypt_into(_nonce(2 * number), slot.data, _bound(front, header), out.data)
        body = encode_body(header).ljust(SEALED_BODY_BYTES, b"\0") + out[slot.nbytes :].tobytes()
        return front + self._cipher.encrypt(_nonce(2 * number + 1), body, front)

    def open_header(self, raw: bytes) -> Sealed | None:
        """None where these are no bytes of a sealed header, or none of a key that is here."""
        if len(raw) != HEADER_BYTES:
            return None
        front = raw[: SEALED_FRONT.size]
        magic, version, _, key_id, life, number = SEALED_FRONT.unpack(front)
        if magic != EXTENT_MAGIC or version != SEALED_VERSION:
            return None
        cipher = self._cipher_of(key_id, life)
        if cipher is None:
            return None
        try:
            body = cipher.decrypt(_nonce(2 * number + 1), raw[SEALED_FRONT.size :], front)
        except InvalidTag:
            return None
        header = decode_body(body[:SEALED_BODY_BYTES])
        return None if header is None else Sealed(header, front, body[SEALED_BODY_BYTES:])

    def open_slot(self, sealed: Sealed, data: Bytes, out: Bytes) -> bool:
        """``data`` is a sealed slot with ``TAG_BYTES`` of room behind it, ``out`` gets the plain one; whether it is whole."""
        _, _, _, key_id, life, number = SEALED_FRONT.unpack(sealed.front)
        cipher = self._cipher_of(key_id, life)
        if cipher is None:
            return False
        data[out.nbytes :] = np.frombuffer(sealed.tag, np.uint8)
        try:
            cipher.decrypt_into(_nonce(2 * number), data.data, _bound(sealed.front, sealed.header), out.data)
        except InvalidTag:
            return False
        return True

    def _cipher_of(self, key_id: bytes, life: bytes) -> AESGCM | None:
        key = self._keys.find(key_id)
        with self._lock:
            if key is None:
                if len(self._strangers) < KEPT_STRANGERS:
                    self._strangers[key_id.hex()] = None
                return None
            found = self._lives.get(key_id + life)
            if found is None:
                if len(self._lives) >= KEPT_LIVES:
                    del self._lives[next(iter(self._lives))]
                found = self._lives[key_id + life] = _derived(key, life)
            return found


def _derived(key: KvKey, life: bytes) -> AESGCM:
    return AESGCM(HKDF(SHA256(), _KEY_BYTES, life, _MEANING).derive(key.secret))


def _nonce(number: int) -> bytes:
    return number.to_bytes(NONCE_BYTES, "little")


def _bound(front: bytes, header: ExtentHeader) -> bytes:
    """What a slot's bytes mean: this block of this layout, written at this time."""
    return front + bytes.fromhex(header.layout) + header.key


assert SEALED_FRONT.size == 8 + 4 + ID_BYTES + LIFE_BYTES + 8
assert SEALED_FRONT.size + SEALED_BODY_BYTES + 2 * TAG_BYTES == HEADER_BYTES
