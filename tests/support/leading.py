"""A conductor's place in the election, as a test says it."""

from __future__ import annotations


class Leading:
    """Implements ``cluster.leadership.Leads``. ``now``: the term in which it leads, 0: it does not."""

    def __init__(self, now: int = 1) -> None:
        self.now = now

    def term(self) -> int:
        return self.now

    def leader(self) -> str:
        return "conductor-0"

    async def close(self) -> None:
        pass
