"""A conductor's record as lines of JSON: a first one about the record, then one for each entry, in order of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from moonpool.core.errors import ConfigError, InvalidRequest
from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.membership import MemberChange, WorkerReport
from moonpool.core.placement import Finished, PlaceRequest
from moonpool.scheduler.recording import Answered, Entry
from moonpool.wire.json_values import from_json, to_json

VERSION = 1


@dataclass(frozen=True, slots=True)
class Head:
    """``cut``: what came before was forgotten. ``booking_s``: the budget of a request where it was recorded."""

    moonpool_record: int
    conductor: str
    policy: str
    admission: str
    booking_s: float
    cut: bool


@dataclass(frozen=True, slots=True)
class _Line:
    """Exactly one of the others is there."""

    at: float
    member: MemberChange | None = None
    report: WorkerReport | None = None
    blocks: EventBatch | None = None
    snapshot: IndexSnapshot | None = None
    place: PlaceRequest | None = None
    answer: Answered | None = None
    finished: Finished | None = None


_KINDS = {
    MemberChange: "member",
    WorkerReport: "report",
    EventBatch: "blocks",
    IndexSnapshot: "snapshot",
    PlaceRequest: "place",
    Answered: "answer",
    Finished: "finished",
}


def lines(head: Head, entries: Iterable[Entry]) -> Iterator[bytes]:
    yield to_json(head) + b"\n"
    for entry in entries:
        yield to_json({"at": entry.at, _KINDS[type(entry.said)]: entry.said}) + b"\n"


def read_record(path: Path) -> tuple[Head, list[Entry]]:
    """ConfigError: the file cannot be read, or is no record; it names the line."""
    try:
        found = path.read_bytes().splitlines()
    except OSError as e:
        raise ConfigError(f"--replay: cannot read {path}: {e.strerror}; give a file written by --record", param="replay") from e
    return _parsed(path, found)


def _parsed(path: Path, found: Sequence[bytes]) -> tuple[Head, list[Entry]]:
    number = 1
    try:
        head = from_json(found[0] if found else b"", Head)
        if head.moonpool_record != VERSION:
            raise InvalidRequest(f"version {head.moonpool_record}; this program reads {VERSION}")
        entries = []
        for line in found[1:]:
            number += 1
            entries.append(_entry(from_json(line, _Line)))
    except InvalidRequest as e:
        raise ConfigError(
            f"--replay: {path} line {number}: {e.message}; give a file written by --record", param="replay"
        ) from e
    return head, entries


def _entry(line: _Line) -> Entry:
    said = [value for field in fields(line) if field.name != "at" and (value := getattr(line, field.name)) is not None]
    if len(said) != 1:
        raise InvalidRequest(f"json: {len(said)} kinds of entry in one line; exactly one is meant")
    return Entry(line.at, said[0])
