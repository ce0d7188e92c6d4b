"""Fixed struct frames of a host's unix socket: what a user of the store library asks its store node, and the answers.

One frame is one message of a SEQPACKET socket: ``kind, version, items, number``, then a body whose size follows from
``items``. ``number`` comes back in the answer; a request numbered 0 wants none. Numbers are little-endian. Sizes are
bounded before anything is decoded; whatever does not fit exactly is InvalidRequest. Nothing here can run code.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from moonpool.core.blocks import KEY_BYTES
from moonpool.core.errors import ConfigError, InvalidRequest, MoonpoolError, Reason, error_for
from moonpool.core.landing import Region
from moonpool.core.layout import KV, KVLayout

VERSION = 1
MAX_ITEMS = 4096
MAX_FRAME_BYTES = 128 << 10  # below the default send buffer of a unix socket
MAX_TEXT = 512
NAMES_KEY_BYTES = 32
REGIONS_AT_ONCE = 256


class Kind(IntEnum):
    HELLO = 1
    REGIONS = 2
    LAYOUT = 3
    EXISTS = 4
    LOOKUP = 5
    RESERVE = 6
    SEAL = 7
    ABANDON = 8
    PIN = 9
    OPEN = 10
    UNPIN = 11
    QUARANTINE = 12
    REMOVE = 13
    FETCH = 14
    ERROR = 15  # answers only


class Link(IntEnum):
    """What comes before a block."""

    NONE = 0  # nothing: it begins a sequence
    PARENT = 1  # the block that the frame names
    BEFORE = 2  # the item before it in the frame
    TIED = 3  # that, too; and they are reserved together or not at all


class Head(NamedTuple):
    kind: Kind
    items: int
    number: int


class Hello(NamedTuple):
    client: int  # tells the connections of one process apart
    tenant: str


class Welcome(NamedTuple):
    session: int
    incarnation: int
    names_key: bytes  # [32]: keys the hash of user names
    regions: int


class Wanted(NamedTuple):
    """A block to be written."""

    key: bytes
    layout: int
    link: Link


class Granted(NamedTuple):
    """``state`` is a place in ``STATES``; where and ``id`` count only where that is "new"."""

    state: int
    region: int
    offset: int
    id: int


class Place(NamedTuple):
    """A sealed block and where it lies."""

    layout: int
    region: int
    offset: int


STATES = ("new", "sealed", "in_flight", "full", "no_parent")

_HEAD = struct.Struct("<BBHI")
_HELLO = struct.Struct("<4sI")
_WELCOME = struct.Struct("<QQ32sI")
_REGION = struct.Struct("<IQQH")
_LAYOUT = struct.Struct("<IIIHBBBBB")
_LAYOUT_REPLY = struct.Struct("<HQ")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_WANTED = struct.Struct("<16sHB")
_GRANTED = struct.Struct("<BIQQ")
_PLACE = struct.Struct("<HIQ")
_QUARANTINE = struct.Struct("<16sI")
_MAGIC = b"mpst"
HEAD_BYTES = _HEAD.size
_LINKS = tuple(Link)


def _frame(kind: Kind, items: int, number: int, *parts: bytes) -> bytes:
    return b"".join((_HEAD.pack(kind, VERSION, items, number), *parts))


def head(frame: memoryview) -> Head:
    if not HEAD_BYTES <= len(frame) <= MAX_FRAME_BYTES:
        raise InvalidRequest(f"frame: {len(frame)} bytes; one has {HEAD_BYTES} to {MAX_FRAME_BYTES}")
    kind, version, items, number = _HEAD.unpack_from(frame)
    if version != VERSION or not 1 <= kind <= Kind.ERROR:
        raise InvalidRequest(f"frame: kind {kind} version {version}; version {VERSION} is spoken here")
    if items > MAX_ITEMS:
        raise InvalidRequest(f"frame: {items} items; at most {MAX_ITEMS}")
    return Head(Kind(kind), items, number)


def wants_answer(frame: bytes) -> bool:
    return bool(_HEAD.unpack_from(frame)[3])


def _require(frame: memoryview, size: int) -> None:
    if len(frame) != HEAD_BYTES + size:
        raise InvalidRequest(f"frame: {len(frame)} bytes where {HEAD_BYTES + size} were announced")


def _text(raw: memoryview, what: str) -> str:
    if len(raw) > MAX_TEXT:
        raise InvalidRequest(f"frame: {what} of {len(raw)} bytes; at most {MAX_TEXT}")
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError as e:
        raise InvalidRequest(f"frame: {what} is not UTF-8") from e


def _bounded(text: str) -> bytes:
    """At most ``MAX_TEXT`` bytes of it, cut between characters."""
    return text.encode()[:MAX_TEXT].decode(errors="ignore").encode()


# Sessions.


def encode_hello(number: int, hello: Hello) -> bytes:
    return _frame(Kind.HELLO, 0, number, _HELLO.pack(_MAGIC, hello.client), hello.tenant.encode())


def decode_hello(frame: memoryview) -> Hello:
    if len(frame) < HEAD_BYTES + _HELLO.size:
        raise InvalidRequest("frame: a hello is too short")
    magic, client = _HELLO.unpack_from(frame, HEAD_BYTES)
    if magic != _MAGIC:
        raise InvalidRequest(f"frame: {magic!r} is no hello")
    return Hello(client, _text(frame[HEAD_BYTES + _HELLO.size :], "tenant"))


def encode_welcome(number: int, welcome: Welcome) -> bytes:
    return _frame(Kind.HELLO, 0, number, _WELCOME.pack(*welcome))


def decode_welcome(frame: memoryview) -> Welcome:
    _require(frame, _WELCOME.size)
    return Welcome(*_WELCOME.unpack_from(frame, HEAD_BYTES))


def encode_regions_from(number: int, first: int) -> bytes:
    return _frame(Kind.REGIONS, 0, number, _U32.pack(first))


def encode_regions(number: int, regions: Sequence[Region]) -> bytes:
    """At most ``REGIONS_AT_ONCE``."""
    parts = []
    for region in regions:
        path = region.path.encode()
        parts += [_REGION.pack(region.number, region.size, region.slot_bytes, len(path)), path]
    return _frame(Kind.REGIONS, len(regions), number, *parts)


def decode_regions(frame: memoryview, items: int) -> list[Region]:
    out, at = [], HEAD_BYTES
    for _ in range(items):
        if len(frame) < at + _REGION.size:
            raise InvalidRequest("frame: a region is cut short")
        number, size, slot_bytes, length = _REGION.unpack_from(frame, at)
        at += _REGION.size
        if length > MAX_TEXT or len(frame) < at + length:
            raise InvalidRequest("frame: a region's path is too long")
        out.append(Region(number, _text(frame[at : at + length], "path"), size, slot_bytes))
        at += length
    _require(frame, at - HEAD_BYTES)
    return out


def encode_layout(number: int, layout: KVLayout) -> bytes:
    """Of another kind than ``kv``: one item, the kind, at the end. A node that knows no kinds refuses its length."""
    words = [word.encode() for word in (layout.model, layout.dtype, layout.order, layout.digest, layout.codec)]
    if any(len(word) > 255 for word in words):
        raise InvalidRequest("layout: model, dtype, order, digest and codec are names of at most 255 bytes", param="layout")
    shape = (layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens)
    kind = [] if layout.kind == KV else [layout.kind.encode()]
    return _frame(Kind.LAYOUT, len(kind), number, _LAYOUT.pack(*shape, *map(len, words)), *words, *kind)


def decode_layout(frame: memoryview, items: int) -> KVLayout:
    if len(frame) < HEAD_BYTES + _LAYOUT.size or items > 1:
        raise InvalidRequest("frame: a layout is too short, or of more than one kind")
    layers, heads, dim, tokens, *lengths = _LAYOUT.unpack_from(frame, HEAD_BYTES)
    at = HEAD_BYTES + _LAYOUT.size
    if items:
        lengths.append(max(len(frame) - at - sum(lengths), 0))
    _require(frame, _LAYOUT.size + sum(lengths))
    words = []
    for length in lengths:
        words.append(_text(frame[at : at + length], "layout"))
        at += length
    if not layers or not heads or not dim:
        raise InvalidRequest(f"layout: {layers} layers, {heads} heads of {dim}; all are 1 or more", param="layout")
    try:
        return KVLayout(words[0], layers, heads, dim, words[1], tokens, *words[2:])
    except ConfigError as e:
        raise InvalidRequest(f"layout: {e.message}", param="layout") from e


def encode_layout_number(number: int, layout: int, slot_bytes: int) -> bytes:
    return _frame(Kind.LAYOUT, 0, number, _LAYOUT_REPLY.pack(layout, slot_bytes))


def decode_layout_number(frame: memoryview) -> tuple[int, int]:
    """(number of the layout, bytes of its slots)."""
    _require(frame, _LAYOUT_REPLY.size)
    layout, slot_bytes = _LAYOUT_REPLY.unpack_from(frame, HEAD_BYTES)
    return layout, slot_bytes


# Keys.


def encode_keys(kind: Kind, number: int, keys: Sequence[bytes], *, word: int = 0) -> bytes:
    """``word`` means what the kind says: a layout (PIN, LOOKUP), milliseconds (FETCH), whole objects or not (REMOVE)."""
    return _frame(kind, len(keys), number, _U32.pack(word), b"".join(keys))


def decode_keys(frame: memoryview, items: int) -> tuple[int, list[bytes]]:
    """(word, keys)."""
    _require(frame, _U32.size + items * KEY_BYTES)
    raw = bytes(frame[HEAD_BYTES + _U32.size :])
    return _U32.unpack_from(frame, HEAD_BYTES)[0], [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def encode_bits(kind: Kind, number: int, flags: bytes) -> bytes:
    """``flags``: a byte of 0 or 1 for each key."""
    return _frame(kind, len(flags), number, flags)


def decode_bits(frame: memoryview, items: int) -> bytes:
    _require(frame, items)
    return bytes(frame[HEAD_BYTES:])


def encode_ids(kind: Kind, number: int, ids: Sequence[int]) -> bytes:
    return _frame(kind, len(ids), number, struct.pack(f"<{len(ids)}Q", *ids))


def decode_ids(frame: memoryview, items: int) -> tuple[int, ...]:
    _require(frame, items * _U64.size)
    return struct.unpack_from(f"<{items}Q", frame, HEAD_BYTES)


def encode_count(kind: Kind, number: int, count: int) -> bytes:
    return _frame(kind, 0, number, _U32.pack(count))


def decode_count(frame: memoryview) -> int:
    _require(frame, _U32.size)
    return int(_U32.unpack_from(frame, HEAD_BYTES)[0])


# Writing.


def encode_reserve(number: int, parent: bytes | None, wanted: Sequence[Wanted]) -> bytes:
    pack = _WANTED.pack
    return _frame(Kind.RESERVE, len(wanted), number, parent or bytes(KEY_BYTES), *[pack(*one) for one in wanted])


def decode_reserve(frame: memoryview, items: int) -> tuple[bytes, list[Wanted]]:
    """(the frame's parent, blocks). A first block that follows on nothing is refused."""
    _require(frame, KEY_BYTES + items * _WANTED.size)
    body = frame[HEAD_BYTES + KEY_BYTES :]
    try:
        wanted = [Wanted(key, layout, _LINKS[link]) for key, layout, link in _WANTED.iter_unpack(body)]
    except IndexError as e:
        raise InvalidRequest(f"frame: a link is one of {[int(link) for link in Link]}") from e
    if wanted and wanted[0].link >= Link.BEFORE:
        raise InvalidRequest("frame: nothing comes before the first block")
    return bytes(frame[HEAD_BYTES : HEAD_BYTES + KEY_BYTES]), wanted


def encode_granted(number: int, granted: Sequence[Granted]) -> bytes:
    pack = _GRANTED.pack
    return _frame(Kind.RESERVE, len(granted), number, *[pack(*one) for one in granted])


def decode_granted(frame: memoryview, items: int) -> list[Granted]:
    _require(frame, items * _GRANTED.size)
    out = list(map(Granted._make, _GRANTED.iter_unpack(frame[HEAD_BYTES:])))
    if out and max(out)[0] >= len(STATES):
        raise InvalidRequest(f"frame: a state is below {len(STATES)}")
    return out


# Reading.


def encode_opened(kind: Kind, number: int, ticket: int, objects: Sequence[Sequence[Place]]) -> bytes:
    """Where the blocks of each object lie, in order; none: it is not here. ``ticket`` pins them all."""
    counts = struct.pack(f"<{len(objects)}I", *map(len, objects))
    pack = _PLACE.pack
    return _frame(kind, len(objects), number, _U64.pack(ticket), counts, *[pack(*one) for places in objects for one in places])


def room_for_places(objects: int) -> int:
    """How many places fit into an answer about ``objects`` objects."""
    return (MAX_FRAME_BYTES - HEAD_BYTES - _U64.size - objects * _U32.size) // _PLACE.size


def decode_opened(frame: memoryview, items: int) -> tuple[int, list[list[Place]]]:
    fixed = _U64.size + items * _U32.size
    if len(frame) < HEAD_BYTES + fixed:
        raise InvalidRequest("frame: an answer is cut short")
    (ticket,) = _U64.unpack_from(frame, HEAD_BYTES)
    counts = struct.unpack_from(f"<{items}I", frame, HEAD_BYTES + _U64.size)
    _require(frame, fixed + sum(counts) * _PLACE.size)
    places = list(map(Place._make, _PLACE.iter_unpack(frame[HEAD_BYTES + fixed :])))
    out, at = [], 0
    for count in counts:
        out.append(places[at : at + count])
        at += count
    return ticket, out


def encode_quarantine(number: int, key: bytes, layer: int, place: str) -> bytes:
    return _frame(Kind.QUARANTINE, 0, number, _QUARANTINE.pack(key, layer), _bounded(place))


def decode_quarantine(frame: memoryview) -> tuple[bytes, int, str]:
    """(key, layer, place)."""
    if len(frame) < HEAD_BYTES + _QUARANTINE.size:
        raise InvalidRequest("frame: a quarantine is too short")
    key, layer = _QUARANTINE.unpack_from(frame, HEAD_BYTES)
    return key, layer, _text(frame[HEAD_BYTES + _QUARANTINE.size :], "place")


# Errors.


def encode_error(number: int, error: MoonpoolError) -> bytes:
    reason = error.reason.value.encode()
    return _frame(Kind.ERROR, 0, number, _U16.pack(len(reason)), reason, _bounded(error.message))


def decode_error(frame: memoryview) -> MoonpoolError:
    """The exception to raise."""
    if len(frame) < HEAD_BYTES + _U16.size:
        raise InvalidRequest("frame: an error is too short")
    (length,) = _U16.unpack_from(frame, HEAD_BYTES)
    at = HEAD_BYTES + _U16.size
    reason, message = _text(frame[at : at + length], "reason"), _text(frame[at + length :], "message")
    try:
        return error_for(Reason(reason), message)
    except ValueError as e:
        raise InvalidRequest(f"frame: reason {reason!r} is unknown") from e
