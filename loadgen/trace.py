"""Request traces in the Mooncake JSONL format (Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025).

One JSON object per line, in arrival order, the file plain or gzip:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 59]}

``timestamp`` is the arrival in ms; ``hash_ids`` holds one id per block of ``block_tokens`` prompt tokens (512 in the
published traces), the last, partly filled one included. An id names a block *and everything before it*, so two rows
share a prefix exactly as far as their ids agree.

Rules for odd input. ``strict`` (the default) raises ConfigError naming the row (the line of the file, from 1);
``adjust`` repairs, goes on and counts what it did in ``TraceNotes``:

    what the row says                        strict   adjust
    ids != ceil(input_length / block)        error    ids cut, or continued with ids no other row has
    no ids (absent, null or empty)           error    ids no other row has: the prompt shares nothing
    input_length 0                           error    row dropped
    a value that is not a number, is         error    row dropped
      negative or absent; not an object
    a line that is not JSON                  error    row dropped
    the same, as last line, without newline  error    row dropped, counted as ``truncated``

Accepted in both: blank lines, other fields (kept out), a byte order mark, CRLF, output_length 0 (a replay asks for
one token, since a completion cannot have none). Rows out of time order are sorted and counted; equal timestamps keep
the order of the file.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonpool.core.blocks import blocks_for
from moonpool.core.errors import ConfigError

BLOCK_TOKENS = 512
MAX_PROMPT_TOKENS = 1 << 24  # a longer prompt is a broken row: repairing it would make millions of ids
MAX_HASH_ID = (1 << 63) - 1
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. ``len(hash_ids) == ceil(input_length / block_tokens)`` always. ``row``: line in the file, 0 if made here."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    row: int = 0


@dataclass(slots=True)
class TraceNotes:
    """What reading did to the rows; all zero for a clean file."""

    blank: int = 0
    unsorted: int = 0  # rows earlier than one before them
    ids_cut: int = 0
    ids_continued: int = 0
    ids_made: int = 0
    empty_prompts_dropped: int = 0
    unreadable_dropped: int = 0
    truncated: int = 0

    @property
    def adjusted(self) -> int:
        return (
            self.ids_cut
            + self.ids_continued
            + self.ids_made
            + self.empty_prompts_dropped
            + self.unreadable_dropped
            + self.truncated
        )


@dataclass(frozen=True, slots=True)
class Trace:
    rows: tuple[TraceRow, ...]
    block_tokens: int
    notes: TraceNotes = field(default_factory=TraceNotes)


class _RowFault(Exception):
    """Why a row cannot be used as it is; ``empty`` marks a prompt without tokens."""

    def __init__(self, why: str, *, empty: bool = False) -> None:
        super().__init__(why)
        self.empty = empty


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS, adjust: bool = False) -> Trace:
    """All rows of ``path`` in time order. ConfigError: unreadable file, odd row (see the module), or no row at all."""
    if block_tokens < 1:
        raise ConfigError(f"trace block tokens: {block_tokens} is not a block size; use 1 or more", param="trace_block_tokens")
    reader = _Reader(path, block_tokens, adjust)
    try:
        for number, line in enumerate(_lines(path), 1):
            reader.take(number, line)
    except (OSError, EOFError, zlib.error) as e:
        raise ConfigError(f"trace: cannot read {path}: {e}; give a JSONL file, plain or gzip", param="trace") from e
    return reader.finish()


def write_trace(path: Path, rows: Iterable[TraceRow]) -> None:
    """Write ``rows`` as they come; gzip when the name ends in .gz (with no time stamp inside: equal rows, equal bytes)."""
    lines = (
        json.dumps(
            {
                "timestamp": int(r.timestamp_ms) if r.timestamp_ms == int(r.timestamp_ms) else r.timestamp_ms,
                "input_length": r.input_length,
                "output_length": r.output_length,
                "hash_ids": list(r.hash_ids),
            }
        )
        + "\n"
        for r in rows
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                    packed.writelines(line.encode() for line in lines)
            else:
                raw.writelines(line.encode() for line in lines)
    except OSError as e:
        raise ConfigError(f"trace: cannot write {path}: {e.strerror}; give a writable path", param="trace") from e


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if packed:
            with gzip.GzipFile(fileobj=raw) as plain:
                yield from plain
        else:
            yield from raw


class _Reader:
    def __init__(self, path: Path, block_tokens: int, adjust: bool) -> None:
        self._path = path
        self._block = block_tokens
        self._adjust = adjust
        self._rows: list[TraceRow] = []
        self._short: list[int] = []  # positions in _rows whose ids are continued once the largest id is known
        self._largest = -1
        self._notes = TraceNotes()

    def take(self, number: int, line: bytes) -> None:
        text = (line.removeprefix(_BOM) if number == 1 else line).strip()
        if not text:
            self._notes.blank += 1
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as e:  # ValueError: also bad UTF-8 and numbers of absurd length
            self._unreadable(number, line, e)
            return
        try:
            row = _row(value, number)
            self._check_ids(row)
        except _RowFault as e:
            if not self._adjust:
                raise self._error(number, str(e)) from None
            if e.empty:
                self._notes.empty_prompts_dropped += 1
            else:
                self._notes.unreadable_dropped += 1

    def _unreadable(self, number: int, line: bytes, cause: Exception) -> None:
        cut = not line.endswith(b"\n")
        if not self._adjust:
            what = "the last line is cut off" if cut else "not a JSON object"
            raise self._error(number, f"{what} ({str(cause)[:80]})") from cause
        if cut:
            self._notes.truncated += 1
        else:
            self._notes.unreadable_dropped += 1

    def _check_ids(self, row: TraceRow) -> None:
        wanted = blocks_for(row.input_length, self._block)
        have = len(row.hash_ids)
        if have != wanted:
            if not self._adjust:
                raise _RowFault(self._ids_fault(row, wanted))
            if have == 0:
                self._notes.ids_made += 1
            elif have > wanted:
                self._notes.ids_cut += 1
            else:
                self._notes.ids_continued += 1
            if have < wanted:
                self._short.append(len(self._rows))
        self._largest = max(self._largest, max(row.hash_ids, default=-1))
        self._rows.append(TraceRow(row.timestamp_ms, row.input_length, row.output_length, row.hash_ids[:wanted], row.row))

    def _ids_fault(self, row: TraceRow, wanted: int) -> str:
        have = len(row.hash_ids)
        if have == 0:
            return "hash_ids is missing or empty"
        fits = [size for size in (1 << p for p in range(4, 13)) if blocks_for(row.input_length, size) == have]
        hint = f" (it would fit {fits[0]} tokens per id)" if len(fits) == 1 else ""
        return (
            f"hash_ids has {have} ids, but input_length {row.input_length} needs {wanted} at {self._block} tokens per id{hint}"
        )

    def _error(self, number: int, why: str) -> ConfigError:
        return ConfigError(
            f"trace {self._path}: row {number}: {why}; mend the row, give the trace's "
            "tokens per id (replay: --trace-block-tokens; simulate: --set model.block_tokens=), or read it with --adjust",
            param="trace",
        )

    def finish(self) -> Trace:
        fresh = self._largest + 1
        for position in self._short:
            row = self._rows[position]
            lacking = blocks_for(row.input_length, self._block) - len(row.hash_ids)
            ids = row.hash_ids + tuple(range(fresh, fresh + lacking))
            fresh += lacking
            self._rows[position] = TraceRow(row.timestamp_ms, row.input_length, row.output_length, ids, row.row)
        if not self._rows:
            raise ConfigError(f"trace: {self._path} holds no usable row; give a Mooncake JSONL trace", param="trace")
        self._notes.unsorted = _out_of_order(self._rows)
        self._rows.sort(key=lambda r: r.timestamp_ms)  # stable: ties keep the order of the file
        return Trace(tuple(self._rows), self._block, self._notes)


def _out_of_order(rows: Sequence[TraceRow]) -> int:
    latest, found = -math.inf, 0
    for row in rows:
        if row.timestamp_ms < latest:
            found += 1
        latest = max(latest, row.timestamp_ms)
    return found


def _row(value: Any, number: int) -> TraceRow:
    if not isinstance(value, dict):
        raise _RowFault("not a JSON object")
    timestamp: Any = value.get("timestamp")
    if not _is_number(timestamp) or timestamp < 0:
        raise _RowFault(f"timestamp {_shown(timestamp)} is not a number of ms from 0")
    input_length = _whole(value.get("input_length"), "input_length", MAX_PROMPT_TOKENS)
    output_length = _whole(value.get("output_length"), "output_length", MAX_PROMPT_TOKENS)
    raw = value.get("hash_ids")
    if raw is not None and not isinstance(raw, list):
        raise _RowFault(f"hash_ids {_shown(raw)} is not a list of whole numbers")
    ids = tuple(_whole(i, "hash_ids", MAX_HASH_ID) for i in raw or ())
    if input_length == 0:
        raise _RowFault("input_length is 0; a prompt has at least one token", empty=True)
    return TraceRow(timestamp, input_length, output_length, ids, number)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any, name: str, top: int) -> int:
    if not _is_number(value) or value != int(value) or not 0 <= value <= top:
        raise _RowFault(f"{name} {_shown(value)} is not a whole number from 0 to {top}")
    return int(value)


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
