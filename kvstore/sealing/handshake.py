"""How two processes that hold the cluster's KV key come by fresh keys for one connection.

Each side sends an offer: the name of its KV key and a public X25519 key made for this connection. Both derive two keys,
one per direction, by HKDF-SHA256 (RFC 5869) over (KV key, X25519 secret), salted with both public keys in the order
caller, called. It is the pattern NNpsk0 of the Noise framework (Perrin, 2018, section 9): without the KV key nobody
derives them, so the first record that opens proves its sender a member; recorded connections stay closed to who steals the
key later; and an offer that is sent once more meets another public key, so that nothing recorded opens.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from moonpool.core.errors import InvalidRequest, LayoutMismatch
from moonpool.kvstore.sealing.keys import ID_BYTES, KvKey
from moonpool.kvstore.sealing.stream import Stream

MAGIC = b"MPks"
VERSION = 1
PUBLIC_BYTES = 32
OFFER = struct.Struct(f"<4sH{ID_BYTES}s{PUBLIC_BYTES}s")  # magic, version, id of the KV key, public key
_KEY_BYTES = 32
_MEANING = b"moonpool kv connection 1"


@dataclass(frozen=True, slots=True)
class Streams:
    """``sends`` seals what this side says, ``hears`` opens what the other one does."""

    sends: Stream
    hears: Stream


class Handshake:
    """One side of one connection. ``offer`` goes to the other side; ``meet`` takes the other's."""

    def __init__(self, key: KvKey) -> None:
        self._key = key
        self._private = X25519PrivateKey.generate()
        self._public = self._private.public_key().public_bytes_raw()

    @property
    def offer(self) -> bytes:
        return OFFER.pack(MAGIC, VERSION, self._key.id_bytes, self._public)

    def meet(self, offer: bytes, *, caller: bool) -> Streams:
        """``caller``: this side opened the connection.

        InvalidRequest where ``offer`` is none; LayoutMismatch, naming both keys, where the other side has another key.
        """
        theirs = _public_of(offer, self._key)
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError as e:  # a point of low order: no secret would be in it
            raise InvalidRequest("offer: its public key is unfit") from e
        first, second = (self._public, theirs) if caller else (theirs, self._public)
        keys = HKDF(SHA256(), 2 * _KEY_BYTES, first + second, _MEANING).derive(self._key.secret + shared)
        from_caller, from_called = Stream(keys[:_KEY_BYTES]), Stream(keys[_KEY_BYTES:])
        return Streams(from_caller, from_called) if caller else Streams(from_called, from_caller)


def _public_of(offer: bytes, mine: KvKey) -> bytes:
    magic, version, key_id, public = OFFER.unpack(offer)
    if magic != MAGIC or version != VERSION:
        raise InvalidRequest(
            f"offer: {magic!r} version {version} is no offer of version {VERSION}: KV bytes are encrypted here"
        )
    if key_id != mine.id_bytes:
        raise LayoutMismatch(f"kv key {mine.id} here, {key_id.hex()} at the peer; give both the same security.kv_key_file")
    return bytes(public)
