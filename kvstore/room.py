"""Room in DRAM: slots of every size, by evicting blocks, and by letting spans change their size.

Blocks are evicted in the policy's order. Blocks of other sizes that come first in that order wait, chosen and still
findable, in a queue of their size. A queue that gets long says that its size has more of the pool than its use is worth:
then a span of that size is vacated for the other one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from moonpool.core.errors import Busy
from moonpool.core.ids import NodeId
from moonpool.kvstore.accounts import Accounts
from moonpool.kvstore.index import BlockIndex
from moonpool.kvstore.rows import CHOSEN, IN_DRAM, NONE
from moonpool.kvstore.slots import SlotMap, SlotState

PARTS = 2048  # this part of the blocks is chosen at once: parents compete with what is left
AHEAD = 8  # so many more are looked at for one that is on SSD, too, and so costs nothing to evict
LEFT = 4  # a size nobody needed room for while this part of the blocks was evicted gives up what waits in its queue
FOLLOWED = 256  # blocks of one sequence chosen at once, where the policy says that they go together
PATIENCE = 2  # spans' worth of blocks that wait in a queue before a span changes its size


class Room:
    def __init__(self, node: NodeId, slots: SlotMap, accounts: Accounts, index: BlockIndex) -> None:
        self.node = node
        self.slots = slots
        self.accounts = accounts
        self.index = index
        self.counted: Counter[str] = Counter()
        self.soft: dict[bytes, None] = {}  # keys held softly, maybe no more here: evicted last
        self._queues: dict[int, deque[int]] = {}  # chosen rows by slot size
        self._patience: dict[int, int] = {}  # by slot size, in blocks
        self._asked: dict[int, int] = {}  # by slot size: how many blocks had been evicted when room was last made for it

    def add_size(self, slot_bytes: int) -> None:
        """From now on room may be asked for in slots of this size, too."""
        self.slots.register(slot_bytes)
        self._queues.setdefault(slot_bytes, deque())
        self._patience = {size: self._patient(size) for size in self._queues}

    def _patient(self, slot_bytes: int) -> int:
        return PATIENCE * self.slots.per_span(slot_bytes)

    def room(self, slot_bytes: int, enough: int) -> int:
        """Slots of a size that could be had; ``enough`` or more is all that is asked. What other sizes give is an estimate."""
        room = self.slots.free(slot_bytes) + self.index.evictable(slot_bytes)
        for other in self._queues if room < enough else ():
            if other != slot_bytes:
                room += self._from(other, slot_bytes)
        return room

    def _from(self, other: int, slot_bytes: int) -> int:
        """Slots of one size that vacating every span of another that can be vacated would give."""
        _, free = self.slots.open_slots(other)
        spare = free + self.index.evictable(other)  # slots that need not be filled
        gained = 0
        for _, count, number in self.slots.movable(other, slot_bytes, self.index.pins.keys()):
            if count <= spare:
                spare -= count
                gained += self.slots.length(number) // slot_bytes
        return gained

    def take(self, account: int, n: int, now: float) -> list[int]:
        """``n`` slots, evicting what must go. Busy, with the numbers, if even that does not help."""
        size = self.accounts.size_of[account]
        if n <= self.room(size, n):
            got = self.take_some(account, n, now)
            if len(got) == n:
                return got
            self.release(account, got)
        self._refuse_over_quota(account, n)
        slots, counts = self.slots, self.slots.counts
        raise Busy(
            f"store node {self.node}: {n} slots needed, {slots.free(size)} free and {self.index.evictable(size)} evictable of "
            f"{slots.total(size)} ({counts[SlotState.RESERVED]} reserved, {counts[SlotState.FENCED]} fenced, the rest "
            "in use); place again, or raise store.pool_bytes",
            peer=self.node,
        )

    def _refuse_over_quota(self, account: int, n: int) -> None:
        if (over := self.accounts.over(account, n)) > 0:
            tenant = self.accounts.tenant_of[account]
            raise Busy(
                f"store node {self.node}: tenant {tenant} has {self.accounts.filled(tenant)} bytes of its quota of "
                f"{self.accounts.quotas[tenant]}, and {n} slots more are {over} bytes too many; what it has is in use, so "
                "place again, or raise its quota",
                peer=self.node,
            )

    def take_some(self, account: int, n: int, now: float) -> list[int]:
        """At most ``n`` slots: fewer where even eviction does not help, or the tenant's quota forbids more."""
        accounts, slots = self.accounts, self.slots
        size = accounts.size_of[account]
        if accounts.quotas and (over := accounts.over(account, n)) > 0:
            over -= self._evict_own(account, over)
            n = max(n - max(-(-over // size), 0), 0)
        if slots.free(size) < n:
            self._make_room(size, n, now)
            n = min(n, slots.free(size))
        accounts.slots_of[account] += n
        return slots.take(size, n)

    def release(self, account: int, slots: Sequence[int]) -> None:
        """Slots that were taken for ``account`` and not sealed."""
        self.accounts.slots_of[account] -= len(slots)
        self.slots.release(slots)

    def withdraw(self, key: bytes) -> int:
        """Make ``key`` and its descendants unfindable; slots without pins are free at once. Returns how many there were."""
        blocks, slots = self.index.withdraw(key)
        if slots:
            self.slots.release(slots)
        return blocks

    def _make_room(self, size: int, n: int, now: float) -> None:
        """Evict until ``n`` slots of ``size`` are free, or nothing more can go."""
        queue = self._queues[size]
        self._asked[size] = self.counted["evicted"]
        while (lack := n - self.slots.free(size)) > 0:
            if queue:
                self.evict(self._chosen(queue, lack))
            elif not (self._exchange(size, forced=False) or self._choose(lack, now) or self._last_resort(size)):
                return

    def _choose(self, lack: int, now: float) -> bool:
        """Ask the policy for some blocks, of whatever size. Blocks that are on SSD, too, go first among about equals."""
        index = self.index
        n = 1 if index.follows else max(min(lack, len(index) // PARTS), 1)
        rows = index.choose(n + AHEAD if index.on_ssd else n, now)
        if len(rows) > n:
            rows.sort(key=lambda row: index.extent[row] < 0)
            index.give_back(rows[n:])
            del rows[n:]
        if rows and index.follows:
            rows += index.follow(rows[-1], max(lack, FOLLOWED) - 1)
        if len(self._queues) == 1:
            for queue in self._queues.values():
                queue.extend(rows)
        else:
            size_of, account = self.accounts.size_of, index.account
            for row in rows:
                self._queues[size_of[account[row]]].append(row)
        return bool(rows)

    def _chosen(self, queue: deque[int], n: int) -> list[int]:
        """Take at most ``n`` rows that are still to be evicted from the front."""
        out: list[int] = []
        flags, child, extent, last = self.index.flags, self.index.child, self.index.extent, NONE
        while queue and len(out) < n:
            row = queue.popleft()
            if flags[row] & CHOSEN:  # else it was used since, or is in the queue twice, because it was used and chosen again
                flags[row] ^= CHOSEN
                if child[row] == last or child[row] == NONE or extent[row] >= 0:
                    out.append(row)
                    last = row  # else what came after it when it was chosen is in use again
        return out

    def unchoose(self) -> None:
        """What waits to be evicted is a candidate like any other again."""
        for queue in self._queues.values():
            self.index.give_back(queue)
            queue.clear()

    def evict(self, rows: Sequence[int]) -> None:
        """Drop the DRAM copies of these candidates, chosen by the policy or not."""
        if rows:
            self.slots.release(self.index.drop(rows))
            self.counted["evicted"] += len(rows)

    # From other sizes.

    def _exchange(self, size: int, *, forced: bool) -> bool:
        """Vacate a span of the size whose queue is longest beyond its patience (forced: of any) for slots of ``size``."""
        best, most = 0, 0.0
        for other, queue in self._queues.items():
            if other != size and (forced or len(queue) > self._patience[other] or (queue and self._is_left(other))):
                weight = (len(queue) + 1) / self._patience[other]
                if weight > most and (not forced or self._from(other, size)):
                    best, most = other, weight
        return bool(best) and self._vacate(best, size)

    def _is_left(self, size: int) -> bool:
        """Nobody has needed room for this size while much of the pool's content was replaced."""
        return (self.counted["evicted"] - self._asked.get(size, 0)) * LEFT > len(self.index)

    def _vacate(self, other: int, size: int) -> bool:
        """Whether anything came free: a span for slots of ``size``, or at least slots of the ``other`` size."""
        chosen = self.index.flags
        queue = self._queues[other] = deque(row for row in dict.fromkeys(self._queues[other]) if chosen[row] & CHOSEN)
        evicted = False
        while (least := next(self.slots.movable(other, size, self.index.pins.keys()), None)) is not None:
            _, count, number = least
            _, free = self.slots.open_slots(other)
            if count <= free:
                for row, slot in self.slots.vacate(number):
                    self.index.slot[row] = slot
                self._patience[other] = self._patient(other)
                return True
            rows = self._chosen(queue, count - free)
            if not rows:
                break
            self.evict(rows)
            evicted = True
        self._asked[other] = self.counted["evicted"]
        self._patience[other] = max(2 * len(queue), self._patience[other])  # everywhere something is in use: not soon again
        return evicted

    # When the policy has no candidate left, and for quotas.

    def _last_resort(self, size: int) -> bool:
        """The policy has no candidate left. Whether anything else could be done that makes room, now or on the next try."""
        return self._exchange(size, forced=True) or self._give_up_ssd() or self._evict_soft(size)

    def _give_up_ssd(self) -> bool:
        """Withdraw what comes after the block used longest ago that only DRAM has and that only SSD copies come after."""
        index = self.index
        if index.ssd_policy is None:
            return False
        rows = [row for row in index.rows() if index.slot[row] >= 0 and index.child[row] != NONE and index.is_idle(row)]
        if not rows:
            return False
        row = min(rows, key=index.used.__getitem__)
        for child in list(index.children(row)):
            self.withdraw(index.key[child])
        return True

    def _evict_soft(self, size: int) -> bool:
        """The softly held block that was used longest ago, of this size if there is one."""
        index, size_of = self.index, self.accounts.size_of
        rows = [row for key in self.soft if (row := index.row(key)) is not None and index.is_soft_candidate(row)]
        if not rows:
            return False
        row = min(rows, key=lambda row: (size_of[index.account[row]] != size, index.used[row]))
        self.evict([row])
        return True

    def _evict_own(self, account: int, over: int) -> int:
        """Evict the tenant's own blocks, those used longest ago first, for ``over`` bytes. Returns the bytes freed."""
        index, size_of, freed = self.index, self.accounts.size_of, 0
        mine = self.accounts.of_tenant(self.accounts.tenant_of[account])
        while freed < over and (rows := index.oldest(mine, PARTS)):
            for row in rows:
                if freed >= over:
                    break
                if index.flags[row] & (IN_DRAM | CHOSEN):
                    freed += size_of[index.account[row]]
                    self.evict([row])
        return freed
