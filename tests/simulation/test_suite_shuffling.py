from __future__ import annotations

from collections import defaultdict

import pytest

from moonpool.loadgen.trace import TraceRow
from moonpool.sim.suite.shuffling import sessions, shuffle_sessions

BLOCK = 512


def chat(at_s: float, who: int, turn: int) -> TraceRow:
    """Turn ``turn`` of conversation ``who``: one block that all share, then two more blocks a turn."""
    ids = (0, *(100 * (who + 1) + i for i in range(2 * turn)))
    return TraceRow(1e3 * at_s, BLOCK * len(ids), 10 * who + turn, ids)


@pytest.fixture
def rows() -> list[TraceRow]:
    """40 conversations that share a first block, 10 s apart, of three turns with gaps from 3 s to 83 s."""
    made = [chat(10.0 * who + (turn - 1) * (3.0 + 20.0 * (4 - who % 5)), who, turn) for who in range(40) for turn in (1, 2, 3)]
    return sorted(made, key=lambda row: row.timestamp_ms)


def test_a_block_that_everybody_shares_makes_no_session_of_all(rows: list[TraceRow]) -> None:
    which = sessions(rows, BLOCK)
    assert len(set(which)) == 40
    by_session = defaultdict(set)
    for row, session in zip(rows, which, strict=True):
        by_session[session].add(row.output_length // 10)
    assert all(len(who) == 1 for who in by_session.values())


def test_starts_are_permuted_and_gaps_kept(rows: list[TraceRow]) -> None:
    shuffled = shuffle_sessions(rows, BLOCK, seed=1)

    def starts(of: list[TraceRow]) -> dict[int, list[float]]:
        times = defaultdict(list)
        for row in of:
            times[row.output_length // 10].append(row.timestamp_ms)
        return times

    before, after = starts(rows), starts(shuffled)
    assert {t[0] for t in after.values()} == {t[0] for t in before.values()}
    assert any(after[who][0] != times[0] for who, times in before.items())
    for who, times in after.items():
        kept = before[who][: len(times)]
        assert [t - times[0] for t in times] == pytest.approx([t - kept[0] for t in kept])


def test_turns_past_the_end_are_dropped_and_rows_in_time_order(rows: list[TraceRow]) -> None:
    shuffled = shuffle_sessions(rows, BLOCK, seed=1)
    assert len(shuffled) < len(rows)
    times = [row.timestamp_ms for row in shuffled]
    assert times == sorted(times)
    assert times[-1] <= rows[-1].timestamp_ms


def test_one_seed_is_one_order(rows: list[TraceRow]) -> None:
    assert shuffle_sessions(rows, BLOCK, 2) == shuffle_sessions(rows, BLOCK, 2)
    assert shuffle_sessions(rows, BLOCK, 2) != shuffle_sessions(rows, BLOCK, 3)


def test_nothing_shuffles_to_nothing() -> None:
    assert shuffle_sessions([], BLOCK, 1) == []
