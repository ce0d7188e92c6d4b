"""One prefix cache that every request of a trace goes through, in file order, blocks leaf-first: how many tokens it finds.

The published traces (Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025) name blocks of 512
tokens by content and say nothing of who asks. So the turn of a conversation is inferred from what came before: a prompt
that matches more than what everybody shares goes on with the conversation that used the deepest matched block last.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moonpool.core.use import Use
from moonpool.kvstore.eviction.policy import EvictionPolicy
from moonpool.loadgen.trace import TraceRow

TRUNK_FANOUT = 30  # continuations of a block from which on everybody shares it
PART = 1  # blocks asked for at once; a store asks for more, and parents compete a little later
DECODE_S, DECODE_TOKEN_S = 2.0, 0.045  # a request ends so long after its arrival: what is learned from outputs comes late
FULL_BLOCKS_ONLY = frozenset({"hazard"})


def turns(rows: Sequence[TraceRow], block: int) -> Iterator[int]:
    """The turn of each request, from the past only."""
    owner: dict[int, int] = {}  # newest request of each block, those evicted since too
    behind: dict[int, set[int]] = {}
    turn: list[int] = []
    for at, row in enumerate(rows):
        ids = row.hash_ids[: row.input_length // block]
        match = next((k for k, one in enumerate(ids) if one not in owner), len(ids))
        trunk = next((k for k, one in enumerate(ids[:match]) if len(behind.get(one, ())) < TRUNK_FANOUT), match)
        turn.append(turn[owner[ids[match - 1]]] + 1 if match > trunk else 1)
        yield turn[-1]
        for one, after in itertools.pairwise(ids):
            branches = behind.setdefault(one, set())
            if len(branches) < TRUNK_FANOUT:
                branches.add(after)
        owner.update(dict.fromkeys(ids, at))


@dataclass(slots=True)
class Block:
    id: int
    row: int
    parent: Block | None
    children: int = 0


class Cache:
    """Prefix-closed: a block is here only while its parent is. ``whole``: unfinished last blocks are not stored."""

    def __init__(self, policy: EvictionPolicy, capacity: int, block_tokens: int, *, whole: bool) -> None:
        self._policy = policy
        self._capacity = capacity
        self._block = block_tokens
        self._whole = whole
        self._found: dict[int, Block] = {}
        self._by_row: list[Block] = []
        self._free: list[int] = []
        self._running: list[tuple[float, int, Use, int]] = []  # heap: when it ends, row of the file, use, output

    def request(self, row: TraceRow, use: Use) -> int:
        """Serve a prompt: returns how many of its tokens were here, then holds all its blocks that fit."""
        ids = row.hash_ids[: row.input_length // self._block] if self._whole else row.hash_ids
        now = row.timestamp_ms / 1e3
        while self._running and self._running[0][0] <= now:
            _, _, ended, output = heapq.heappop(self._running)
            self._policy.ended(ended, output, now)
        heapq.heappush(self._running, (now + DECODE_S + DECODE_TOKEN_S * row.output_length, row.row, use, row.output_length))
        held: list[Block] = []
        for one in ids:
            block = self._found.get(one)
            if block is None:
                break
            held.append(block)
        if held:
            self._policy.used([block.row for block in held], 0, use, now)
        if len(held) < len(ids):
            self._store(ids[len(held) :], len(held), held[-1] if held else None, use, now)
        while (over := len(self._found) - self._capacity) > 0:
            self._evict(self._policy.choose(min(over, PART), now))
        return min(len(held) * self._block, row.input_length)

    def _store(self, ids: Sequence[int], first: int, parent: Block | None, use: Use, now: float) -> None:
        if parent is not None and not parent.children:
            self._policy.withhold([parent.row])
        rows = []
        for one in ids:
            block = Block(one, self._free.pop() if self._free else len(self._by_row), parent)
            if block.row == len(self._by_row):
                self._by_row.append(block)
            self._by_row[block.row] = self._found[one] = block
            if parent is not None:
                parent.children += 1
            parent = block
            rows.append(block.row)
        if self._policy.wants_keys:
            self._policy.named(rows, [one.to_bytes(16, "little") for one in ids])
        self._policy.stored(rows, first, use, now)
        self._policy.offer(rows[-1:])

    def _evict(self, rows: Sequence[int]) -> None:
        parents = []
        for row in rows:
            block = self._by_row[row]
            del self._found[block.id]
            if block.parent is not None:
                block.parent.children -= 1
                if not block.parent.children:
                    parents.append(block.parent.row)
        self._policy.removed(rows)
        self._free.extend(rows)
        self._policy.offer(parents)
