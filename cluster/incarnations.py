"""Numbers of a name's lives: a newer one is larger, also where the wall clock was set back between the two.

The newest number is kept in the state folder. Nothing else of Moonpool asks the wall clock what came first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from moonpool.core.ids import Incarnation, MemberId, newer_than

FOLDER = "lives"


class Incarnations:
    """``wall_ns``: nanoseconds of the wall clock."""

    def __init__(self, state_dir: Path, member: MemberId, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._file, self._wall_ns = state_dir / FOLDER / member, wall_ns
        self._newest = Incarnation(0)

    def next(self) -> Incarnation:
        """Larger than every one of this name that the state folder has seen, or this object given."""
        self._keep(newer_than(self._wall_ns(), max(self._newest, self._kept())))
        return self._newest

    def heard(self, taken: Incarnation) -> None:
        """The registry knows a life of this name: the next one is newer, whoever gives it."""
        if taken > max(self._newest, self._kept()):
            self._keep(taken)

    def _kept(self) -> Incarnation:
        try:
            return Incarnation(int(self._file.read_text(encoding="ascii")))
        except (OSError, ValueError):  # the first one, or damaged: by the wall clock then
            return Incarnation(0)

    def _keep(self, newest: Incarnation) -> None:
        self._newest = newest
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._file.with_name(f".{self._file.name}")
            fresh.write_text(str(newest), encoding="ascii")
            fresh.replace(self._file)
        except OSError:  # a full or read-only disk keeps nobody from living
            pass
