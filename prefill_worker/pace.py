"""How long computing tokens takes here, and how long KV takes to come, so that waiting never costs much more. Pure."""

from __future__ import annotations

KEEP = 0.8  # weight of what is known already against one more measurement
SLACK = 1.2  # a load may take this much longer than computing is expected to: it also spares the other jobs' time
GUESS_S = 1e-3  # a token
MIN_MS = 20  # below this a measurement says little
LATE = 1.5  # times the expected time: blocks that take longer to come are late
LATE_SHARE = 0.5  # of the time of computing them: nothing is waited for longer before computing begins,
LATE_FLOOR_S = 0.3  # but so long at least: below, computing twice costs more than it saves
SPAN_FLOOR_S = 2.0  # the same of blocks that another worker computes
SEEN_SHARE = 0.1  # of them, from where on their pace says when the last will be here


class Pace:
    """A running mean of seconds per computed token, growing contexts included. Nothing is known before the first one."""

    def __init__(self) -> None:
        self._token_s: float | None = None

    def measured(self, tokens: int, seconds: float) -> None:
        """``tokens`` were computed in ``seconds``, waiting for loads excluded."""
        if tokens <= 0 or seconds <= 0:
            return
        each = seconds / tokens
        self._token_s = each if self._token_s is None else KEEP * self._token_s + (1 - KEEP) * each

    def seconds(self, tokens: int) -> float:
        """How long computing ``tokens`` is expected to take; by ``GUESS_S`` while nothing was measured."""
        return tokens * (GUESS_S if self._token_s is None else self._token_s)

    def limit_ms(self, tokens: int, most_ms: int) -> int:
        """How long ``tokens`` may take to come from elsewhere; ``most_ms`` while nothing was measured, and never more."""
        if self._token_s is None:
            return most_ms
        return min(most_ms, max(MIN_MS, int(SLACK * 1e3 * self._token_s * tokens)))


class Arrivals:
    """Running means of seconds per byte that came from each node. Nothing is known of a node before its first block."""

    def __init__(self) -> None:
        self._byte_s: dict[str, float] = {}

    def measured(self, source: str, size: int, seconds: float) -> None:
        """``size`` bytes came from ``source`` in ``seconds``, asking for them included."""
        if size <= 0 or seconds <= 0:
            return
        known, each = self._byte_s.get(source), seconds / size
        self._byte_s[source] = each if known is None else KEEP * known + (1 - KEEP) * each

    def expected_s(self, source: str, size: int) -> float | None:
        """How long ``size`` bytes from ``source`` take; None where nothing came from there yet."""
        known = self._byte_s.get(source)
        return None if known is None else known * size


def patience_s(expected_s: float | None, computing_s: float) -> float:
    """How long blocks are waited for before computing them begins beside their coming.

    So a request takes at most this much longer than with computing alone: LATE_SHARE of it, or LATE_FLOOR_S.
    """
    longest = LATE_SHARE * computing_s
    if expected_s is not None:
        longest = min(longest, LATE * expected_s)
    return max(longest, LATE_FLOOR_S)


def worth_waiting(still_s: float, since_first_s: float, came: float, blocks_s: float, rest_s: float) -> bool:
    """Whether blocks that another worker computes are waited for. Computing them here takes ``blocks_s``, and with all that
    follows ``rest_s``: that is what giving them up costs.

    The share ``came`` of their slices came in ``since_first_s``, the last of them ``still_s`` ago (or none since they were
    asked for). Nothing may come for LATE_SHARE of ``blocks_s``, and no pace may leave more to wait for than ``rest_s``.
    """
    if still_s > max(LATE_SHARE * blocks_s, SPAN_FLOOR_S):
        return False
    if came < SEEN_SHARE:
        return True
    return since_first_s * (1.0 - came) / came <= max(rest_s, SPAN_FLOOR_S)
