"""Every decoder of ``wire`` with frames and messages gone wrong: a value, or an error of ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from mirrors import pairs, values
from support.mutations import each, fuzzing, mutated, odd_json, stands

from moonpool.core.errors import InvalidRequest, Overloaded
from moonpool.core.events import BlockChange, BlockEvent, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation, RequestId
from moonpool.core.landing import PushNotice, Region, SliceNotice
from moonpool.core.layout import KVLayout
from moonpool.wire import frames, host_frames, pb
from moonpool.wire.convert import from_wire, parse, to_wire
from moonpool.wire.host_frames import Granted, Hello, Kind, Link, Place, Wanted, Welcome
from moonpool.wire.json_values import from_json, to_json

KEY = bytes(range(16))
PAIRS = pairs()
NOTICE = PushNotice(1, RequestId("r"), 1, 2, 3, (SliceNotice(0, 4096, 16, 7), SliceNotice(1, 8192, 16, 8)))
BATCH = EventBatch("store-a", Incarnation(3), 9, (BlockEvent(next(iter(BlockChange)), Tier.G2, (KEY, KEY)),))
SNAPSHOT = IndexSnapshot("store-a", Incarnation(3), 9, ((Tier.G2, (KEY,)), (Tier.G3, ())))
FRAMES = (
    frames.encode_notice(NOTICE),
    frames.encode_events(BATCH),
    frames.encode_snapshot(SNAPSHOT),
    frames.encode_hand_over(77),
)


@fuzzing(150)
@given(mutated(*FRAMES))
def test_frames(data: bytes) -> None:
    decoders = (frames.kind_of, frames.decode_notice, frames.decode_events, frames.decode_snapshot, frames.decode_hand_over)
    each(decoders, data)


HOST_FRAMES = (
    host_frames.encode_hello(1, Hello(7, "tenant")),
    host_frames.encode_welcome(1, Welcome(1, 2, bytes(32), 3)),
    host_frames.encode_regions_from(2, 0),
    host_frames.encode_regions(2, [Region(0, "/dev/shm/x", 1 << 20, 4096)]),
    host_frames.encode_layout(3, KVLayout("ab" * 16, 2, 2, 16, "float32", 16)),
    host_frames.encode_layout(3, KVLayout("ab" * 16, 2, 1, 40, "float32", 16, kind="mla")),
    host_frames.encode_layout_number(3, 0, 8192),
    host_frames.encode_keys(Kind.EXISTS, 4, [KEY, KEY], word=1),
    host_frames.encode_bits(Kind.EXISTS, 4, b"\0\1"),
    host_frames.encode_ids(Kind.SEAL, 5, (1, 2)),
    host_frames.encode_count(Kind.SEAL, 5, 2),
    host_frames.encode_reserve(6, KEY, [Wanted(KEY, 0, Link.PARENT), Wanted(KEY, 0, Link.TIED)]),
    host_frames.encode_granted(6, [Granted(0, 1, 4096, 9)]),
    host_frames.encode_opened(Kind.OPEN, 7, 5, [[Place(0, 1, 4096)], []]),
    host_frames.encode_quarantine(8, KEY, 1, "reader"),
    host_frames.encode_error(9, Overloaded("full", retry_after_s=1.0)),
)
COUNTED = (
    host_frames.decode_layout,
    host_frames.decode_regions,
    host_frames.decode_keys,
    host_frames.decode_bits,
    host_frames.decode_ids,
    host_frames.decode_reserve,
    host_frames.decode_granted,
    host_frames.decode_opened,
)
BARE = (
    host_frames.decode_hello,
    host_frames.decode_welcome,
    host_frames.decode_layout_number,
    host_frames.decode_count,
    host_frames.decode_quarantine,
    host_frames.decode_error,
)


@fuzzing(200)
@given(mutated(*HOST_FRAMES))
def test_host_frames(data: bytes) -> None:
    """As a face does it: the head first, then the body that its kind has; here every one of them is tried."""
    frame = memoryview(data)
    head = stands(lambda: host_frames.head(frame))
    if isinstance(head, InvalidRequest):
        return
    assert isinstance(head, host_frames.Head)
    for decode in BARE:
        stands(partial(decode, frame))
    for counted in COUNTED:
        stands(partial(counted, frame, head.items))


@pytest.mark.parametrize(("cls", "message"), PAIRS, ids=[f"{cls.__name__}-{kind.DESCRIPTOR.name}" for cls, kind in PAIRS])
def test_messages(cls: type, message: type[Message]) -> None:
    """Mirrored messages, gone wrong as bytes: parsed, then taken for their dataclass."""

    @fuzzing(10)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        seed = to_wire(data.draw(values(cls, message)), message()).SerializeToString()
        raw = data.draw(mutated(seed, b""))
        stands(lambda: from_wire(parse(raw, message), cls))

    run()


@fuzzing(60)
@given(st.binary(max_size=300), st.sampled_from([pb.types.MemberChange, pb.store.GrantRequest, pb.admin.AdminStats]))
def test_any_bytes_parse_or_are_refused(data: bytes, kind: Any) -> None:
    stands(lambda: parse(data, kind))


@fuzzing(100)
@given(
    st.one_of(
        mutated(to_json(NOTICE)), odd_json({"landing": 1, "request": "r", "attempt": 1, "chunk": 2, "layer": 3, "slices": []})
    )
)
def test_values_as_json(data: bytes) -> None:
    stands(lambda: from_json(data, PushNotice))
    stands(lambda: from_json(data, dict[str, Any]))
