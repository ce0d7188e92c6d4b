"""Numbers of lives under a wall clock that jumps."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.etcd_members import NAME

from moonpool.cluster.incarnations import FOLDER, Incarnations
from moonpool.core.ids import Incarnation, newer_than

HOUR = 3_600 * 10**9


@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_a_life_is_newer_than_any_before_and_never_older_than_the_clock(wall_ns: int, newest: int) -> None:
    life = newer_than(wall_ns, Incarnation(newest))
    assert life > newest and life >= wall_ns


def test_lives_grow_while_the_clock_is_set_back_in_one_process_and_over_restarts(tmp_path: Path) -> None:
    clock = [5 * HOUR]
    lives = Incarnations(tmp_path, NAME, lambda: clock[0])
    first = lives.next()
    clock[0] -= HOUR
    second = lives.next()
    assert first == 5 * HOUR and second == first + 1
    clock[0] -= HOUR
    assert Incarnations(tmp_path, NAME, lambda: clock[0]).next() == second + 1
    clock[0] += 4 * HOUR
    assert Incarnations(tmp_path, NAME, lambda: clock[0]).next() == clock[0]


def test_a_life_that_only_the_registry_remembers_is_followed_by_a_newer_one(tmp_path: Path) -> None:
    lives = Incarnations(tmp_path, NAME, lambda: HOUR)
    assert lives.next() == HOUR
    lives.heard(Incarnation(9 * HOUR))
    lives.heard(Incarnation(2 * HOUR))
    assert Incarnations(tmp_path, NAME, lambda: HOUR).next() == 9 * HOUR + 1


@pytest.mark.parametrize("damage", ["", "soon", "9" * 30 + "x"])
def test_a_damaged_record_is_as_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / NAME).write_text(damage)
    assert Incarnations(tmp_path, NAME, lambda: HOUR).next() == HOUR


def test_a_folder_that_cannot_be_written_keeps_nobody_from_living(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("no folder")
    lives = Incarnations(tmp_path, NAME, lambda: HOUR)
    assert [lives.next(), lives.next()] == [HOUR, HOUR + 1]
