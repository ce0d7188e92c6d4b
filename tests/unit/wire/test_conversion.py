from __future__ import annotations

import dataclasses

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mirrors import pairs, values

from moonpool.core.errors import InvalidRequest
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member
from moonpool.core.placement import Segment
from moonpool.core.request import SamplingParams
from moonpool.wire import pb
from moonpool.wire.convert import from_wire, to_wire

PAIRS = pairs()
NAMES = [f"{cls.__name__}-{message.DESCRIPTOR.name}" for cls, message in PAIRS]
each_pair = pytest.mark.parametrize(("cls", "message"), PAIRS, ids=NAMES)
relaxed = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def test_the_nouns_that_cross_wires_are_all_mirrored() -> None:
    mirrored = {cls.__name__ for cls, _ in PAIRS}
    assert mirrored >= {
        *("Attempt", "Begun", "Drained", "Emission", "Failure", "Finished", "FirstToken", "Helper", "KVLayout", "Landed"),
        *("Landing", "LandingSlot", "LiveAttempt", "Member", "MemberChange", "PlaceRequest", "Placement", "PrefillJob"),
        *(
            "PrefillTiming",
            "Refusal",
            "Region",
            "Request",
            "Sampled",
            "SamplingParams",
            "Segment",
            "SlotRef",
            "StepTiming",
            "Targets",
        ),
        *("Ticket", "TopLogprob", "WorkerRef", "WorkerReport"),
    }


@each_pair
def test_every_field_has_its_twin(cls: type, message: type[Message]) -> None:
    here = {f.name for f in dataclasses.fields(cls)}
    there = {f.name for f in message.DESCRIPTOR.fields}
    assert here <= there
    if message is not pb.types.Error:
        assert here == there


@each_pair
@relaxed
@given(data=st.data())
def test_values_come_back_equal(cls: type, message: type[Message], data: st.DataObject) -> None:
    value = data.draw(values(cls, message))
    raw = to_wire(value, message()).SerializeToString()
    parsed = message()
    parsed.ParseFromString(raw)
    assert from_wire(parsed, cls) == value


@each_pair
@relaxed
@given(data=st.data())
def test_damaged_messages_are_read_or_refused(cls: type, message: type[Message], data: st.DataObject) -> None:
    raw = bytearray(to_wire(data.draw(values(cls, message)), message()).SerializeToString())
    for _ in range(data.draw(st.integers(0, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    parsed = message()
    try:
        parsed.ParseFromString(bytes(raw))
        from_wire(parsed, cls)
    except (DecodeError, InvalidRequest):
        pass


def test_an_unknown_enum_value_is_refused_by_field() -> None:
    with pytest.raises(InvalidRequest, match=r"Segment\.source.*nowhere") as caught:
        from_wire(pb.types.Segment(source="nowhere"), Segment)
    assert caught.value.param == "source"


def test_a_dataclass_that_checks_itself_refuses_through_the_same_error() -> None:
    with pytest.raises(InvalidRequest, match="block_tokens") as caught:
        from_wire(pb.types.KVLayout(dtype="float32", block_tokens=0), KVLayout)
    assert caught.value.param == "block_tokens"
    with pytest.raises(InvalidRequest, match="dtype"):
        from_wire(pb.types.Member(id="m", role="store", layout=pb.types.KVLayout(block_tokens=16, dtype="int3")), Member)


def test_a_layout_of_a_member_that_knows_no_kinds_is_one_of_keys_and_values() -> None:
    layout = KVLayout("m", 2, 1, 8, "float32")
    wire = to_wire(layout, pb.types.KVLayout())
    wire.ClearField("kind")
    assert from_wire(wire, KVLayout) == layout
    wire.kind = ""
    with pytest.raises(InvalidRequest, match="kind"):
        from_wire(wire, KVLayout)


def test_zero_and_absent_stay_apart_where_the_dataclass_tells_them_apart() -> None:
    for logprobs in (None, 0, 5):
        wire = to_wire(SamplingParams(max_tokens=1, logprobs=logprobs), pb.types.Sampling())
        assert from_wire(wire, SamplingParams).logprobs == logprobs
