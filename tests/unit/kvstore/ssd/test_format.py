from __future__ import annotations

import hashlib
from dataclasses import fields, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support.ssd import LATENTS, OTHER, SMALL

from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.ssd.format import (
    HEADER_BYTES,
    MAX_LAYERS,
    MAX_TEXT_BYTES,
    ExtentHeader,
    SegmentHeader,
    capacity,
    decode_extent,
    decode_segment,
    encode_extent,
    encode_segment,
    extent_of,
    offset_of,
    split_extent,
    writable,
)

u32, u64, keys = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1), st.binary(min_size=16, max_size=16)
uses = st.builds(Use, st.text("aé漢", max_size=100), st.text("ab", max_size=MAX_TEXT_BYTES), u32, u32)
headers = st.builds(
    ExtentHeader,
    segment=u32,
    position=u32,
    epoch=u64,
    sequence=u64,
    layout=st.sampled_from([SMALL.fingerprint, OTHER.fingerprint]),
    key=keys,
    parent=st.one_of(st.none(), keys.filter(any)),
    use=uses,
    digests=st.lists(u64, max_size=MAX_LAYERS).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(headers)
def test_an_extent_header_comes_back_as_it_was_and_fills_one_page(header: ExtentHeader) -> None:
    raw = encode_extent(header)
    assert len(raw) == HEADER_BYTES
    assert decode_extent(raw) == header


@settings(max_examples=60, deadline=None)
@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_one_flipped_bit_makes_it_no_header(header: ExtentHeader, bit: int) -> None:
    raw = bytearray(encode_extent(header))
    raw[bit // 8] ^= 1 << bit % 8
    assert decode_extent(bytes(raw)) is None


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES)))
def test_other_bytes_are_no_header(raw: bytes) -> None:
    assert decode_extent(raw) is None
    assert decode_segment(raw) is None


@pytest.mark.parametrize(
    "layout", [None, SMALL, OTHER, replace(SMALL, model="é" * 100, order="vnni", digest="other", codec="fp8"), LATENTS]
)
def test_a_segment_header_names_the_whole_layout(layout: KVLayout | None) -> None:
    header = SegmentHeader(7, 256 << 20, 1 << 40, 1_800_000_000, layout)
    assert decode_segment(encode_segment(header)) == header
    raw = bytearray(encode_segment(header))
    for at in (0, 8, 20, 50, 100, HEADER_BYTES - 1):
        flipped = bytearray(raw)
        flipped[at] ^= 1
        assert decode_segment(bytes(flipped)) is None


def test_a_segment_header_carries_every_field_of_a_layout() -> None:
    """A field that is added to layouts and not to headers would let one layout pass for another."""
    layout = KVLayout("m", 3, 1, 7, "float16", 48, "vnni", "other", "int8", "mla")
    assert all(getattr(layout, f.name) != f.default for f in fields(KVLayout))
    header = decode_segment(encode_segment(SegmentHeader(1, 1 << 20, 2, 3, layout)))
    assert header is not None and header.layout is not None
    assert header.layout.fingerprint == layout.fingerprint


def test_a_segment_header_from_before_there_were_kinds_is_read_as_it_was_meant() -> None:
    """Bytes that a node without kinds writes are the bytes that are written now, and name no kind."""
    raw = encode_segment(SegmentHeader(7, 256 << 20, 1 << 40, 1_800_000_000, SMALL))
    assert hashlib.blake2b(raw, digest_size=8).hexdigest() == "9fc10a94538e34e9"
    header = decode_segment(raw)
    assert header is not None and header.layout is not None and header.layout.kind == "kv"


def test_a_pickle_is_no_header() -> None:
    raw = b"cos\nabort\n(tR.".ljust(HEADER_BYTES, b"\0")
    assert decode_segment(raw) is None
    assert decode_extent(raw) is None


def test_what_no_header_can_carry_is_not_written() -> None:
    key = bytes(range(16))
    assert writable(SMALL, key, None, Use())
    assert not writable(SMALL, key[:8], None, Use())
    assert not writable(SMALL, key, key[:8], Use())
    assert not writable(SMALL, key, None, Use("é" * MAX_TEXT_BYTES))
    assert not writable(replace(SMALL, layers=MAX_LAYERS + 1), key, None, Use())


@given(st.integers(0, 1 << 40), st.integers(0, (1 << 20) - 1))
def test_an_extent_names_segment_and_position(segment: int, position: int) -> None:
    assert split_extent(extent_of(segment, position)) == (segment, position)


def test_extents_lie_inside_their_segment_on_whole_pages() -> None:
    for layout in (SMALL, OTHER):
        size = 1 << 20
        n = capacity(size, layout)
        assert n > 0
        assert offset_of(n, layout) <= size < offset_of(n + 1, layout)
        assert offset_of(n - 1, layout) % HEADER_BYTES == 0
    assert capacity(HEADER_BYTES, SMALL) == 0
