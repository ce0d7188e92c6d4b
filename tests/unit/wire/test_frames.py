from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.core.errors import InvalidRequest
from moonpool.core.events import BlockChange, BlockEvent, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation, RequestId
from moonpool.core.landing import PushNotice, SliceNotice
from moonpool.wire import frames

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
name = st.text(st.characters(codec="utf-8"), max_size=20)
keys = st.lists(st.binary(min_size=16, max_size=16), max_size=6).map(tuple)
notices = st.builds(
    PushNotice,
    u64,
    name.map(RequestId),
    u32,
    u32,
    u32,
    st.lists(st.builds(SliceNotice, u32, u64, u32, u64), max_size=5).map(tuple),
)
events = st.builds(BlockEvent, st.sampled_from(BlockChange), st.sampled_from(Tier), keys)
batches = st.builds(EventBatch, name, u64.map(Incarnation), u64, st.lists(events, max_size=4).map(tuple))
snapshots = st.builds(
    IndexSnapshot, name, u64.map(Incarnation), u64, st.lists(st.tuples(st.sampled_from(Tier), keys), max_size=4).map(tuple)
)
DECODERS: list[Callable[[bytes], object]] = [frames.decode_notice, frames.decode_events, frames.decode_snapshot]
each_decoder = pytest.mark.parametrize("decode", DECODERS, ids=["notice", "events", "snapshot"])


@given(notices)
def test_notices_come_back_equal(value: PushNotice) -> None:
    frame = frames.encode_notice(value)
    assert frames.kind_of(frame) is frames.Kind.NOTICE
    assert frames.decode_notice(frame) == value


@given(batches)
def test_event_batches_come_back_equal(value: EventBatch) -> None:
    frame = frames.encode_events(value)
    assert frames.kind_of(frame) is frames.Kind.EVENTS
    assert frames.decode_events(frame) == value


@given(snapshots)
def test_snapshots_come_back_equal(value: IndexSnapshot) -> None:
    frame = frames.encode_snapshot(value)
    assert frames.kind_of(frame) is frames.Kind.SNAPSHOT
    assert frames.decode_snapshot(frame) == value


@each_decoder
@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=200), header=st.sampled_from([b"", b"\x01\x01", b"\x02\x01", b"\x03\x01"]))
@example(raw=b"", header=b"")
@example(raw=b"\x81\xa1x" + b"\x91" * 100_000, header=b"\x02\x01")
@example(raw=b"\xdd\xff\xff\xff\xff", header=b"\x03\x01")
@example(raw=b"\x81\xa6holder\xa2\xff\xfe", header=b"\x02\x01")
def test_random_bytes_raise_nothing_but_invalid_request(decode: Callable[[bytes], object], raw: bytes, header: bytes) -> None:
    try:
        decode(header + raw)
    except InvalidRequest:
        pass


@settings(max_examples=300, deadline=None)
@given(
    frame=st.one_of(
        notices.map(frames.encode_notice), batches.map(frames.encode_events), snapshots.map(frames.encode_snapshot)
    ),
    damage=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 5),
)
def test_damaged_frames_are_read_as_something_valid_or_refused(frame: bytes, damage: list[tuple[int, int]], cut: int) -> None:
    raw = bytearray(frame)
    for at, value in damage:
        raw[at % len(raw)] = value
    for decode in DECODERS:
        try:
            decode(bytes(raw[: len(raw) - cut]))
        except InvalidRequest:
            pass


@given(batches, st.binary(min_size=1, max_size=8))
def test_trailing_bytes_are_refused(value: EventBatch, tail: bytes) -> None:
    with pytest.raises(InvalidRequest, match="malformed"):
        frames.decode_events(frames.encode_events(value) + tail)


@pytest.mark.parametrize(("header", "named"), [(b"\x01\x01", "kind 1"), (b"\x02\x02", "version 2"), (b"\x09\x01", "kind 9")])
def test_another_kind_or_version_is_refused_by_name(header: bytes, named: str) -> None:
    frame = header + frames.encode_events(EventBatch("a", Incarnation(1), 1, ()))[2:]
    with pytest.raises(InvalidRequest, match=named):
        frames.decode_events(frame)


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\x7f\x01"])
def test_kind_of_nothing_known_is_refused(frame: bytes) -> None:
    with pytest.raises(InvalidRequest):
        frames.kind_of(frame)


def test_sizes_are_bounded_both_ways() -> None:
    slices = tuple(SliceNotice(1, 2**40 + i, 64, 2**63 + i) for i in range(40_000))
    with pytest.raises(InvalidRequest, match="send it in parts"):
        frames.encode_notice(PushNotice(1, RequestId("r"), 1, 0, 0, slices))
    with pytest.raises(InvalidRequest, match="has 2 to"):
        frames.decode_notice(bytes((frames.Kind.NOTICE, frames.VERSION)) + b"\xc0" * frames.MAX_NOTICE_BYTES)


def test_values_of_the_wrong_type_are_refused() -> None:
    good = frames.encode_events(EventBatch("a", Incarnation(1), 1, ()))
    assert frames.decode_events(good).number == 1
    with pytest.raises(InvalidRequest, match="number"):
        frames.decode_events(good.replace(b"\xa6number\x01", b"\xa6number\xa1"))
    with pytest.raises(InvalidRequest):
        frames.decode_events(good.replace(b"\xa6holder\xa1a", b"\xa6holder\x01\x01"))
