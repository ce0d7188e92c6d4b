from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_replay_summary import record

from moonpool.core.errors import ConfigError
from moonpool.core.request import Targets
from moonpool.loadgen.record import Outcome, RequestRecord
from moonpool.loadgen.report import in_words, write_report
from moonpool.loadgen.summary import RunFacts, Summary, Transport, summarise
from moonpool.loadgen.transport import transport_of

WANTED = Targets(ttft_ms=4_000, tbt_ms=500)


def mixed(targets: Targets | None = None) -> list[RequestRecord]:
    made = [record(i, i * 0.5, targets=targets, ttft=0.1 + 0.05 * (i % 90)) for i in range(300)]
    for r in made[::7]:
        r.outcome, r.reason, r.first_text_s, r.gaps_ms = Outcome.REFUSED, f"reason {r.index % 9}", None, []
        r.retry_after_s = 1.0 + r.index % 3
    made[1].outcome, made[1].reason = Outcome.FAILED, "timed out"
    return made


def summary_of(records: list[RequestRecord], targets: Targets | None = None) -> Summary:
    facts = RunFacts(
        len(records), 150.0, targets or Targets(), transport=Transport("ucx", "tcp"), trace={"unsorted": 2, "blank": 0}
    )
    return summarise(records, facts)


PICTURES = ["ttft.png", "tbt.png", "goodput.png", "cache_hits.png", "refusals.png"]


@pytest.mark.parametrize(
    "records",
    [
        mixed(WANTED),
        mixed(WANTED)[:1],
        mixed(WANTED)[1:2],
        [record(0, targets=WANTED)],
        [record(i, 0.0, targets=WANTED) for i in range(3)],
    ],
    ids=["mixed", "one refused", "one failed", "one answered", "all at once"],
)
def test_the_report_is_records_numbers_words_and_pictures(tmp_path: Path, records: list[RequestRecord]) -> None:
    summary = summary_of(records, WANTED)
    files = write_report(tmp_path / "report", records, summary)
    assert [f.name for f in files] == ["requests.jsonl", "summary.json", "summary.txt", *PICTURES]
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [line["index"] for line in lines] == [r.index for r in records]
    assert lines[0]["outcome"] == records[0].outcome
    assert json.loads(files[1].read_text())["ok"] == summary.ok
    for picture in files[3:]:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_targets_no_goodput_is_drawn_or_printed(tmp_path: Path) -> None:
    records = mixed()
    summary = summary_of(records)
    names = [f.name for f in write_report(tmp_path, records, summary)]
    assert "goodput.png" not in names
    assert "throughput.png" in names
    assert "goodput" not in in_words(summary)
    assert json.loads((tmp_path / "summary.json").read_text())["goodput"] is None


def test_a_replay_that_sent_nothing_still_has_a_report(tmp_path: Path) -> None:
    assert len(write_report(tmp_path, [], summary_of([]))) == 8


def test_the_words_say_what_happened() -> None:
    words = in_words(summary_of(mixed(WANTED), WANTED))
    for part in (
        "300 planned", "43 refused", "1 failed", "TTFT at most 4 s and TBT at most 0.5 s", "reason 0", "timed out",
        "carrier ucx, UCX transport tcp", "unsorted: 2", "retry after",
    ):  # fmt: skip
        assert part in words
    assert "blank" not in words


def test_a_transport_of_ucx_is_told_only_where_ucx_carried() -> None:
    plain = summary_of(mixed(WANTED), WANTED)
    words = in_words(replace(plain, transport=Transport("segment, tcp", "unknown")))
    assert ("carrier segment, tcp" in words, "UCX" in words) == (True, False)


def test_a_cap_that_held_requests_back_is_called_no_open_loop() -> None:
    plain = summary_of(mixed(WANTED), WANTED)
    assert "NOT an open loop" in in_words(replace(plain, cap=4, held_back=12, longest_cap_wait_ms=800.0))
    assert "never reached" in in_words(replace(plain, cap=4))
    assert "cap" not in in_words(plain).split()


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="report: cannot write"):
        write_report(tmp_path / "file", [], summary_of([]))


@pytest.mark.parametrize(
    ("cluster", "transport"),
    [
        (None, Transport("unknown", "unknown")),
        ({}, Transport("unknown", "unknown")),
        ({"carrier": "ucx", "ucx_transport": "tcp"}, Transport("ucx", "tcp")),
        (
            {"members": [{"words": {"carrier": "segment, ucx"}}, {"words": {"carrier": "ucx", "ucx_transport": "tcp"}}]},
            Transport("segment, ucx", "tcp"),
        ),
        (
            {
                "members": [
                    {"words": {"carriers": "ucx (tcp), segment (mmap)"}},
                    {"words": {"carrier": "ucx", "ucx_transport": "shm"}},
                ]
            },
            Transport("segment, ucx", "tcp"),
        ),
        ({"members": [{"words": {"carriers": "ucx (unknown)"}}, {"words": {"carriers": ""}}]}, Transport("ucx", "unknown")),
        ({"carrier": 7, "members": [[{"carrier": "tcp"}]]}, Transport("tcp", "unknown")),
    ],
)
def test_carrier_and_transport_are_found_wherever_members_put_them(
    cluster: dict[str, object] | None, transport: Transport
) -> None:
    assert transport_of(cluster) == transport
