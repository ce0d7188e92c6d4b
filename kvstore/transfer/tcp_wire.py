"""What goes over a connection of the tcp carrier: bytes to values and back, sizes bounded before anything is made of them.

A sender opens the connection with a hello, which the receiver answers with a welcome or by closing. Then messages
follow: header, table of pieces, the bytes of the pieces in that order, the notice frame. A message marked LAST ends its
push: the receiver hands the frame over and answers the push's number. Pushes end in the order in which they began.
All integers are little-endian.

Where KV bytes are encrypted, both ends exchange offers first (``kvstore.sealing.handshake``), and everything after them,
hello and answers included, goes as sealed records (``tcp_streams``): a hello in two, its fixed part and its name.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import InvalidRequest
from moonpool.core.ids import Incarnation, MemberId
from moonpool.kvstore.claims import Life
from moonpool.kvstore.transfer.carrier import LENGTH, REGION, TARGET, Pieces
from moonpool.wire.frames import MAX_NOTICE_BYTES

MAGIC = b"MPkv"
VERSION = 1
TOKEN_BYTES = 32
MAX_NAME_BYTES = 1024
MAX_PIECES = 1 << 16  # of one message: a table of 1.5 MB; a push of more goes as several messages
LAST = 1  # flag of a message: it ends its push

ADDRESS = struct.Struct(f"<{TOKEN_BYTES}sIH")  # token, admission, port; then the host's name
HELLO = struct.Struct(f"<4sH{TOKEN_BYTES}sIQH")  # magic, version, token, admission, incarnation, bytes of the name
WELCOME = struct.Struct("<4sH")
HEADER = struct.Struct("<4sHHQII")  # magic, version, flags, number of the push, pieces, bytes of the frame
PIECE = np.dtype("<i8")  # region, offset, length
ANSWER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Address:
    """Endpoint metadata. ``token`` is of one life of the endpoint; ``admission`` says how often its asker was cut off."""

    host: str
    port: int
    token: bytes
    admission: int

    def encode(self) -> bytes:
        return ADDRESS.pack(self.token, self.admission, self.port) + self.host.encode()

    @classmethod
    def decode(cls, metadata: bytes) -> Address:
        """InvalidRequest where it is none."""
        if not ADDRESS.size < len(metadata) <= ADDRESS.size + MAX_NAME_BYTES:
            raise InvalidRequest(f"endpoint: {len(metadata)} bytes are no address of the tcp carrier", param="metadata")
        token, admission, port = ADDRESS.unpack_from(metadata)
        try:
            return cls(metadata[ADDRESS.size :].decode(), port, token, admission)
        except UnicodeDecodeError as e:
            raise InvalidRequest(f"endpoint: its host is no text ({e})", param="metadata") from e


@dataclass(frozen=True, slots=True)
class Hello:
    """Who connects. ``name_bytes`` of its member id follow on the wire."""

    token: bytes
    admission: int
    incarnation: Incarnation
    name_bytes: int

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """InvalidRequest for anything else than a hello of this version; its token is not yet checked."""
        magic, version, token, admission, incarnation, name_bytes = HELLO.unpack(data)
        _require_ours(magic, version)
        if not 0 < name_bytes <= MAX_NAME_BYTES:
            raise InvalidRequest(f"hello: a name of {name_bytes} bytes; 1 to {MAX_NAME_BYTES} are allowed")
        return cls(token, admission, Incarnation(incarnation), name_bytes)


def encode_hello(address: Address, me: Life) -> bytes:
    name = me.member.encode()
    return HELLO.pack(MAGIC, VERSION, address.token, address.admission, me.incarnation, len(name)) + name


def life_of(hello: Hello, name: bytes) -> Life:
    try:
        return Life(MemberId(name.decode()), hello.incarnation)
    except UnicodeDecodeError as e:
        raise InvalidRequest(f"hello: the name is no text ({e})") from e


def encode_welcome() -> bytes:
    return WELCOME.pack(MAGIC, VERSION)


def require_welcome(data: bytes) -> None:
    """InvalidRequest where the other end speaks something else."""
    _require_ours(*WELCOME.unpack(data))


@dataclass(frozen=True, slots=True)
class Header:
    last: bool
    number: int
    pieces: int
    frame_bytes: int

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Header:
        """InvalidRequest for another magic or version, and for sizes above the bounds."""
        magic, version, flags, number, pieces, frame_bytes = HEADER.unpack(data)
        _require_ours(magic, version)
        if pieces > MAX_PIECES or frame_bytes > MAX_NOTICE_BYTES:
            raise InvalidRequest(f"push: {pieces} pieces and a notice of {frame_bytes} bytes are above the bounds")
        return cls(bool(flags & LAST), number, pieces, frame_bytes)


def encode_message(number: int, pieces: Pieces, frame: bytes, *, last: bool) -> bytes:
    """Header and table; the caller sends the bytes of ``pieces`` and then ``frame``."""
    head = HEADER.pack(MAGIC, VERSION, LAST if last else 0, number, len(pieces), len(frame))
    return head + pieces[:, (REGION, TARGET, LENGTH)].astype(PIECE).tobytes()


def decode_table(data: bytes | bytearray) -> NDArray[np.int64]:
    """[pieces, 3]: region, offset, length; as a peer says, unchecked."""
    return np.frombuffer(data, dtype=PIECE).reshape(-1, 3).astype(np.int64)


def _require_ours(magic: bytes, version: int) -> None:
    if magic != MAGIC or version != VERSION:
        raise InvalidRequest(f"not the tcp carrier of version {VERSION}: it begins with {magic!r}, version {version}")
