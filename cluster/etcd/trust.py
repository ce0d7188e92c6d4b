"""Whether a missing beat may be held against a member. Pure.

An etcd that was frozen, cut off or restarted has let leases lapse that nobody could renew; and a process that was starved
itself reads late what came in time. After such a gap everybody gets a while to come back.
"""

from __future__ import annotations


class Trust:
    """``gap_s``: longer between two answers means that etcd was away. ``grace_s``: the while."""

    def __init__(self, gap_s: float, grace_s: float) -> None:
        self._gap_s, self._grace_s = gap_s, grace_s
        self._answered: float | None = None
        self._judge_from = 0.0

    def answered(self, now: float) -> None:
        if self._answered is None or now - self._answered > self._gap_s:
            self._judge_from = now + self._grace_s
        self._answered = now

    def lost(self) -> None:
        """The connection is gone: whatever comes next comes after a gap."""
        self._answered = None

    def may_judge(self, now: float) -> bool:
        return self._answered is not None and now - self._answered <= self._gap_s and now >= self._judge_from
