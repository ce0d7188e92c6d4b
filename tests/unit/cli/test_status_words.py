"""How `moonpool status` words what members say."""

from __future__ import annotations

import pytest

from moonpool.cli.status import _print
from moonpool.cli.store_view import size
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


def test_a_worker_names_the_backend_that_computes(capsys: pytest.CaptureFixture[str]) -> None:
    details = {"engine": "fused", "model": "/m", "memory": "1 page"}
    member = Member(MemberId("both-0"), Role.BOTH, NodeId("a"), Incarnation(1), "[::1]:1", 1, details=details)
    _print([Answer(MemberChange(member, Liveness.LIVE), {}, {})])
    assert capsys.readouterr().out.splitlines()[-1].strip() == "engine=fused"


@pytest.mark.parametrize(
    ("value", "words"), [(0, "0 B"), (1 << 10, "1 KiB"), (1_536 << 20, "1.5 GiB"), (1_016 << 20, "1016 MiB"), (1023, "1023 B")]
)
def test_sizes_have_a_unit_and_no_exponent(value: int, words: str) -> None:
    assert size(value) == words
