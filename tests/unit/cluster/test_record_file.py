"""A record survives its way through lines of JSON, and bad files are refused by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.cluster.record_file import VERSION, Head, lines, read_record
from moonpool.core.errors import ConfigError, Reason
from moonpool.core.events import BlockChange, BlockEvent, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import LiveAttempt, Liveness, Member, MemberChange, PrefillTiming, StepTiming, WorkerReport
from moonpool.core.placement import Finished, Placement, PlaceRequest, Refusal, Segment, Source, WorkerRef
from moonpool.core.request import Targets
from moonpool.scheduler.recording import Entry, answered

LIFE = Incarnation(7)
KEY = bytes(range(16))
HEAD = Head(VERSION, "conductor-0", "moonpool", "moonpool", 120.0, cut=False)
LAYOUT = KVLayout("m", 2, 1, 8, "float32", block_tokens=16)
WORKER = WorkerRef(MemberId("prefill-0"), LIFE, NodeId("a"), "h:1")
ENTRIES = [
    Entry(
        1.0, MemberChange(Member(MemberId("store-a"), Role.STORE, NodeId("a"), LIFE, "h:2", 3, layout=LAYOUT), Liveness.LIVE)
    ),
    Entry(2.0, WorkerReport(MemberId("prefill-0"), LIFE, (LiveAttempt("r", 1, 9, 9),), 1, 2, (PrefillTiming(9, 0, 0.5),))),
    Entry(2.5, WorkerReport(MemberId("decode-0"), LIFE, steps=(StepTiming(2, 30, 0.02),))),
    Entry(3.0, EventBatch("a", LIFE, 4, (BlockEvent(BlockChange.REMOVED, Tier.G3, (KEY,)),))),
    Entry(3.5, IndexSnapshot("a", LIFE, 4, ((Tier.G2, (KEY, KEY[::-1])),))),
    Entry(4.0, PlaceRequest("r", 1, (KEY,), 17, 8, Targets(100.0, None), "alice", (MemberId("x"),), 1, 2, "tool")),
    Entry(4.0, answered("r", 1, Placement(WORKER, WORKER, (Segment(0, 1, Source.FETCH, NodeId("b")),), 12.0, 3.0, 9))),
    Entry(4.5, answered("s", 1, Refusal(Reason.TARGETS_MISSED, "late", 2.0))),
    Entry(5.0, Finished("r", 1, 9, 12.0, 3.0, 8, 16, "ok")),
]


def test_every_kind_of_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_bytes(b"".join(lines(HEAD, ENTRIES)))
    assert path.read_bytes().count(b"\n") == len(ENTRIES) + 1
    assert read_record(path) == (HEAD, ENTRIES)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "line 1"),
        (b"not json\n", "line 1"),
        (b'{"moonpool_record":99,"conductor":"c","policy":"p","admission":"a","booking_s":1,"cut":false}\n', "version 99"),
        (next(lines(HEAD, ())) + b'{"at":1.0}\n', "line 2: json: 0 kinds"),
        (next(lines(HEAD, ())) + b'{"at":1.0,"place":{"request":5}}\n', "line 2"),
        (next(lines(HEAD, ())) + b'{"at":1.0,"blocks":{"holder":"a","incarnation":1,"number":1,"events":[3]}}\n', "line 2"),
    ],
)
def test_a_file_that_is_no_record_is_refused_by_line(tmp_path: Path, text: bytes, named: str) -> None:
    path = tmp_path / "record.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=named):
        read_record(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_record(tmp_path / "nowhere")
