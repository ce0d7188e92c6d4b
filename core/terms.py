"""Terms of leadership, as those see them whom a leader asks to act. Pure.

A leader that was frozen and wakes asks in the term that it had: whoever has heard of a newer one refuses.
"""

from __future__ import annotations

from moonpool.core.errors import InvalidRequest


class Terms:
    """``newest``: of those heard of."""

    def __init__(self) -> None:
        self.newest = 0

    def heard(self, term: int) -> None:
        self.newest = max(self.newest, term)

    def check(self, term: int) -> None:
        """InvalidRequest where ``term`` is over. 0: nobody who has to lead asks."""
        if term and term < self.newest:
            raise InvalidRequest(
                f"term: {term} is over, {self.newest} has begun; only the leading conductor may ask", param="term"
            )
        self.heard(term)
