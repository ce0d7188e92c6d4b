"""A node that is about to leave: it takes nothing new, and copies to others what nobody else holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from moonpool.kvstore.replication.others import Others
from moonpool.kvstore.replication.plan import Block, Piece, Room, least_to_move, pieces

if TYPE_CHECKING:
    from moonpool.kvstore.node import StoreNode

PIECE = 64  # blocks of one call
SHORT = 3
SHARE, LEAST_S, MOST_S = 1 / 3, 1.0, 60.0  # of the time left, for one call: a node that froze meanwhile costs no more
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MovedOut:
    """Of the blocks that only this node held: what another one holds now, and what is lost when it goes."""

    blocks_saved: int = 0
    bytes_saved: int = 0
    blocks_left: int = 0
    bytes_left: int = 0


class Leaving:
    """Event-loop only. Reads go on being served meanwhile."""

    def __init__(self, node: StoreNode) -> None:
        self._node = node
        self._others = Others(node)
        self._busy = asyncio.Lock()
        self.begun = False
        self.on_begin: Callable[[], None] = lambda: None  # tells the cluster that this node takes nothing new
        self.moved_out = MovedOut()

    def numbers(self) -> dict[str, float]:
        report = self.moved_out
        return {
            "leaving": self.begun,
            "drain_blocks_saved": report.blocks_saved,
            "drain_bytes_saved": report.bytes_saved,
            "drain_blocks_left": report.blocks_left,
            "drain_bytes_left": report.bytes_left,
        }

    async def move_out(self, deadline_s: float) -> MovedOut:
        """From now on new blocks are refused. Hottest first; what found no room or no time is left. Never raises.

        Again: looks again, for what came in meanwhile or found no room then.
        """
        if not self.begun:
            self.begun = True
            self.on_begin()
        end = self._node.clock() + deadline_s
        async with self._busy:
            blocks = self._blocks()
            rooms = await self._others.rooms([block.key for block in blocks])
            elsewhere = set().union(*(room.has for room in rooms))
            before = {block.key for block in blocks if block.key not in elsewhere}
            work = await asyncio.to_thread(pieces, blocks, elsewhere, PIECE)  # a third of a second for 100,000 blocks
            await self._copy(work, {b.key: b.bytes for b in blocks}, rooms, end)
            self._report(blocks, before, set().union(*(room.has for room in rooms)))
        return self.moved_out

    def _blocks(self) -> list[Block]:
        held = self._node.pool.held
        index, size_of = held.index, held.accounts.size_of
        key, parent, used, account = index.key, index.parent, index.used, index.account
        return [
            Block(key[row], key[parent[row]] if parent[row] >= 0 else None, used[row], size_of[account[row]])
            for row in index.rows()
        ]

    async def _copy(self, work: Sequence[Piece], size: dict[bytes, int], rooms: Sequence[Room], end: float) -> None:
        """A node that took less than it was asked to three times in a row is asked no more."""
        short = dict.fromkeys((room.node for room in rooms), 0)
        for piece in work:
            last = self._node.pool.held.index.get(piece.path[-1])
            if last is None:
                continue  # withdrawn or evicted since
            asked = [room for room in rooms if short[room.node] < SHORT]
            while (left := end - self._node.clock()) > 0 and (to := least_to_move(asked, piece.path, size)) is not None:
                limit = min(left, max(LEAST_S, left * SHARE), MOST_S)
                blocks, moved = await self._others.replicate(to, piece.path, last.layout, last.use, limit)
                to.took(piece.path[:blocks], moved)
                if blocks == len(piece.path):
                    short[to.node] = 0
                    break
                short[to.node] += 1
                asked.remove(to)

    def _report(self, blocks: Sequence[Block], before: set[bytes], after: set[bytes]) -> None:
        saved = [block.bytes for block in blocks if block.key in before and block.key in after]
        left = [block.bytes for block in blocks if block.key in before and block.key not in after]
        old = self.moved_out
        self.moved_out = MovedOut(old.blocks_saved + len(saved), old.bytes_saved + sum(saved), len(left), sum(left))
        log.info("moved_out", saved=len(saved), saved_bytes=sum(saved), left=len(left), left_bytes=sum(left))
