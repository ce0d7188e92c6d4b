"""Notes that workers of one host leave for one another."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.core.gaps import Room
from moonpool.core.permit import (
    FRESH_S,
    LEAST_PATIENCE_S,
    MOST_PATIENCE_S,
    NOTE_BYTES,
    Beside,
    Note,
    all_beside,
    patience_s,
    slice_over,
    somebody_waits,
)


def note(steady: float, most: float, step: float = 0.01, *, at: float = 5.0, waits: float = 0.0) -> Note:
    return Note(waits, at, Beside(Room(steady, most), step))


def test_a_note_is_read_as_it_was_written_and_anything_else_says_nothing() -> None:
    written = note(0.05, inf, waits=3.0)
    assert len(written.to_bytes()) == NOTE_BYTES
    assert Note.from_bytes(written.to_bytes()) == written
    assert Note.from_bytes(bytes(NOTE_BYTES)) == Note(0.0, 0.0, Beside(Room(0.0, 0.0), 0.0))
    assert Note.from_bytes(b"") == Note()
    assert Note.from_bytes(note(0.2, 0.1).to_bytes()) == Note()
    assert Note.from_bytes(note(nan, 0.1).to_bytes()) == Note()


@given(raw=st.binary(min_size=NOTE_BYTES, max_size=NOTE_BYTES))
def test_half_a_note_never_asks_for_less_than_no_time(raw: bytes) -> None:
    room = Note.from_bytes(raw).beside.room
    assert 0.0 <= room.steady_s <= room.most_s


def test_the_answers_of_all_workers_count_while_their_notes_are_fresh() -> None:
    notes = [note(0.1, 0.3), note(0.2, 0.2, 0.03), note(0.01, 0.01, at=5.0 - 2 * FRESH_S), note(0.01, 0.01, at=0.0)]
    assert all_beside(notes, 5.5) == Beside(Room(0.1, 0.2), 0.04)
    assert all_beside(notes, 5.5 + FRESH_S) == Beside()


def test_a_worker_that_has_waited_too_long_is_not_there_any_more() -> None:
    assert somebody_waits([Note(), Note(waits_since=5.0)], 5.1)
    assert not somebody_waits([Note(), Note(waits_since=5.0)], 5.1 + FRESH_S)


def test_a_note_from_the_future_is_not_believed() -> None:
    ahead = note(1.0, 1.0, at=5.0 + 2 * FRESH_S, waits=5.0 + 2 * FRESH_S)
    assert all_beside([ahead], 5.0) == Beside() and not somebody_waits([ahead], 5.0)
    assert not somebody_waits([note(1.0, 1.0, waits=nan), note(1.0, 1.0, waits=inf)], 5.0)


def test_a_slice_ends_before_the_layer_that_would_not_fit() -> None:
    assert not slice_over(0.06, 0.03, 0.1)
    assert slice_over(0.08, 0.03, 0.1)


def test_patience_has_bounds() -> None:
    assert [patience_s(s) for s in (0.0, 0.1, 10.0, inf)] == [LEAST_PATIENCE_S, 0.2, MOST_PATIENCE_S, MOST_PATIENCE_S]


def test_a_prompt_takes_longer_by_the_steps_between_its_slices() -> None:
    assert Beside(Room(0.04, 0.1), 0.01).takes_s(2.0) == pytest.approx(2.5)
    assert Beside().takes_s(2.0) == 2.0
    assert Beside(Room(0.0, 0.0), 0.01).takes_s(2.0) == inf
