"""Values of any size as blocks of the pool: raw layouts, chunk keys, and the header that says what a value was.

A value is cut into chunks, all full but the last one, the *leaf*, which carries the header and whose key is the value's
own. Chunks follow one another like the blocks of a sequence, the leaf last: a block is findable only while
the one before it is, so a value whose key is found is there whole, eviction (leaf first) takes the key away first, and
quarantine of any chunk makes the whole value a miss.

The chunks before the leaf are named after the value's key and a nonce drawn for each put, which the header repeats. So
what an older value of the same key left behind can never be taken for a part of a newer one.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from moonpool.core.blocks import KEY_BYTES
from moonpool.core.errors import DigestMismatch, InvalidRequest
from moonpool.core.layout import KVLayout

NONCE_BYTES = 16
HEADER_BYTES = 1024  # before the bytes of the value
SLOT_MORE = 4096  # what a slot is larger than its class by: header, digest, and the rest of a page
CLASSES = tuple(4096 << i for i in range(9))  # bytes of a value that a chunk of each layout takes: 4 KiB to 1 MiB
CHUNK = CLASSES[-1]
MAX_CHUNKS = 4096
MAX_BYTES = MAX_CHUNKS * CHUNK
MAX_DIMENSIONS = 48
DTYPE_LETTERS = 24

_HEADER = struct.Struct("<4sBBHQ16s24s")  # magic, version, kind, dimensions, bytes, nonce, dtype; then the shape
_MAGIC = b"mpob"
_VERSION = 1


def raw_layout(size_class: int) -> KVLayout:
    """The layout whose blocks take a header and ``CLASSES[size_class]`` bytes of a value.

    Every chunk has the header's room. So its value does not begin on a page, as the large arrays of users nearly do:
    where source and target of a copy agree in their last 12 bits, processors take them for one another and wait.
    """
    block = CLASSES[size_class] + HEADER_BYTES
    name = f"raw{CLASSES[size_class]}"  # each class is a model of its own: a model has one block size
    return KVLayout(name, 1, 1, block // 2, "uint8", block_tokens=1)  # a slice holds K and V: twice head_dim


RAW_LAYOUTS = tuple(raw_layout(i) for i in range(len(CLASSES)))


class Chunk(NamedTuple):
    """Bytes ``start`` to ``end`` of a value, in a block of ``RAW_LAYOUTS[size_class]`` named ``key``."""

    key: bytes
    size_class: int
    start: int
    end: int


class Placed(Protocol):
    @property
    def layout(self) -> int: ...


def class_of(size: int) -> int:
    """What a value of ``size`` bytes is cut into: one chunk that takes it all, or the largest that waste an eighth at most."""
    if size <= CHUNK:
        return max((size - 1).bit_length() - 12, 0) if size > 1 else 0
    best = len(CLASSES) - 1
    while -size % CLASSES[best] * 8 > size:
        best -= 1
    return best


def names_key(hash_key: bytes) -> bytes:
    """[32] what keys the hash of user names, from the cluster's hash key."""
    return hashlib.blake2b(b"moonpool user names", key=hash_key, digest_size=32).digest()


class Names:
    """User keys of one namespace: 16-byte keyed BLAKE2b.

    Two names with one key are not to be expected below about 2**64 of them, and cannot be made by whoever lacks the
    hash key; so the names themselves are not stored or compared.
    """

    def __init__(self, names_key: bytes, namespace: str, tenant: str) -> None:
        mix = hashlib.blake2b(key=names_key, digest_size=KEY_BYTES)
        for part in (namespace.encode(), tenant.encode()):
            mix.update(len(part).to_bytes(4, "little") + part)
        self._mix = mix

    def key(self, name: bytes) -> bytes:
        mix = self._mix.copy()
        mix.update(name)
        return mix.digest()


def chunk_keys(key: bytes, nonce: bytes, count: int) -> list[bytes]:
    """Keys of the ``count`` chunks before the leaf."""
    return [hashlib.blake2b(i.to_bytes(4, "little"), key=key + nonce, digest_size=KEY_BYTES).digest() for i in range(count)]


def plan(key: bytes, nonce: bytes, size: int) -> Sequence[Chunk]:
    """The chunks of a value of ``size`` bytes, the leaf last, all of one layout. InvalidRequest above ``MAX_BYTES``."""
    size_class = class_of(size)
    if size <= CHUNK:
        return (Chunk(key, size_class, 0, size),)
    if size > MAX_BYTES:
        raise InvalidRequest(f"value: {size} bytes; at most {MAX_BYTES}", param="value")
    step = CLASSES[size_class]
    keys = [*chunk_keys(key, nonce, chunks_of(size) - 1), key]
    return [Chunk(k, size_class, i * step, min((i + 1) * step, size)) for i, k in enumerate(keys)]


class Shape(NamedTuple):
    """What a value was: ``kind`` is a small number of the library's, ``dtype`` a name of at most 24 ASCII letters."""

    kind: int
    size: int  # bytes
    dtype: str = ""
    shape: tuple[int, ...] = ()


def encode_header(shape: Shape, nonce: bytes) -> bytes:
    """At most ``HEADER_BYTES``; what lies after it means nothing."""
    dims = shape.shape
    if len(shape.dtype) > DTYPE_LETTERS or len(dims) > MAX_DIMENSIONS:
        raise InvalidRequest(
            f"value: dtype {shape.dtype!r} with {len(dims)} dimensions cannot be recorded; names of {DTYPE_LETTERS} letters "
            f"and {MAX_DIMENSIONS} dimensions can",
            param="value",
        )
    fixed = _HEADER.pack(_MAGIC, _VERSION, shape.kind, len(dims), shape.size, nonce, shape.dtype.encode())
    return fixed + struct.pack(f"<{len(dims)}Q", *dims) if dims else fixed


def decode_header(raw: bytes) -> tuple[Shape, bytes]:
    """(shape, nonce). DigestMismatch where ``raw`` is no header: it was not what its place claims it to be."""
    if len(raw) != HEADER_BYTES:
        raise DigestMismatch(f"a value's header has {HEADER_BYTES} bytes, not {len(raw)}")
    magic, version, kind, dimensions, size, nonce, dtype = _HEADER.unpack_from(raw)
    if magic != _MAGIC or version != _VERSION or dimensions > MAX_DIMENSIONS:
        raise DigestMismatch("a value's header is malformed")
    dims = struct.unpack_from(f"<{dimensions}Q", raw, _HEADER.size) if dimensions else ()
    try:
        return Shape(kind, size, dtype.rstrip(b"\0").decode("ascii"), dims), nonce
    except UnicodeDecodeError as e:
        raise DigestMismatch("a value's header is malformed") from e


def chunks_of(size: int) -> int:
    return max(-(-size // CLASSES[class_of(size)]), 1)


def require_fits(shape: Shape, places: Sequence[Placed]) -> None:
    """DigestMismatch unless a value of this size lies in chunks of these classes."""
    size = shape.size
    if len(places) == 1 and size <= CHUNK and places[0].layout == class_of(size):
        return
    if size > MAX_BYTES or len(places) != chunks_of(size) or {place.layout for place in places} != {class_of(size)}:
        raise DigestMismatch(f"a value of {size} bytes does not lie in these {len(places)} chunks")
