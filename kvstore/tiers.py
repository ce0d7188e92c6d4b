"""Blocks on their way between DRAM and SSD: what goes down, what comes up, and what the SSD tier tells.

The shell moves the bytes; here it is decided which, and what is held meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moonpool.core.use import Use
from moonpool.kvstore.holdings import Holdings
from moonpool.kvstore.ladder_claims import Demotion, Promotion
from moonpool.kvstore.rows import CHOSEN, IN_DRAM, NONE

LOOKED_AT = 4  # times the blocks wanted: so many candidates are looked at for some that only DRAM has


class OnDisk(Protocol):
    """A block that the tier found at start: see ``kvstore.ssd.blocks.Recovered``."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes | None: ...
    @property
    def layout(self) -> str: ...
    @property
    def extent(self) -> int: ...
    @property
    def use(self) -> Use: ...


@dataclass(slots=True, eq=False)
class _Coming:
    """A promotion: a slot reserved for a row."""

    row: int
    slot: int
    account: int
    use: Use


class Tiers:
    def __init__(self, holdings: Holdings) -> None:
        self._held = holdings
        self._going: dict[int, int] = {}  # rows of demotions
        self._going_rows: set[int] = set()
        self._coming: dict[int, _Coming] = {}
        self._coming_rows: set[int] = set()

    # Down.

    def demotions(self, limit: int, now: float) -> list[Demotion]:
        """At most ``limit`` blocks that only DRAM has, the coldest first, each after all before it in its sequence."""
        index = self._held.index
        self._held.unchoose()  # the coldest blocks of all
        looked = index.choose(LOOKED_AT * limit, now)
        rows: dict[int, None] = {}
        for row in looked:
            chain = []
            while row >= 0 and row not in rows:
                if index.slot[row] >= 0 and index.extent[row] < 0 and row not in self._going_rows:
                    chain.append(row)
                row = index.parent[row]
            rows |= dict.fromkeys(reversed(chain))
            if len(rows) >= limit:
                break
        out = [self._demotion(row) for row in list(rows)[:limit]]
        index.give_back(looked)
        return out

    def sealed(self, keys: Iterable[bytes]) -> list[Demotion]:
        """Those of ``keys`` that only DRAM has, for writing through."""
        index = self._held.index
        rows = [row for key in keys if (row := index.row(key)) is not None]
        return [
            self._demotion(row)
            for row in rows
            if index.slot[row] >= 0 and index.extent[row] < 0 and row not in self._going_rows
        ]

    def _demotion(self, row: int) -> Demotion:
        held, index = self._held, self._held.index
        held.pin([row])
        number = held.next_id()
        self._going[number] = row
        self._going_rows.add(row)
        account, above = index.account[row], index.parent[row]
        return Demotion(
            number,
            index.key[row],
            None if above < 0 else index.key[above],
            held.accounts.layout_of[account],
            held.ref_of(row),
            Use(held.accounts.tenant_of[account]),
        )

    def demoted(self, number: int, extent: int | None, now: float) -> bool:
        """Whether the copy is of use. If not (it was withdrawn meanwhile), the extent is among those to be freed."""
        row = self._going.pop(number, None)
        if row is None:
            self._held.counted["demotions_ignored"] += 1
            return False
        self._going_rows.discard(row)
        index = self._held.index
        good = extent is not None and index.is_found(row) and index.extent[row] < 0
        if extent is not None and good:
            index.put_on_ssd(row, extent, Use(self._held.accounts.tenant_of[index.account[row]]), now)
        elif extent is not None:
            index.dropped.append(extent)
        self._held.unpin([row])
        return good

    # Up.

    def on_ssd(self, keys: Iterable[bytes]) -> list[tuple[bytes, int]]:
        """(key, extent) of those of the leading blocks that are here which SSD only has."""
        index = self._held.index
        return [(index.key[row], index.extent[row]) for row in index.leading(keys) if index.slot[row] < 0]

    def promote(self, keys: Iterable[bytes], use: Use, now: float) -> list[Promotion]:
        """Slots for those of ``keys`` that SSD only has and nobody brings up yet: fewer, from the front, where room lacks."""
        held, index = self._held, self._held.index
        rows = [row for key in keys if (row := index.row(key)) is not None]
        wanted = [row for row in rows if index.slot[row] < 0 and row not in self._coming_rows]
        held.pin(rows)  # making room for some must not evict the others
        out, at = [], 0
        while at < len(wanted):
            account = index.account[wanted[at]]
            end = at
            while end < len(wanted) and index.account[wanted[end]] == account:
                end += 1
            slots = held.take_some(account, end - at, now)
            out += [self._promotion(row, slot, account, use) for row, slot in zip(wanted[at:], slots, strict=False)]
            if len(slots) < end - at:
                break
            at = end
        held.unpin(rows)
        return out

    def _promotion(self, row: int, slot: int, account: int, use: Use) -> Promotion:
        held, index = self._held, self._held.index
        held.pin([row])
        number = held.next_id()
        self._coming[number] = _Coming(row, slot, account, use)
        self._coming_rows.add(row)
        key = index.key[row]
        return Promotion(number, key, held.accounts.layout_of[account], held.slots.ref(slot, key), index.extent[row])

    def promoted(self, number: int, ok: bool, now: float) -> bool:
        """Whether the block is in DRAM by this. If not, its slot is free again."""
        claim = self._coming.pop(number, None)
        if claim is None:
            self._held.counted["promotions_ignored"] += 1
            return False
        held, index, row = self._held, self._held.index, claim.row
        self._coming_rows.discard(row)
        good = ok and index.is_found(row) and index.slot[row] < 0
        if good:
            held.put_in_dram(row, claim.slot, claim.account, claim.use, now)
        else:
            held.release(claim.account, [claim.slot])
        held.unpin([row])
        return good

    def let_go(self, keys: Iterable[bytes]) -> list[bytes]:
        """Drop the DRAM copy of those of ``keys`` that are on SSD, too. Returns those that somebody still uses."""
        index = self._held.index
        loose: list[int] = []
        used: list[bytes] = []
        for key in keys:
            row = index.row(key)
            if row is None or index.slot[row] < 0 or index.extent[row] < 0:
                continue
            if index.flags[row] & (IN_DRAM | CHOSEN):
                loose.append(row)
            else:
                used.append(key)
        self._held.evict(loose)
        return used

    # What the tier tells.

    def lost(self, extents: Sequence[int]) -> None:
        slots = self._held.index.lose(extents)
        if slots:
            self._held.slots.release(slots)

    def moved(self, extents: Mapping[int, int]) -> None:
        self._held.index.moved(extents)

    def recovered(self, blocks: Iterable[OnDisk], now: float) -> list[int]:
        """Take over what the tier found, parents first. Returns extents of no use: orphans, unknown layouts, second copies."""
        index, accounts = self._held.index, self._held.accounts
        unwanted = []
        for block in blocks:
            layout = accounts.layouts.get(block.layout)
            row = index.row(block.key)
            above = NONE if block.parent is None else index.row(block.parent)
            if layout is None or above is None or index.ssd_policy is None or (row is not None and index.extent[row] >= 0):
                unwanted.append(block.extent)
            elif row is not None:
                index.put_on_ssd(row, block.extent, block.use, now)
            else:
                account = accounts.number(layout, block.use.tenant)
                index.add_on_ssd(block.key, above, block.extent, account, block.use, now)
        return unwanted

    def evict(self, n: int, now: float) -> list[int]:
        """At most ``n`` extents of the coldest blocks that may go from SSD, leaf after leaf: not findable there any more."""
        out: list[int] = []
        index = self._held.index
        while len(out) < n:
            some = index.evict_ssd(max(min(n - len(out), len(index) // 2048), 1), now)
            if not some:
                break
            out += some
        return out

    @property
    def open(self) -> tuple[int, int]:
        """Demotions and promotions that have not ended."""
        return len(self._going), len(self._coming)
