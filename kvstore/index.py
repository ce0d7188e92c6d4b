"""What a store node can be asked for: blocks by key, in DRAM, on SSD or in both, prefix-closed over the union of both.

Prefix-closed: a block is findable only while its parent is (first blocks have none). So whoever matches a chain of keys
may stop at the first one missing. Losing a middle block withdraws its descendants with it.

Blocks are rows of parallel arrays, because an object for each would take several times the room. A row number is given
out anew once its block is gone and nobody has it pinned. Policies hear which rows may go from either tier:

- from DRAM: nobody pins or holds it, and it is a leaf or has a copy on SSD;
- from SSD: nobody pins it, and it is a leaf or has a copy in DRAM.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonpool.core.errors import Bug
from moonpool.core.events import BlockChange, Tier
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.accounts import Accounts
from moonpool.kvstore.event_log import EventLog
from moonpool.kvstore.eviction.policy import EvictionPolicy, Follower

NONE, MANY = -1, -2  # no row, slot or extent; and in ``child``: several
# Flags of a row: findable; candidate in either tier; chosen to be evicted from DRAM, but not yet; held by somebody.
FOUND, IN_DRAM, ON_SSD, CHOSEN, SOFT, HARD = 1, 2, 4, 8, 16, 32
GROW = 1024  # rows made at once, at least


@dataclass(frozen=True, slots=True)
class Entry:
    """One findable block as it was when asked for."""

    row: int
    key: bytes
    parent: bytes | None
    children: frozenset[bytes]
    layout: KVLayout
    use: Use  # of its first writer; only the tenant is remembered
    used: float
    pins: int
    held: str  # "hard", "soft" or nothing
    slot: int | None  # None: not in DRAM
    extent: int | None  # None: not on SSD

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return (Tier.G2,) * (self.slot is not None) + (Tier.G3,) * (self.extent is not None)


class BlockIndex:
    def __init__(
        self, log: EventLog, accounts: Accounts, policy: EvictionPolicy, ssd_policy: EvictionPolicy | None = None
    ) -> None:
        self._log = log
        self._accounts = accounts
        self.policy = policy
        self.ssd_policy = ssd_policy
        self._follow = policy.follow if isinstance(policy, Follower) else None
        self._found: dict[bytes, int] = {}  # parents before children: both were inserted in that order
        self.key: list[bytes] = []  # these by row
        self.parent = array("i")
        self.child = array("i")  # NONE, the only child, or MANY: then they are in ``_children``
        self.slot = array("i")
        self.extent = array("b" if ssd_policy is None else "q")  # without an SSD tier all are NONE: a byte says so
        self.account = array("H")
        self.used = array("f")
        self.flags = bytearray()
        self._children: dict[int, set[int]] = {}
        self.pins: dict[int, int] = {}  # rows that somebody has pinned, in whatever tier; withdrawn ones, too
        self._busy: dict[int, int] = {}  # own pins (as one), own hard holds (as one), and children that are busy
        self._spare: list[int] = []
        self.in_dram: Counter[int] = Counter()  # findable blocks with a slot, by slot size
        self.stuck: Counter[int] = Counter()  # those of them that eviction cannot take, by slot size
        self.clean: Counter[int] = Counter()  # those of them that are on SSD, too
        self.on_ssd = 0
        self.dropped: list[int] = []  # extents of blocks that were withdrawn: the tier's to free

    @property
    def follows(self) -> bool:
        """Whether the policy tells which blocks go one after the other, so that it need not be asked for many at once."""
        return self._follow is not None

    def __len__(self) -> int:
        return len(self._found)

    def keys(self) -> Iterable[bytes]:
        return self._found.keys()

    def row(self, key: bytes) -> int | None:
        return self._found.get(key)

    def lacks_all(self, keys: Iterable[bytes]) -> bool:
        return self._found.keys().isdisjoint(keys)

    def leading(self, keys: Iterable[bytes]) -> list[int]:
        """Rows of the leading keys that are here, in any tier."""
        out, get = [], self._found.get
        for key in keys:
            row = get(key)
            if row is None:
                break
            out.append(row)
        return out

    def get(self, key: bytes) -> Entry | None:
        row = self._found.get(key)
        if row is None:
            return None
        above, flags = self.parent[row], self.flags[row]
        return Entry(
            row,
            key,
            None if above < 0 else self.key[above],
            frozenset(self.key[child] for child in self.children(row)),
            self._accounts.layout_of[self.account[row]],
            Use(self._accounts.tenant_of[self.account[row]]),
            self.used[row],
            self.pins.get(row, 0),
            "hard" if flags & HARD else "soft" if flags & SOFT else "",
            self.slot[row] if self.slot[row] >= 0 else None,
            self.extent[row] if self.extent[row] >= 0 else None,
        )

    def children(self, row: int) -> Iterable[int]:
        child = self.child[row]
        if child == NONE:
            return ()
        return self._children[row] if child == MANY else (child,)

    def depth(self, row: int) -> int:
        """How many blocks come before this one."""
        depth, parent = 0, self.parent
        while (row := parent[row]) >= 0:
            depth += 1
        return depth

    def keys_in(self, tier: Tier) -> list[bytes]:
        """Parents before children."""
        where = self.slot if tier is Tier.G2 else self.extent
        return [key for key, row in self._found.items() if where[row] >= 0]

    def evictable(self, slot_bytes: int) -> int:
        """How many blocks of this size could be evicted from DRAM, one after the other."""
        return self.in_dram[slot_bytes] - self.stuck[slot_bytes]

    # Blocks come.

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

    def _insert(self, keys: Sequence[bytes], slots: Sequence[int], account: int, now: float) -> list[int]:
        """Rows of new blocks. The caller writes who their parents and children are."""
        spare, n = self._spare, len(keys)
        while len(spare) < n:
            self._grow()
        rows = spare[: -n - 1 : -1]
        del spare[-n:]
        before = len(self._found)
        self._found.update(zip(keys, rows, strict=True))
        if len(self._found) != before + n:
            raise Bug(f"a block was sealed twice: one of {n} after {keys[0].hex()}")
        at = 0
        for upto in _breaks(rows):  # usually few: rows of a sequence are given back in order
            self._fill(rows[at], keys[at:upto], slots[at:upto], account, now)
            at = upto
        return rows

    def _fill(self, row: int, keys: Sequence[bytes], slots: Sequence[int], account: int, now: float) -> None:
        """Rows from ``row`` on are these blocks."""
        n = len(keys)
        end = row + n
        self.key[row:end] = keys
        self.slot[row:end] = array("i", slots)
        self.account[row:end] = array("H", (account,)) * n
        self.used[row:end] = array("f", (now,)) * n
        self.flags[row:end] = bytes((FOUND,)) * n

    def _grow(self) -> None:
        first, more = len(self.key), max(GROW, len(self.key) // 16)
        self.key = self.key + [b""] * more  # a new list, because one that is extended takes an eighth more than it needs
        for column in (self.parent, self.child, self.slot, self.extent):
            column.extend([NONE] * more)
        self.account.extend([0] * more)
        self.used.extend([0.0] * more)
        self.flags.extend(bytes(more))
        self._spare.extend(range(first + more - 1, first - 1, -1))

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

    # Blocks are used and held.

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

    def is_found(self, row: int) -> bool:
        """Whether a row that somebody has pinned can still be found."""
        return bool(self.flags[row] & FOUND)

    def is_kept(self, row: int) -> bool:
        """Somebody reads or writes it, or holds it hard."""
        return row in self.pins or bool(self.flags[row] & HARD)

    def copies(self, row: int) -> int:
        return (self.slot[row] >= 0) + (self.extent[row] >= 0)

    def descending(self, keys: Iterable[bytes]) -> list[int]:
        """Rows of ``keys`` and of all that comes after them, each once and after what comes before it."""
        named = dict.fromkeys(row for key in keys if (row := self._found.get(key)) is not None)
        clear: set[int] = set()  # neither named themselves, nor below one that is
        out = []
        for row in named:
            path, at = [], self.parent[row]
            while at >= 0 and at not in named and at not in clear:
                path.append(at)
                at = self.parent[at]
            if at not in named:
                clear.update(path)
                out.append(row)
        for row in out:  # grows while it is read
            out.extend(self.children(row))
        return out

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

    # Blocks go.

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
        for upto in _breaks(ascending):  # usually few: blocks of a sequence lie side by side
            start, n = ascending[at], upto - at
            self.key[start : start + n] = [b""] * n
            self.flags[start : start + n] = bytes(n)
            self.slot[start : start + n] = array("i", (NONE,)) * n
            at = upto
        self._spare.extend(rows)
        return [row for row in parents if self.flags[row]]

    def _link(self, row: int, parent: int) -> None:
        only = self.child[parent]
        if only == NONE:
            self.child[parent] = row
        elif only == MANY:
            self._children[parent].add(row)
        else:
            self._children[parent] = {only, row}
            self.child[parent] = MANY

    def _unlink(self, row: int, parent: int) -> None:
        """``row`` is one of several children."""
        left = self._children[parent]
        left.discard(row)
        if len(left) == 1:
            self.child[parent] = left.pop()
            del self._children[parent]

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

    def rows(self) -> list[int]:
        """Of what can be found, parents first."""
        return list(self._found.values())


def _breaks(rows: Sequence[int]) -> list[int]:
    """Places after which ``rows`` do not count up by one, and the end."""
    return [at for at, (row, before) in enumerate(zip(rows[1:], rows, strict=False), 1) if row != before + 1] + [len(rows)]
