from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.errors import Busy, InvalidRequest, LayoutMismatch, MoonpoolError
from moonpool.core.landing import Region
from moonpool.core.layout import ITEM_BYTES, KVLayout
from moonpool.wire import host_frames as frames
from moonpool.wire.host_frames import Granted, Hello, Kind, Link, Place, Wanted, Welcome

u16 = st.integers(0, 2**16 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
some = st.integers(1, 2**32 - 1)
key = st.binary(min_size=16, max_size=16)
keys = st.lists(key, max_size=40)
ids = st.lists(u64, max_size=40)
text = st.text(st.characters(codec="utf-8"), max_size=40)
places = st.lists(st.lists(st.builds(Place, u16, u32, u64), max_size=4), max_size=6)
dtypes, tokens = st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 512)
layouts = st.one_of(
    st.builds(KVLayout, text, some, some, some, dtypes, tokens, text, text),
    st.builds(KVLayout, text, some, st.just(1), some, dtypes, tokens, text, text, kind=st.just("mla")),
)

# how to decode each frame, given its announced number of items
DECODERS: dict[str, Callable[[memoryview, int], Any]] = {
    "hello": lambda frame, _: frames.decode_hello(frame),
    "welcome": lambda frame, _: frames.decode_welcome(frame),
    "regions": frames.decode_regions,
    "layout": frames.decode_layout,
    "layout_number": lambda frame, _: frames.decode_layout_number(frame),
    "keys": frames.decode_keys,
    "bits": frames.decode_bits,
    "ids": frames.decode_ids,
    "count": lambda frame, _: frames.decode_count(frame),
    "reserve": frames.decode_reserve,
    "granted": frames.decode_granted,
    "opened": frames.decode_opened,
    "quarantine": lambda frame, _: frames.decode_quarantine(frame),
    "error": lambda frame, _: frames.decode_error(frame),
}


def there_and_back(frame: bytes, decoder: str, number: int, kind: Kind) -> Any:
    view = memoryview(frame)
    head = frames.head(view)
    assert (head.kind, head.number) == (kind, number)
    return DECODERS[decoder](view, head.items)


@given(u32, u32, text)
def test_a_hello_comes_back_equal(number: int, client: int, tenant: str) -> None:
    hello = Hello(client, tenant)
    assert there_and_back(frames.encode_hello(number, hello), "hello", number, Kind.HELLO) == hello


@given(u32, st.builds(Welcome, u64, u64, st.binary(min_size=32, max_size=32), u32))
def test_a_welcome_comes_back_equal(number: int, welcome: Welcome) -> None:
    assert there_and_back(frames.encode_welcome(number, welcome), "welcome", number, Kind.HELLO) == welcome


@given(u32, st.lists(st.builds(Region, u32, text, u64, u64), max_size=5))
def test_regions_come_back_equal(number: int, regions: list[Region]) -> None:
    assert there_and_back(frames.encode_regions(number, regions), "regions", number, Kind.REGIONS) == regions


@given(u32, layouts)
def test_a_layout_comes_back_equal(number: int, layout: KVLayout) -> None:
    assert there_and_back(frames.encode_layout(number, layout), "layout", number, Kind.LAYOUT) == layout


@given(u32, keys, u32)
def test_keys_come_back_in_order(number: int, asked: list[bytes], word: int) -> None:
    frame = frames.encode_keys(Kind.OPEN, number, asked, word=word)
    assert there_and_back(frame, "keys", number, Kind.OPEN) == (word, asked)


@given(u32, ids)
def test_ids_come_back_in_order(number: int, asked: list[int]) -> None:
    assert there_and_back(frames.encode_ids(Kind.SEAL, number, asked), "ids", number, Kind.SEAL) == tuple(asked)


@given(u32, key, st.lists(st.builds(Wanted, key, u16, st.sampled_from(Link)), max_size=20))
def test_blocks_to_reserve_come_back_equal(number: int, parent: bytes, wanted: list[Wanted]) -> None:
    if wanted:
        wanted[0] = wanted[0]._replace(link=Link.NONE)
    frame = frames.encode_reserve(number, parent, wanted)
    assert there_and_back(frame, "reserve", number, Kind.RESERVE) == (parent, wanted)


@given(u32, st.lists(st.builds(Granted, st.integers(0, len(frames.STATES) - 1), u32, u64, u64), max_size=20))
def test_grants_come_back_equal(number: int, granted: list[Granted]) -> None:
    assert there_and_back(frames.encode_granted(number, granted), "granted", number, Kind.RESERVE) == granted


@given(u32, u64, places)
def test_places_come_back_by_value(number: int, ticket: int, opened: list[list[Place]]) -> None:
    frame = frames.encode_opened(Kind.OPEN, number, ticket, opened)
    assert there_and_back(frame, "opened", number, Kind.OPEN) == (ticket, opened)


@given(u32, key, u32, text)
def test_a_quarantine_comes_back_equal(number: int, named: bytes, layer: int, place: str) -> None:
    frame = frames.encode_quarantine(number, named, layer, place)
    assert there_and_back(frame, "quarantine", number, Kind.QUARANTINE) == (named, layer, place)


@pytest.mark.parametrize("error", [Busy("no room"), LayoutMismatch("a here, b there"), InvalidRequest("x" * 5000)])
def test_an_error_comes_back_as_its_class_with_a_bounded_message(error: MoonpoolError) -> None:
    found = there_and_back(frames.encode_error(7, error), "error", 7, Kind.ERROR)
    assert type(found) is type(error)
    assert found.message == error.message[: frames.MAX_TEXT]


@pytest.mark.parametrize("decoder", DECODERS)
@given(data=st.data())
def test_garbage_is_refused_or_decoded_and_nothing_else(decoder: str, data: st.DataObject) -> None:
    """Bytes of any kind, and right heads with any body and any number of items."""
    body = data.draw(st.binary(max_size=200))
    items = data.draw(st.integers(0, frames.MAX_ITEMS))
    frame = memoryview(data.draw(st.sampled_from([body, frames.encode_keys(Kind.OPEN, 1, [])[: frames.HEAD_BYTES] + body])))
    try:
        frames.head(frame)
        DECODERS[decoder](frame, items)
    except InvalidRequest:
        pass


@given(st.binary(max_size=40))
def test_a_head_is_a_known_kind_of_this_version_with_few_items_or_refused(raw: bytes) -> None:
    try:
        head = frames.head(memoryview(raw))
    except InvalidRequest:
        return
    assert raw[1] == frames.VERSION
    assert head.items <= frames.MAX_ITEMS
    assert isinstance(head.kind, Kind)


def test_a_frame_above_the_limit_is_refused_unread() -> None:
    with pytest.raises(InvalidRequest, match="bytes; one has"):
        frames.head(memoryview(bytes(frames.MAX_FRAME_BYTES + 1)))


def test_the_largest_questions_and_answers_fit_into_a_frame() -> None:
    n = frames.MAX_ITEMS
    for frame in (
        frames.encode_keys(Kind.EXISTS, 1, [bytes(16)] * n),
        frames.encode_reserve(1, None, [Wanted(bytes(16), 1, Link.NONE)] * n),
        frames.encode_granted(1, [Granted(0, 0, 0, 0)] * n),
        frames.encode_opened(Kind.PIN, 1, 1, [[Place(0, 0, 0)]] * n),
        frames.encode_ids(Kind.SEAL, 1, [0] * n),
        frames.encode_regions(1, [Region(1, "x" * 255, 1, 1)] * frames.REGIONS_AT_ONCE),
    ):
        frames.head(memoryview(frame))


def test_a_first_block_cannot_follow_one_before_it() -> None:
    frame = memoryview(frames.encode_reserve(1, None, [Wanted(bytes(16), 0, Link.TIED)]))
    with pytest.raises(InvalidRequest, match="nothing comes before"):
        frames.decode_reserve(frame, 1)
