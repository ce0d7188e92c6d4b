"""A trace with its conversations in another order: what a policy learned by heart of one hour does not help there.

Starts of sessions are permuted among the sessions, the gaps inside each are kept, and turns that would come after the
trace's end are dropped. So the load, the lengths and every conversation stay what they were; only which of them meet is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from moonpool.loadgen.trace import TraceRow
from moonpool.sim.one_cache import TRUNK_FANOUT


def sessions(rows: Sequence[TraceRow], block_tokens: int) -> list[int]:
    """The session of each request, numbered by first request.

    A request goes on with the session that used its deepest known block last, where it matches more than a trunk: the
    leading blocks from which ``TRUNK_FANOUT`` continuations or more go out in the whole trace.
    """
    behind: dict[int, set[int]] = {}
    whole = [row.hash_ids[: row.input_length // block_tokens] for row in rows]
    for ids in whole:
        for one, after in pairwise(ids):
            behind.setdefault(one, set()).add(after)
    trunk = {one for one, branches in behind.items() if len(branches) >= TRUNK_FANOUT}
    owner: dict[int, int] = {}  # newest session of each block
    found: list[int] = []
    count = 0
    for ids in whole:
        match = next((k for k, one in enumerate(ids) if one not in owner), len(ids))
        if match and ids[match - 1] not in trunk:
            found.append(owner[ids[match - 1]])
        else:
            found.append(count)
            count += 1
        owner.update(dict.fromkeys(ids, found[-1]))
    return found


def shuffle_sessions(rows: Sequence[TraceRow], block_tokens: int, seed: int) -> list[TraceRow]:
    """``rows`` with the starts of their sessions permuted by ``seed``, in time order; a little fewer than were given."""
    session = sessions(rows, block_tokens)
    start = [0.0] * (max(session, default=-1) + 1)
    for row, which in zip(reversed(rows), reversed(session), strict=True):
        start[which] = row.timestamp_ms
    begins = np.random.default_rng(seed).permutation(np.array(start))
    end = max((row.timestamp_ms for row in rows), default=0.0)
    moved = [
        replace(row, timestamp_ms=float(begins[which] + row.timestamp_ms - start[which]))
        for row, which in zip(rows, session, strict=True)
    ]
    return sorted((row for row in moved if row.timestamp_ms <= end), key=lambda row: row.timestamp_ms)
