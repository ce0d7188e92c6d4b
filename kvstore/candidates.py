"""What is in use and what may go: pins, holds, and the candidates that eviction policies choose among.

Policies hear which rows may go from either tier:

- from DRAM: nobody pins or holds it, and it is a leaf or has a copy on SSD;
- from SSD: nobody pins it, and it is a leaf or has a copy in DRAM.

A row is *busy* while it, or any row after it, is pinned or held hard; a busy block that only DRAM has is *stuck* there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from moonpool.core.errors import Bug
from moonpool.kvstore.accounts import Accounts
from moonpool.kvstore.eviction.policy import EvictionPolicy
from moonpool.kvstore.rows import CHOSEN, FOUND, HARD, IN_DRAM, NONE, ON_SSD, SOFT, Rows


class Candidates(Rows):
    def __init__(self, accounts: Accounts, policy: EvictionPolicy, ssd_policy: EvictionPolicy | None) -> None:
        super().__init__(accounts, ssd_policy is not None)
        self.policy = policy
        self.ssd_policy = ssd_policy
        self._busy: dict[int, int] = {}  # own pins (as one), own hard holds (as one), and children that are busy
        self.in_dram: Counter[int] = Counter()  # findable blocks with a slot, by slot size
        self.stuck: Counter[int] = Counter()  # those of them that eviction cannot take, by slot size
        self.dropped: list[int] = []  # extents of blocks that were withdrawn: the tier's to free

    def evictable(self, slot_bytes: int) -> int:
        """How many blocks of this size could be evicted from DRAM, one after the other."""
        return self.in_dram[slot_bytes] - self.stuck[slot_bytes]

    def pin(self, rows: Iterable[int]) -> None:
        pins, busy, flags, slot, extent, parent = self.pins, self._busy, self.flags, self.slot, self.extent, self.parent
        fresh = []
        for row in rows:
            if row in pins:
                pins[row] += 1
                continue
            pins[row] = 1
            fresh.append(row)
            if flags[row] & FOUND:
                n = busy.get(row, 0)
                if slot[row] >= 0 and not (n and (extent[row] < 0 or flags[row] & HARD)):
                    self.stuck[self._size(row)] += 1
                busy[row] = n + 1
                if not n and (above := parent[row]) >= 0:
                    if above in busy:
                        busy[above] += 1
                    else:
                        self._raise_busy(above)
                        self._count_stuck(above, False)
        if fresh:
            self.refresh(fresh)

    def unpin(self, rows: Sequence[int]) -> list[int]:
        """The slots to release: of rows that were withdrawn, and of which this was the last pin."""
        pins, busy, flags, slot, extent = self.pins, self._busy, self.flags, self.slot, self.extent
        size_of, account = self._accounts.size_of, self.account
        last = []
        for row in reversed(rows):  # the last block first, so that those before it are still busy by their own pins
            left = pins.get(row, 0) - 1
            if left > 0:
                pins[row] = left
                continue
            if left < 0:
                raise Bug(f"block {self.key[row].hex()}: unpinned more often than pinned")
            del pins[row]
            last.append(row)
            if flags[row] & FOUND:
                n = busy[row] = busy[row] - 1
                if slot[row] >= 0 and not (n and (extent[row] < 0 or flags[row] & HARD)):
                    self.stuck[size_of[account[row]]] -= 1
                if not n:
                    del busy[row]
                    above = self.parent[row]
                    if above >= 0 and busy[above] > 1 and extent[above] < 0:
                        busy[above] -= 1  # nothing else changes for it
                    elif above >= 0:
                        self._lower_busy(above, self._is_stuck(above))
        gone = [row for row in last if not self.flags[row] & FOUND]
        if len(gone) < len(last):
            self.refresh(last)
        return self._let_go(gone) if gone else []

    def hold(self, row: int, hard: bool, soft: bool) -> None:
        """Whether anybody holds the block hard (never evicted) or soft (evicted last), from now on."""
        was, was_hard = self._is_stuck(row), self.flags[row] & HARD
        self.flags[row] = self.flags[row] & ~(SOFT | HARD) | (SOFT * soft) | (HARD * hard)
        if hard and not was_hard:
            self._raise_busy(row)
            self._count_stuck(row, was)
        elif was_hard and not hard:
            self._lower_busy(row, was)
        self.refresh((row,))

    def _size(self, row: int) -> int:
        return self._accounts.size_of[self.account[row]]

    def _is_stuck(self, row: int) -> bool:
        """Findable, in DRAM, and not to be evicted from there however many others are evicted first."""
        if row not in self._busy or self.slot[row] < 0:
            return False
        return row in self.pins or bool(self.flags[row] & HARD) or self.extent[row] < 0

    def _count_stuck(self, row: int, was: bool) -> None:
        if (now := self._is_stuck(row)) != was:
            self.stuck[self._size(row)] += 1 if now else -1

    def _raise_busy(self, row: int) -> None:
        """``row`` has one reason more; what comes before it is busy, too. The caller counts ``row`` itself."""
        busy, parent = self._busy, self.parent
        n = busy.get(row, 0)
        busy[row] = n + 1
        while not n and (row := parent[row]) >= 0:
            n = busy.get(row, 0)
            busy[row] = n + 1
            if not n:
                self._count_stuck(row, False)

    def _lower_busy(self, row: int, was: bool) -> None:
        """``row``, which was stuck or not, has one reason less; what came before it may be free, too."""
        busy, parent = self._busy, self.parent
        while True:
            n = busy[row] - 1
            if n:
                busy[row] = n
                self._count_stuck(row, was)
                return
            del busy[row]
            self._count_stuck(row, was)
            row = parent[row]
            if row < 0:
                return
            was = self._is_stuck(row)

    def refresh(self, rows: Iterable[int]) -> None:
        """Tell the policies which of these rows became candidates, and which are none any more."""
        flags, slot, extent, child, pins = self.flags, self.slot, self.extent, self.child, self.pins
        changes: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
        for row in rows:
            flag = flags[row]
            loose = flag & FOUND and row not in pins
            leaf, here, there = child[row] == NONE, slot[row] >= 0, extent[row] >= 0
            can = IN_DRAM if loose and here and (leaf or there) and not flag & (SOFT | HARD) else 0
            if flag & CHOSEN:
                flags[row] ^= 0 if can else CHOSEN
            elif can != flag & IN_DRAM:
                flags[row] ^= IN_DRAM
                changes[0 if can else 1].append(row)
            can = ON_SSD if loose and there and (leaf or here) else 0
            if can != flag & ON_SSD:
                flags[row] ^= ON_SSD
                changes[2 if can else 3].append(row)
        self._tell(self.policy, changes[0], changes[1])
        if self.ssd_policy is not None:
            self._tell(self.ssd_policy, changes[2], changes[3])

    def _tell(self, policy: EvictionPolicy, offer: list[int], withhold: list[int]) -> None:
        if offer:
            policy.offer(offer)
        if withhold:
            policy.withhold(withhold)

    def _let_go(self, rows: Sequence[int]) -> list[int]:
        """Rows that are withdrawn and without pins: nothing refers to them any more. Returns their slots."""
        slots = []
        for row in rows:
            if self.slot[row] >= 0:
                slots.append(self.slot[row])
                self._accounts.slots_of[self.account[row]] -= 1
            if self.extent[row] >= 0:
                self.dropped.append(self.extent[row])
            self.slot[row] = self.extent[row] = NONE
            self.key[row] = b""
        self._spare.extend(rows)
        return slots

    # Questions.

    def is_found(self, row: int) -> bool:
        """Whether a row that somebody has pinned can still be found."""
        return bool(self.flags[row] & FOUND)

    def is_kept(self, row: int) -> bool:
        """Somebody reads or writes it, or holds it hard."""
        return row in self.pins or bool(self.flags[row] & HARD)

    def copies(self, row: int) -> int:
        return (self.slot[row] >= 0) + (self.extent[row] >= 0)

    def is_idle(self, row: int) -> bool:
        """Neither this block nor any after it is in use or held, and it is in one tier only."""
        held = self.flags[row] & (SOFT | HARD)
        return not held and row not in self._busy and row not in self.pins and self.extent[row] < 0

    def is_soft_candidate(self, row: int) -> bool:
        """It could be evicted from DRAM, were it not held softly."""
        if self.flags[row] & (SOFT | HARD) != SOFT or row in self.pins or self.slot[row] < 0:
            return False
        return self.child[row] == NONE or self.extent[row] >= 0

    def oldest(self, accounts: Sequence[int], n: int) -> list[int]:
        """At most ``n`` candidates for eviction from DRAM that belong to one of the accounts, by last use."""
        flags, mine = np.frombuffer(self.flags, np.uint8), np.isin(np.frombuffer(self.account, np.uint16), accounts)
        rows = np.flatnonzero(mine & (flags & (IN_DRAM | CHOSEN) != 0))
        used = np.frombuffer(self.used, np.float32)[rows]
        return list(map(int, rows[np.argsort(used, kind="stable")[:n]]))
