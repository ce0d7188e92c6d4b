"""What a store node can be asked for: blocks by key, in DRAM, on SSD or in both, prefix-closed over the union of both.

Prefix-closed: a block is findable only while its parent is (first blocks have none). So whoever matches a chain of keys
may stop at the first one missing. Losing a middle block withdraws its descendants with it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import Bug
from moonpool.core.events import BlockChange, Tier
from moonpool.core.use import Use
from moonpool.kvstore.accounts import Accounts
from moonpool.kvstore.candidates import Candidates
from moonpool.kvstore.event_log import EventLog
from moonpool.kvstore.eviction.policy import Cooler, EvictionPolicy, Follower
from moonpool.kvstore.rows import CHOSEN, FOUND, HARD, IN_DRAM, MANY, NONE, ON_SSD, breaks


class BlockIndex(Candidates):
    def __init__(
        self, log: EventLog, accounts: Accounts, policy: EvictionPolicy, ssd_policy: EvictionPolicy | None = None
    ) -> None:
        super().__init__(accounts, policy, ssd_policy)
        self._log = log
        self._follow = policy.follow if isinstance(policy, Follower) else None
        self.clean: Counter[int] = Counter()  # findable blocks that are in both tiers, by slot size
        self.on_ssd = 0

    # Blocks come, and are used.

    def add(
        self, keys: Sequence[bytes], parent: int, slots: Sequence[int], account: int, first: int, use: Use, now: float
    ) -> list[int]:
        """Blocks sealed in ``slots`` of DRAM; each is the parent of the next, ``parent`` (NONE: none) of the first.

        ``first`` is their place in the prompt of ``use``. Bug where one is here already.
        """
        rows = self._insert(keys, slots, account, now)
        if parent >= 0:
            self._link(rows[0], parent)
        parents, child, above = self.parent, self.child, parent
        for row, below in zip(rows, (*rows[1:], NONE), strict=True):
            parents[row] = above
            child[row] = below
            above = row
        self._log.record(BlockChange.STORED, Tier.G2, keys)
        self.in_dram[self._accounts.size_of[account]] += len(rows)
        self._tell_stored(self.policy, rows, keys, first, use, now)
        self.refresh((parent, rows[-1]) if parent >= 0 else rows[-1:])
        return rows

    def add_apart(self, keys: Sequence[bytes], slots: Sequence[int], account: int, use: Use, now: float) -> list[int]:
        """Blocks sealed in ``slots`` of DRAM, each a sequence of its own. Bug where one is here already."""
        rows = self._insert(keys, slots, account, now)
        for row in rows:
            self.parent[row] = self.child[row] = NONE
        self._log.record(BlockChange.STORED, Tier.G2, keys)
        self.in_dram[self._accounts.size_of[account]] += len(rows)
        for row, key in zip(rows, keys, strict=True):
            self._tell_stored(self.policy, [row], (key,), 0, use, now)
        self.refresh(rows)
        return rows

    def add_on_ssd(self, key: bytes, parent: int, extent: int, account: int, use: Use, now: float) -> int:
        """A block that only SSD has. Bug where it is here already."""
        (row,) = self._insert((key,), (NONE,), account, now)
        self.parent[row], self.child[row] = parent, NONE
        if parent >= 0:
            self._link(row, parent)
            self.refresh((parent,))
        self.put_on_ssd(row, extent, use, now)
        return row

    def put_on_ssd(self, row: int, extent: int, use: Use, now: float) -> None:
        """A copy of a findable block lies at ``extent`` from now on."""
        was = self._is_stuck(row)
        self.extent[row] = extent
        self.on_ssd += 1
        if self.slot[row] >= 0:
            self.clean[self._size(row)] += 1
        self._count_stuck(row, was)
        self._log.record(BlockChange.STORED, Tier.G3, (self.key[row],))
        if self.ssd_policy is not None:
            self._tell_stored(self.ssd_policy, [row], (self.key[row],), self.depth(row), use, now)
        self.refresh((row,))

    def put_in_dram(self, row: int, slot: int, use: Use, now: float) -> None:
        """A block that only SSD had lies in ``slot``, too, from now on."""
        size = self._size(row)
        self.slot[row] = slot
        self.in_dram[size] += 1
        self.clean[size] += 1
        self._count_stuck(row, False)
        self._log.record(BlockChange.STORED, Tier.G2, (self.key[row],))
        self._tell_stored(self.policy, [row], (self.key[row],), self.depth(row), use, now)
        self.refresh((row,))

    def _tell_stored(
        self, policy: EvictionPolicy, rows: list[int], keys: Sequence[bytes], first: int, use: Use, now: float
    ) -> None:
        if policy.wants_keys:
            policy.named(rows, keys)
        policy.stored(rows, first, use, now)

    def touch(self, rows: Sequence[int], first: int, use: Use, now: float) -> None:
        """A request hit these rows, blocks ``first``.. of its prompt."""
        used, extent = self.used, self.extent
        for row in rows:
            used[row] = now
        self.policy.used(rows, first, use, now)
        if self.ssd_policy is not None and self.on_ssd:
            start = 0  # runs of blocks that are on SSD, because policies hear of runs
            for at in range(len(rows) + 1):
                if at == len(rows) or extent[rows[at]] < 0:
                    if start < at:
                        self.ssd_policy.used(rows[start:at], first + start, use, now)
                    start = at + 1

    def cool(self, rows: Sequence[int], now: float) -> int:
        """Another node took over these rows, which follow one another, and has what comes before them: the copies of all
        of them go first, in whatever tier.

        Those before a fork stay as they are, since what else follows them was not taken over. Returns how many cooled.
        """
        child, parent = self.child, self.parent
        at = len(rows)
        while at and child[rows[at - 1]] != MANY:
            at -= 1
        mine = list(rows[at:])
        above = parent[mine[0]] if mine and not at else NONE
        while above >= 0 and child[above] != MANY:
            mine.append(above)
            above = parent[above]
        if not mine or not isinstance(self.policy, Cooler):
            return 0
        self.policy.cool([row for row in mine if self.slot[row] >= 0], now)
        below: object = self.ssd_policy
        if isinstance(below, Cooler):
            below.cool([row for row in mine if self.extent[row] >= 0], now)
        return len(mine)

    # Blocks leave DRAM.

    @property
    def follows(self) -> bool:
        """Whether the policy tells which blocks go one after the other, so that it need not be asked for many at once."""
        return self._follow is not None

    def choose(self, n: int, now: float) -> list[int]:
        """At most ``n`` rows to evict from DRAM: ``drop`` them, now or later, unless they are not CHOSEN any more then.

        Those that shall stay after all are given back.
        """
        rows = self.policy.choose(n, now)
        flags = self.flags
        for row in rows:
            flags[row] ^= IN_DRAM | CHOSEN
        return rows

    def follow(self, row: int, n: int) -> list[int]:
        """At most ``n`` blocks before ``row``, the nearest first, that the policy would evict right after it."""
        if self._follow is None or n <= 0 or self.extent[row] >= 0:
            return []
        parent, child, slot, account, flags, pins = self.parent, self.child, self.slot, self.account, self.flags, self.pins
        mine = account[row]
        chain: list[int] = []
        above = parent[row]
        while above >= 0 and child[above] == row and flags[above] == FOUND and len(chain) < n:  # no candidate, held by nobody
            if slot[above] < 0 or account[above] != mine or above in pins:
                break
            chain.append(above)
            row, above = above, parent[above]
        del chain[self._follow(chain) if chain else 0 :]
        for row in chain:
            flags[row] |= CHOSEN
        return chain

    def give_back(self, rows: Iterable[int]) -> None:
        back = [row for row in rows if self.flags[row] & CHOSEN]
        for row in back:
            self.flags[row] ^= CHOSEN
        self.refresh(back)

    def drop(self, rows: Sequence[int]) -> list[int]:
        """Evict from DRAM what was chosen; what SSD has, too, stays findable there. Returns the slots, one for each row."""
        slot, extent, flags, names = self.slot, self.extent, self.flags, self.key
        size_of, slots_of = self._accounts.size_of, self._accounts.slots_of
        for account, n in Counter(map(self.account.__getitem__, rows)).items():
            self.in_dram[size_of[account]] -= n
            slots_of[account] -= n
        slots = [slot[row] for row in rows]
        gone, stay = rows, []
        if self.on_ssd:
            gone = [row for row in rows if extent[row] < 0]
            stay = [row for row in rows if extent[row] >= 0]
            for row in stay:
                slot[row] = NONE
                self.clean[self._size(row)] -= 1
                flags[row] &= ~(IN_DRAM | CHOSEN)
        self._log.record(BlockChange.REMOVED, Tier.G2, [names[row] for row in rows])
        self.policy.removed(rows)
        if gone:
            stay += self._remove(gone)
        self.refresh(stay)
        return slots

    def _remove(self, rows: Sequence[int]) -> list[int]:
        """These leaves, without pins, are in no tier any more. Returns parents, which may be candidates now."""
        if not rows:
            return []
        child, parents = self.child, []
        ups = map(self.parent.__getitem__, rows)
        for row, above, after in zip(rows, ups, (*rows[1:], NONE), strict=True):
            if above >= 0 and above != after:  # else it goes, too, right after its child
                parents.append(above)
                if child[above] == row:
                    child[above] = NONE
                else:
                    self._unlink(row, above)
        for row in rows:
            del self._found[self.key[row]]
        ascending, at = rows[::-1], 0
        for upto in breaks(ascending):  # usually few: blocks of a sequence lie side by side
            start, n = ascending[at], upto - at
            self.key[start : start + n] = [b""] * n
            self.flags[start : start + n] = bytes(n)
            self.slot[start : start + n] = array("i", (NONE,)) * n
            at = upto
        self._spare.extend(rows)
        return [row for row in parents if self.flags[row]]

    # Blocks leave the SSD tier.

    def evict_ssd(self, n: int, now: float) -> list[int]:
        """At most ``n`` extents to free: blocks that DRAM has, too, or leaves. They are not on SSD any more."""
        if self.ssd_policy is None:
            return []
        rows = self.ssd_policy.choose(n, now)
        for row in rows:
            self.flags[row] &= ~ON_SSD
        extents = [self.extent[row] for row in rows]
        self._leave_ssd(rows)
        return extents

    def _leave_ssd(self, rows: Sequence[int]) -> None:
        """The copies on SSD are no more. Rows that DRAM does not have must be leaves without pins."""
        if self.ssd_policy is None or not rows:
            return
        self._log.record(BlockChange.REMOVED, Tier.G3, [self.key[row] for row in rows])
        gone, stay = [], []
        for row in rows:
            if self.slot[row] >= 0:
                was = self._is_stuck(row)
                self.clean[self._size(row)] -= 1
                self.extent[row] = NONE
                self._count_stuck(row, was)
                stay.append(row)
            else:
                self.extent[row] = NONE
                gone.append(row)
        self.on_ssd -= len(rows)
        self.ssd_policy.removed(rows)
        for row in stay:
            self.flags[row] &= ~ON_SSD
        self.refresh(stay + self._remove(gone))

    def lose(self, extents: Iterable[int]) -> list[int]:
        """The tier lost these. Blocks that DRAM does not have go, with their descendants. Returns slots to release."""
        lost = np.fromiter(extents, np.int64)
        rows = np.flatnonzero(np.isin(self._extents(), lost)).tolist() if len(lost) else []
        self._leave_ssd([row for row in rows if self.slot[row] >= 0 and self.flags[row] & FOUND])
        only = [row for row in rows if self.slot[row] < 0 and self.flags[row] & FOUND]
        self._log.record(BlockChange.REMOVED, Tier.G3, [self.key[row] for row in only])
        self.on_ssd -= len(only)
        if only and self.ssd_policy is not None:
            self.ssd_policy.removed(only)
        for row in rows:
            self.extent[row] = NONE
        slots: list[int] = []
        for row in only:
            if self.flags[row] & FOUND:  # else it went with one before it
                slots += self.withdraw(self.key[row])[1]
        return slots

    def moved(self, extents: Mapping[int, int]) -> None:
        """The tier moved blocks, from extent to extent."""
        column = self._extents()
        for row in np.flatnonzero(np.isin(column, np.fromiter(extents, np.int64, len(extents)))).tolist():
            column[row] = extents[int(column[row])]

    def _extents(self) -> NDArray[np.int64]:
        """A view: nothing may be added to the index while it is in use."""
        if self.ssd_policy is None or not len(self.extent):
            return np.empty(0, np.int64)
        return np.frombuffer(self.extent, np.int64)

    # Blocks leave for good.

    def withdraw(self, key: bytes) -> tuple[int, list[int]]:
        """Remove ``key`` and its descendants: how many, and the slots to release.

        Those with pins keep their slot and extent until the last pin ends. Extents of the others are ``dropped``.
        """
        top = self._found.get(key)
        if top is None:
            return 0, []
        order = [top]
        for row in order:  # grows while it is read
            order.extend(self.children(row))
        order.reverse()
        for row in order:
            self._withdraw(row)
        if (above := self.parent[top]) >= 0:
            self._cut_off(top, above)
        loose = [row for row in order if row not in self.pins]
        for row in order:
            self.parent[row] = self.child[row] = NONE
            self._children.pop(row, None)
        return len(order), self._let_go(loose)

    def _withdraw(self, row: int) -> None:
        """Its children are withdrawn already."""
        was, size = self._is_stuck(row), self._size(row)
        for _ in range((row in self.pins) + bool(self.flags[row] & HARD)):
            self._lower_busy(row, was)
            was = self._is_stuck(row)
        if was:
            raise Bug(f"block {self.key[row].hex()} is withdrawn while something after it is in use")
        if self.slot[row] >= 0:
            self.in_dram[size] -= 1
            self.clean[size] -= self.extent[row] >= 0
            self._log.record(BlockChange.REMOVED, Tier.G2, (self.key[row],))
            self.policy.removed([row])
        if self.extent[row] >= 0 and self.ssd_policy is not None:
            self.on_ssd -= 1
            self._log.record(BlockChange.REMOVED, Tier.G3, (self.key[row],))
            self.ssd_policy.removed([row])
        del self._found[self.key[row]]
        self.flags[row] = 0

    def _cut_off(self, row: int, parent: int) -> None:
        if self.child[parent] == row:
            self.child[parent] = NONE
        else:
            self._unlink(row, parent)
        self.refresh((parent,))
