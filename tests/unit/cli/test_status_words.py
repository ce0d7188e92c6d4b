"""How `moonpool status` words what members say."""

from __future__ import annotations

import pytest

from moonpool.cli.status import _print
from moonpool.cluster.survey import Answer
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange


def test_bytes_have_units_counts_are_whole_and_documents_are_left_to_json(capsys: pytest.CaptureFixture[str]) -> None:
    member = Member(MemberId("store-a"), Role.STORE, NodeId("a"), Incarnation(1), "[::1]:1", 1, details={"probe": "[::1]:2"})
    words = {"carrier": "tcp", "lives": "[]", "recent": '{"answers":0}', "empty": "", "many": '["a"]'}
    numbers = {"pool_bytes": 4.5 * (1 << 30), "slots_total": 3_135_000.0, "share": 0.25, "fetch_bytes_in": 512.0, "none": 0.0}
    _print([Answer(MemberChange(member, Liveness.LIVE), numbers, words)])
    told = capsys.readouterr().out.split()
    assert told[-6:] == [
        "carrier=tcp",
        "probe=[::1]:2",
        "fetch_bytes_in=512B",
        "pool_bytes=4.5GiB",
        "share=0.25",
        "slots_total=3135000",
    ]
