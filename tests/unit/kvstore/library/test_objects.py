from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.digests import slice_digest
from moonpool.core.errors import DigestMismatch, InvalidRequest
from moonpool.kvstore import slices
from moonpool.kvstore.library import chunks
from moonpool.kvstore.library.objects import (
    CHUNK,
    CLASSES,
    HEADER_BYTES,
    MAX_BYTES,
    RAW_LAYOUTS,
    SLOT_MORE,
    Chunk,
    Names,
    Shape,
    decode_header,
    encode_header,
    plan,
    require_fits,
)
from moonpool.wire.host_frames import Place

KEY, NONCE = b"k" * 16, b"n" * 16
sizes = st.integers(0, 3 * CHUNK + 5) | st.sampled_from([0, 1, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1])
dtypes = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=24)
dims = st.lists(st.integers(0, 2**40), max_size=8).map(tuple)


@given(sizes)
def test_chunks_follow_one_another_and_cover_the_value(size: int) -> None:
    found = plan(KEY, NONCE, size)
    assert [c.start for c in found[1:]] == [c.end for c in found[:-1]]
    assert (found[0].start, found[-1].end, found[-1].key) == (0, size, KEY)
    assert len({c.key for c in found}) == len(found)
    for chunk in found:
        assert chunk.end - chunk.start <= CLASSES[chunk.size_class]
    taken = sum(CLASSES[c.size_class] for c in found)
    assert taken <= max(2 * size if size <= CHUNK else size * 9 // 8, CLASSES[0])
    assert len({c.size_class for c in found}) == 1  # one layout: a value is a sequence like any other
    require_fits(Shape(0, size), [Place(c.size_class, 0, 0) for c in found])


def test_a_value_above_the_limit_is_refused_before_anything_is_made() -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        plan(KEY, NONCE, MAX_BYTES + 1)


def test_chunks_of_two_puts_of_one_key_have_no_name_in_common_but_the_last() -> None:
    one, other = plan(KEY, NONCE, 3 * CHUNK), plan(KEY, b"m" * 16, 3 * CHUNK)
    assert {c.key for c in one} & {c.key for c in other} == {KEY}


@given(
    st.integers(0, 2), st.integers(0, 2**63), st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=24), dims
)
def test_headers_come_back_equal(kind: int, size: int, dtype: str, shape: tuple[int, ...]) -> None:
    value = Shape(kind, size, dtype, shape)
    raw = encode_header(value, NONCE)
    assert decode_header(raw.ljust(HEADER_BYTES, b"?")) == (value, NONCE)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_bytes_that_are_no_header_are_a_mismatch(raw: bytes) -> None:
    with pytest.raises(DigestMismatch):
        decode_header(raw)


def test_a_header_that_claims_more_than_lies_there_is_a_mismatch() -> None:
    with pytest.raises(DigestMismatch):
        require_fits(Shape(0, 100 * CHUNK), [Place(0, 0, 0)])


@given(st.binary(min_size=1, max_size=40), st.binary(min_size=1, max_size=40))
def test_names_depend_on_the_hash_key_the_namespace_and_the_tenant(one: bytes, other: bytes) -> None:
    names = [Names(k, ns, tenant) for k in (b"a" * 32, b"b" * 32) for ns, tenant in (("x", "y"), ("y", "x"), ("", "xy"))]
    keys = {n.key(one) for n in names}
    assert len(keys) == len(names)
    assert (names[0].key(one) == names[0].key(other)) is (one == other)
    assert all(len(key) == 16 for key in keys)  # 128 bits


def test_a_chunk_has_the_digest_that_every_reader_of_slots_expects() -> None:
    for size in (0, 1, 5000, CHUNK):
        (chunk,) = plan(KEY, NONCE, size)
        layout = RAW_LAYOUTS[chunk.size_class]
        slot = np.random.default_rng(size).integers(0, 255, layout.slot_bytes + 4096, dtype=np.uint8)
        value = np.random.default_rng(size + 1).integers(0, 255, size, dtype=np.uint8)
        parts = chunks.Parts([value.data] if size else [])
        chunks.fill([chunks.fill_chunk(slot.data, 4096, chunk, parts, encode_header(Shape(0, size), NONCE))])
        assert slices.is_whole(layout, slot, 4096, KEY)
        assert int(slices.trailer_of(layout, slot, 4096)[0]) == slice_digest(layout, slot[4096:], KEY, 0, 1)
        start = 4096 + HEADER_BYTES
        assert (slot[start : start + size] == value).all()


@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=6), st.data())
def test_values_in_pieces_come_back_in_other_pieces(pieces: list[int], data: st.DataObject) -> None:
    value = np.random.default_rng(pieces).integers(0, 255, sum(pieces), dtype=np.uint8)
    cuts = np.cumsum(pieces)[:-1]
    memory = {}
    source, header = chunks.Parts([p.data for p in np.split(value, cuts)]), encode_header(Shape(0, len(value)), NONCE)
    found = plan(KEY, NONCE, len(value))
    for chunk in found:
        memory[chunk] = np.zeros(RAW_LAYOUTS[chunk.size_class].slot_bytes, np.uint8)
        own = header if chunk is found[-1] else None
        chunks.fill([chunks.fill_chunk(memory[chunk].data, 0, chunk, source, own)])
    out = np.zeros(len(value), np.uint8)
    at = data.draw(st.integers(0, len(value)))
    target = chunks.Parts([part.data for part in (out[:at], out[at:]) if len(part)])
    for chunk in found:
        mine = chunks.header_of(memory[chunk].data, 0) if chunk is found[-1] else None
        assert chunks.read([chunks.read_chunk(memory[chunk].data, 0, chunk, target, mine)]) == [True]
    assert (out == value).all()


def stored(size: int) -> tuple[Chunk, np.ndarray[Any, np.dtype[np.uint8]]]:
    """A chunk that holds a whole value, and its slot."""
    (chunk,) = plan(KEY, NONCE, size)
    slot, value = np.zeros(RAW_LAYOUTS[chunk.size_class].slot_bytes, np.uint8), np.arange(size).astype(np.uint8)
    header = encode_header(Shape(0, size), NONCE)
    chunks.fill([chunks.fill_chunk(slot.data, 0, chunk, chunks.Parts([value.data]), header)])
    return chunk, slot


def is_right(chunk: Chunk, slot: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    header = chunks.header_of(slot.data, 0)
    target = chunks.Parts([np.zeros(chunk.end - chunk.start, np.uint8).data])
    return chunks.read([chunks.read_chunk(slot.data, 0, chunk, target, header)])[0]


@given(st.integers(1, 20_000), st.data())
def test_any_flipped_bit_of_a_slot_is_a_mismatch(size: int, data: st.DataObject) -> None:
    chunk, slot = stored(size)
    assert is_right(chunk, slot)
    assert RAW_LAYOUTS[chunk.size_class].slot_bytes == CLASSES[chunk.size_class] + SLOT_MORE
    bit = data.draw(st.integers(0, 8 * (RAW_LAYOUTS[chunk.size_class].block_bytes + 8) - 1))
    slot[bit // 8] ^= 1 << bit % 8
    assert not is_right(chunk, slot)


def test_a_right_chunk_under_another_name_is_a_mismatch() -> None:
    chunk, slot = stored(100)
    assert is_right(chunk, slot)
    assert not is_right(chunk._replace(key=b"o" * 16), slot)


def test_xxhash_streams_to_the_digest_of_one_piece() -> None:
    raw = bytes(range(256)) * 4000
    mix = xxhash.xxh3_64(seed=7)
    mix.update(raw[:131072])
    mix.update(raw[131072:])
    assert mix.intdigest() == xxhash.xxh3_64_intdigest(raw, 7)
