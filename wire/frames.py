"""msgpack frames: push notices and block events. Two bytes of header (kind, version), then one validated value.
Fixed struct frames: the hand-over of a process descriptor on a host's unix socket.

Sizes are bounded before anything is decoded; unknown kinds and versions, wrong types and trailing bytes are
InvalidRequest. Nothing here can run code.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TypeVar

import msgspec

from moonpool.core.errors import InvalidRequest
from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.landing import PushNotice

VERSION = 1
MAX_NOTICE_BYTES = 1 << 20  # about 15,000 slices: far above one layer of one chunk
MAX_EVENT_BYTES = 1 << 20
MAX_SNAPSHOT_BYTES = 64 << 20


class Kind(IntEnum):
    NOTICE = 1
    EVENTS = 2
    SNAPSHOT = 3


_encoder = msgspec.msgpack.Encoder()
_notice = msgspec.msgpack.Decoder(PushNotice)
_events = msgspec.msgpack.Decoder(EventBatch)
_snapshot = msgspec.msgpack.Decoder(IndexSnapshot)
T = TypeVar("T")


def _encode(kind: Kind, value: object, limit: int) -> bytes:
    body = _encoder.encode(value)
    if len(body) + 2 > limit:
        raise InvalidRequest(
            f"frame: a {kind.name.lower()} of {len(body)} bytes is above the limit of {limit}; send it in parts"
        )
    return bytes((kind, VERSION)) + body


def _decode(frame: bytes, kind: Kind, decoder: msgspec.msgpack.Decoder[T], limit: int) -> T:
    if len(frame) > limit or len(frame) < 2:
        raise InvalidRequest(f"frame: {len(frame)} bytes; a {kind.name.lower()} has 2 to {limit}")
    if frame[0] != kind or frame[1] != VERSION:
        raise InvalidRequest(f"frame: kind {frame[0]} version {frame[1]}; kind {int(kind)} version {VERSION} expected")
    try:
        return decoder.decode(memoryview(frame)[2:])
    except (msgspec.MsgspecError, RecursionError) as e:  # msgspec walks into unknown values as deep as they nest
        raise InvalidRequest(f"frame: {kind.name.lower()} is malformed: {e}") from e


def kind_of(frame: bytes) -> Kind:
    try:
        return Kind(frame[0])
    except (IndexError, ValueError) as e:
        raise InvalidRequest("frame: empty or of an unknown kind") from e


def encode_notice(notice: PushNotice) -> bytes:
    return _encode(Kind.NOTICE, notice, MAX_NOTICE_BYTES)


def decode_notice(frame: bytes) -> PushNotice:
    return _decode(frame, Kind.NOTICE, _notice, MAX_NOTICE_BYTES)


def encode_events(batch: EventBatch) -> bytes:
    return _encode(Kind.EVENTS, batch, MAX_EVENT_BYTES)


def decode_events(frame: bytes) -> EventBatch:
    return _decode(frame, Kind.EVENTS, _events, MAX_EVENT_BYTES)


def encode_snapshot(snapshot: IndexSnapshot) -> bytes:
    return _encode(Kind.SNAPSHOT, snapshot, MAX_SNAPSHOT_BYTES)


def decode_snapshot(frame: bytes) -> IndexSnapshot:
    return _decode(frame, Kind.SNAPSHOT, _snapshot, MAX_SNAPSHOT_BYTES)


_HAND_OVER = struct.Struct("<4sHQ")  # magic, version, session
_MAGIC = b"mpfd"
HAND_OVER_BYTES = _HAND_OVER.size


def encode_hand_over(session: int) -> bytes:
    """Goes with one descriptor: "this is the process of your session ``session``"."""
    return _HAND_OVER.pack(_MAGIC, VERSION, session)


def decode_hand_over(frame: bytes) -> int:
    """The session number."""
    if len(frame) != HAND_OVER_BYTES:
        raise InvalidRequest(f"frame: {len(frame)} bytes; a hand-over has {HAND_OVER_BYTES}")
    magic, version, session = _HAND_OVER.unpack(frame)
    if magic != _MAGIC or version != VERSION:
        raise InvalidRequest(f"frame: {magic!r} version {version} is no hand-over of version {VERSION}")
    return int(session)
