"""Bytes of the tier's files: segment headers, extent headers, and where extents lie. Pure. See docs/ssd-format.md.

A segment file is a 4 KiB segment header, then extents of one layout, each a 4 KiB header and a pool slot as it lies in
memory. Every header ends with a digest of itself. Files are input from outside like any other: sizes are bounded, and
anything that does not parse is no header.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from moonpool.core.blocks import KEY_BYTES, ROOT
from moonpool.core.errors import ConfigError
from moonpool.core.layout import DIGEST_BYTES, KV, KVLayout
from moonpool.core.use import Use

VERSION = 1
HEADER_BYTES = 4096  # of a segment and of an extent: direct I/O wants whole pages
POSITION_BITS = 20
MAX_EXTENTS = 1 << POSITION_BITS  # of one segment
MAX_TEXT_BYTES = 512  # UTF-8 bytes of a tenant or a kind
MAX_COUNT = (1 << 32) - 1

_SELF = struct.Struct("<QQ")  # xxh3_128 of all bytes before it
_SEGMENT_MAGIC = b"MPSSDSEG"
_SEGMENT = struct.Struct("<8sHHIQQQQ")  # magic, version, flags, number, bytes, epoch, seen, extent bytes
_SHAPE = struct.Struct("<IIII")  # layers, kv heads, head dim, block tokens; then the texts
_TEXT = struct.Struct("<H")
EXTENT_MAGIC = b"MPSSDEXT"
_EXTENT = struct.Struct("<8sHHHHIIQQ16s16s16sII")
_BODY = HEADER_BYTES - _SELF.size
SEALED_VERSION = 2  # of an extent header: what follows its front is encrypted
SEALED_FRONT = struct.Struct("<8sHH8s16sQ")  # magic, version, 0, id of the key, life, number; see kvstore.sealing.vault
_TAG_BYTES = 16
SEALED_BODY_BYTES = HEADER_BYTES - SEALED_FRONT.size - 2 * _TAG_BYTES  # then the slot's tag, and the header's own
MAX_LAYERS = (SEALED_BODY_BYTES - _EXTENT.size - 2 * MAX_TEXT_BYTES) // DIGEST_BYTES
_HAS_LAYOUT, _SEALED_EXTENTS, _HAS_KIND = 1, 2, 4  # flags of a segment header


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """``epoch`` is the sequence number at which the file was given its layout: headers of earlier lives do not carry it.

    ``seen`` is the wall-clock second at which somebody last registered the layout. ``layout`` None: holds nothing yet.
    ``sealed``: its extents are encrypted.
    """

    number: int
    size: int
    epoch: int
    seen: int
    layout: KVLayout | None
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class ExtentHeader:
    """``layout`` is a fingerprint; ``digests`` are those of the layer slices, as they also stand in the slot's trailer."""

    segment: int
    position: int
    epoch: int
    sequence: int
    layout: str
    key: bytes
    parent: bytes | None
    use: Use
    digests: tuple[int, ...]


def extent_bytes(layout: KVLayout) -> int:
    return HEADER_BYTES + layout.slot_bytes


def capacity(size: int, layout: KVLayout) -> int:
    """Extents of ``layout`` in a segment file of ``size`` bytes."""
    return max(0, min((size - HEADER_BYTES) // extent_bytes(layout), MAX_EXTENTS - 1))


def offset_of(position: int, layout: KVLayout) -> int:
    """Where in its file an extent begins: its header first, then its slot."""
    return HEADER_BYTES + position * extent_bytes(layout)


def extent_of(segment: int, position: int) -> int:
    return segment << POSITION_BITS | position


def split_extent(extent: int) -> tuple[int, int]:
    """(segment, position)"""
    return extent >> POSITION_BITS, extent & (MAX_EXTENTS - 1)


def writable(layout: KVLayout, key: bytes, parent: bytes | None, use: Use) -> bool:
    """Whether a header can carry all of it."""
    texts = (use.tenant, use.kind)
    return (
        layout.layers <= MAX_LAYERS
        and len(key) == KEY_BYTES
        and (parent is None or len(parent) == KEY_BYTES)
        and all(len(text) <= MAX_TEXT_BYTES and len(text.encode(errors="replace")) <= MAX_TEXT_BYTES for text in texts)
    )


def _sealed(body: bytes) -> bytes:
    body = body.ljust(_BODY, b"\0")
    digest = xxhash.xxh3_128_intdigest(body)
    return body + _SELF.pack(digest & (1 << 64) - 1, digest >> 64)


def _opened(raw: bytes, magic: bytes) -> bool:
    if len(raw) != HEADER_BYTES or raw[: len(magic)] != magic:
        return False
    low, high = _SELF.unpack_from(raw, _BODY)
    return bool(xxhash.xxh3_128_intdigest(raw[:_BODY]) == high << 64 | low)


def encode_segment(header: SegmentHeader) -> bytes:
    layout = header.layout
    size = 0 if layout is None else extent_bytes(layout)
    flags = _SEALED_EXTENTS if header.sealed else 0
    texts: tuple[str, ...] = ()
    if layout is not None:
        flags |= _HAS_LAYOUT
        texts = (layout.model, layout.dtype, layout.order, layout.digest, layout.codec)
        if layout.kind != KV:  # a program that knows no kinds takes this for no header
            flags, texts = flags | _HAS_KIND, (*texts, layout.kind)
    parts = [_SEGMENT.pack(_SEGMENT_MAGIC, VERSION, flags, header.number, header.size, header.epoch, header.seen, size)]
    if layout is not None:
        parts.append(_SHAPE.pack(layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens))
        for text in texts:
            raw = text.encode()
            parts.append(_TEXT.pack(len(raw)) + raw)
    return _sealed(b"".join(parts))


def decode_segment(raw: bytes) -> SegmentHeader | None:
    """None where these are no bytes of a segment header of this version."""
    if not _opened(raw, _SEGMENT_MAGIC):
        return None
    _, version, flags, number, size, epoch, seen, one = _SEGMENT.unpack_from(raw)
    if version != VERSION or flags & ~(_HAS_LAYOUT | _SEALED_EXTENTS | _HAS_KIND):
        return None
    sealed = bool(flags & _SEALED_EXTENTS)
    if not flags & _HAS_LAYOUT:
        return SegmentHeader(number, size, epoch, seen, None, sealed)
    layout = _layout(raw, texts=6 if flags & _HAS_KIND else 5)
    if layout is None or extent_bytes(layout) != one:
        return None
    return SegmentHeader(number, size, epoch, seen, layout, sealed)


def _layout(raw: bytes, *, texts: int) -> KVLayout | None:
    at = _SEGMENT.size
    layers, kv_heads, head_dim, block_tokens = _SHAPE.unpack_from(raw, at)
    at += _SHAPE.size
    found: list[str] = []
    for _ in range(texts):
        (length,) = _TEXT.unpack_from(raw, at)
        at += _TEXT.size
        if length > MAX_TEXT_BYTES or at + length > _BODY - _TEXT.size:
            return None
        try:
            found.append(raw[at : at + length].decode())
        except UnicodeDecodeError:
            return None
        at += length
    model, dtype, *rest = found
    if not (0 < layers <= MAX_LAYERS and kv_heads > 0 and head_dim > 0):
        return None
    try:
        return KVLayout(model, layers, kv_heads, head_dim, dtype, block_tokens, *rest)
    except ConfigError:
        return None


def encode_extent(header: ExtentHeader) -> bytes:
    return _sealed(encode_body(header))


def encode_body(header: ExtentHeader) -> bytes:
    """A header without what vouches for it."""
    tenant, kind = header.use.tenant.encode(errors="replace"), header.use.kind.encode(errors="replace")
    fixed = _EXTENT.pack(
        EXTENT_MAGIC,
        VERSION,
        len(tenant),
        len(kind),
        len(header.digests),
        header.segment,
        header.position,
        header.epoch,
        header.sequence,
        bytes.fromhex(header.layout),
        header.key,
        ROOT if header.parent is None else header.parent,
        min(max(header.use.turn, 0), MAX_COUNT),
        min(max(header.use.prompt_tokens, 0), MAX_COUNT),
    )
    return fixed + tenant + kind + encode_digests(header.digests)


def encode_digests(digests: Sequence[int]) -> bytes:
    """As they stand in a slot's trailer."""
    return struct.pack(f"<{len(digests)}Q", *digests)


def decode_extent(raw: bytes) -> ExtentHeader | None:
    """None where these are no bytes of an extent header of this version."""
    return decode_body(raw[:_BODY]) if _opened(raw, EXTENT_MAGIC) else None


def decode_body(raw: bytes) -> ExtentHeader | None:
    """A header out of bytes that something else vouches for; None where they are none."""
    (_, version, tenant_len, kind_len, layers, segment, position, epoch, sequence, layout, key, parent, turn, prompt) = (
        _EXTENT.unpack_from(raw)
    )
    texts = _EXTENT.size + tenant_len + kind_len
    if version != VERSION or texts + layers * DIGEST_BYTES > len(raw):
        return None
    try:
        tenant = raw[_EXTENT.size : _EXTENT.size + tenant_len].decode()
        kind = raw[_EXTENT.size + tenant_len : texts].decode()
    except UnicodeDecodeError:
        return None
    digests = struct.unpack_from(f"<{layers}Q", raw, texts)
    parent_key = None if parent == ROOT else parent
    use = Use(tenant, kind, turn, prompt)
    return ExtentHeader(segment, position, epoch, sequence, layout.hex(), key, parent_key, use, digests)
