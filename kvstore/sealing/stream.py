"""One direction of a connection as AES-256-GCM records: nobody can read, change, repeat, drop, move or add one.

Nonces. Each direction of each connection has a key of its own, derived from two random public keys made for this
connection (``handshake``), and numbers its records from 0: the number is the nonce, so no nonce ever repeats under one
key. A stream refuses to go on after ``MAX_RECORDS``; a connection then breaks and is made anew. At 256 KiB a record that
is a petabyte, 2**46 AES blocks: far below where GCM's bounds begin to matter (NIST SP 800-38D, section 8.3).

A record is bound to its place in the stream by its nonce, and to its meaning by the associated data, which the caller
names (a kind, and for KV bytes the place that they go to).
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from moonpool.core.errors import DigestMismatch, TransferFailed

TAG_BYTES = 16
NONCE_BYTES = 12
MAX_RECORDS = 1 << 32


class Stream:
    """Of one thread at a time. Sealing and opening release the GIL."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._records = 0

    def _nonce(self) -> bytes:
        number, self._records = self._records, self._records + 1
        if number >= MAX_RECORDS:
            raise TransferFailed(f"{MAX_RECORDS} records went under one key; the connection is made anew")
        return number.to_bytes(NONCE_BYTES, "little")

    def seal(self, data: bytes | memoryview, bound_to: bytes) -> bytes:
        """``len(data) + TAG_BYTES`` bytes."""
        return self._cipher.encrypt(self._nonce(), data, bound_to)

    def seal_into(self, data: memoryview, bound_to: bytes, out: memoryview) -> None:
        """``out`` has room for ``len(data) + TAG_BYTES`` bytes, exactly."""
        self._cipher.encrypt_into(self._nonce(), data, bound_to, out)

    def open(self, record: bytes | memoryview, bound_to: bytes) -> bytes:
        """DigestMismatch where it is not the peer's next record, or is not bound to that."""
        try:
            return self._cipher.decrypt(self._nonce(), record, bound_to)
        except InvalidTag as e:
            raise forged() from e

    def open_into(self, record: memoryview, bound_to: bytes, out: memoryview) -> None:
        """As ``open``; ``out`` has room for the plain bytes, exactly."""
        try:
            self._cipher.decrypt_into(self._nonce(), record, bound_to, out)
        except InvalidTag as e:
            raise forged() from e


def forged() -> DigestMismatch:
    return DigestMismatch("a record of a KV connection is not its peer's next one: forged, changed or out of place")
