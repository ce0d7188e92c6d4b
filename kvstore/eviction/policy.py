"""What the pool tells an eviction policy, and what it asks: which leaf goes first.

A policy ranks the blocks of one tier of one node. Blocks are *rows*: small ints that the index gives out and uses again
after ``removed``. The pool decides what may go (leaves that nothing holds: *candidates*); the policy only chooses
among them. Pure: ``now`` (seconds) is an argument. Calls come in batches, because a call per block would cost more than
the work in it. The same objects run in the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from moonpool.core.use import Use


class EvictionPolicy(Protocol):
    name: str
    wants_keys: bool  # whether ``named`` is to be called; it remembers blocks past their eviction

    def named(self, rows: Sequence[int], keys: Sequence[bytes]) -> None:
        """Keys of rows that the next ``stored`` is about. Called only where ``wants_keys`` holds; never required."""

    def stored(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        """``rows`` are new here; ``rows[i]`` is block ``first + i`` of the prompt of ``use``. No candidates yet."""

    def used(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        """A request of ``use`` hit these known rows, blocks ``first``.. of its prompt; candidates among them stay such."""

    def ended(self, use: Use, output_tokens: int, now: float) -> None:
        """The newest request of ``use`` was answered with so many tokens. A hint: never required."""

    def offer(self, rows: Sequence[int]) -> None:
        """These became candidates: no children, no pins. One that is a candidate already is never offered again."""

    def withhold(self, rows: Sequence[int]) -> None:
        """These are candidates no longer, for a time: they got a child or a pin."""

    def choose(self, n: int, now: float) -> list[int]:
        """At most ``n`` candidates to evict, worst first; fewer only where there are fewer.

        They are candidates no longer; the pool removes them (``removed`` follows) and may offer their parents before it
        asks again. A caller that wants many asks in parts, so that parents compete with the rest.
        """

    def removed(self, rows: Sequence[int]) -> None:
        """These left this tier, by eviction or otherwise; their numbers may be given out anew."""


@runtime_checkable
class Cooler(Protocol):
    """A policy that can be told to let go of blocks that another node took over."""

    def cool(self, rows: Sequence[int], now: float) -> None:
        """These, candidates or not, go before all others, those cooled earlier first, until they are used again."""


@runtime_checkable
class Follower(Protocol):
    """A policy that can tell how many blocks of one sequence go one after the other: saves a call for each of them."""

    def follow(self, rows: Sequence[int]) -> int:
        """``rows`` are no candidates: were each offered and chosen in turn, how many would go before any candidate would?"""
