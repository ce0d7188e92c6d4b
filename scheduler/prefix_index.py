"""Who holds which block: block key -> holders as an int bitmask, matched by galloping.

Eviction is leaf first, so the holders of a prefix are closed: whoever has block i of a prompt has the blocks before it.
Along a prompt the mask therefore only shrinks, and the places where it shrinks are found by galloping (Bentley and Yao,
1976) over equal masks: O(r log n) look-ups for r different depths among n keys.

Soft state. The index may claim too much (a block evicted a moment ago, a gap inside a prefix): the answer to a pin at
the store node is the truth. It never claims what no event said.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from moonpool.core.events import BlockChange, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation

Masks = dict[bytes, int]


class Applied(Enum):
    DONE = "done"
    GAP = "gap"  # numbers are missing: nothing changed, and nothing will until a snapshot is loaded
    OLD = "old"  # of an earlier life: ignored


@dataclass(slots=True)
class _Life:
    """What is followed of one holder: its bit as a mask, and the number its next event must have."""

    incarnation: Incarnation
    bit: int
    next_number: int
    in_step: bool = True


class PrefixIndex:
    """Holders share one ``top`` tier, the fastest they have (G1 for workers, G2 for nodes).

    A copy in the top tier costs one dict entry; copies in slower tiers are kept beside it. A dropped holder's bit is
    masked out at once and taken out of the entries by ``sweep``, a few at a time, before it names another holder.
    """

    def __init__(self, top: Tier) -> None:
        self.top = top
        self._any: Masks = {}  # holders of a key in whatever tier
        self._lower: dict[Tier, Masks] = {}  # copies below the top tier
        self._not_on_top: Masks = {}  # holders in _any that have the key only below the top tier
        self._lives: dict[str, _Life] = {}
        self._names: list[str] = []  # by bit number; stale for bits that are dead or free
        self._free: list[int] = []  # bit numbers
        self._live = 0  # bits of the followed holders
        self._dead = 0  # dropped, still present in entries
        self._sweeping = 0  # the part of _dead that the sweep under way takes out
        self._unswept: list[bytes] = []

    def __len__(self) -> int:
        """Keys known, those of dropped holders included until they are swept."""
        return len(self._any)

    def memory_bytes(self) -> int:
        """Memory of the entries: the tables, every key, and every mask object once."""
        tables = (self._any, self._not_on_top, *self._lower.values())
        masks = {id(mask): mask for table in tables for mask in table.values()}
        keys = sum(sys.getsizeof(key) for key in self._any)
        return keys + sum(map(sys.getsizeof, tables)) + sum(map(sys.getsizeof, masks.values()))

    @property
    def bits(self) -> int:
        """Width of the masks."""
        return len(self._names)

    def holders(self) -> list[str]:
        return sorted(self._lives)

    def bit_number(self, holder: str) -> int | None:
        life = self._lives.get(holder)
        return None if life is None else life.bit.bit_length() - 1

    def names(self, mask: int) -> Iterator[str]:
        while mask:
            low = mask & -mask
            yield self._names[low.bit_length() - 1]
            mask ^= low

    def next_number(self, holder: str, incarnation: Incarnation) -> int:
        """The number of the next event wanted from this life of ``holder``; 0: a snapshot is wanted."""
        life = self._lives.get(holder)
        return life.next_number if life is not None and life.incarnation == incarnation and life.in_step else 0

    # -- reading -------------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """(depth, mask) by growing depth: the holders in ``mask`` hold the first ``depth`` keys and not the next one."""
        n, get = len(keys), self._any.get
        held = get(keys[0], 0) & self._live if n else 0
        runs: list[tuple[int, int]] = []
        last = 0  # keys[last] is held by all of ``held``
        while held:
            step = 1
            while last + step < n and get(keys[last + step], 0) & held == held:
                last += step
                step <<= 1
            beyond = min(n, last + step)  # keys[beyond] is not
            while beyond - last > 1:
                middle = (last + beyond) >> 1
                if get(keys[middle], 0) & held == held:
                    last = middle
                else:
                    beyond = middle
            last += 1
            deeper = get(keys[last], 0) & held if last < n else 0
            runs.append((last, held & ~deeper))
            held = deeper
        return runs

    def tier_of(self, key: bytes, holder: str) -> Tier | None:
        """The fastest tier in which ``holder`` has ``key``."""
        life = self._lives.get(holder)
        if life is None or not self._any.get(key, 0) & life.bit:
            return None
        if not self._not_on_top.get(key, 0) & life.bit:
            return self.top
        return min(tier for tier, masks in self._lower.items() if masks.get(key, 0) & life.bit)

    # -- following -----------------------------------------------------------------------------------------------------

    def apply(self, batch: EventBatch) -> Applied:
        """Follow ``batch``; events already known are skipped, a gap or an unknown middle asks for a snapshot."""
        life = self._lives.get(batch.holder)
        if life is not None and batch.incarnation < life.incarnation:
            return Applied.OLD
        if life is None or batch.incarnation > life.incarnation:
            if batch.number > 1:
                return Applied.GAP
            life = self._begin(batch.holder, batch.incarnation, batch.number)
        if not life.in_step or batch.number > life.next_number:
            life.in_step = False
            return Applied.GAP
        self._take(life, batch)
        return Applied.DONE

    def follow_from(self, batch: EventBatch) -> None:
        """Forget what was known of the holder and follow it from ``batch`` on, in the middle of its events.

        For holders that nobody can ask for a snapshot: what they stored before stays unknown, which only claims less.
        """
        self._take(self._begin(batch.holder, batch.incarnation, batch.number), batch)

    def load(self, snapshot: IndexSnapshot) -> Applied:
        """Replace all that is known of the snapshot's holder."""
        life = self._lives.get(snapshot.holder)
        if life is not None and snapshot.incarnation < life.incarnation:
            return Applied.OLD
        life = self._begin(snapshot.holder, snapshot.incarnation, snapshot.number + 1)
        for tier, keys in snapshot.entries:
            self._store(life.bit, tier, keys)
        return Applied.DONE

    def drop(self, holder: str) -> None:
        life = self._lives.pop(holder, None)
        if life is not None:
            self._live &= ~life.bit
            self._dead |= life.bit

    def sweep(self, limit: int) -> None:
        """Take dropped holders out of at most ``limit`` entries."""
        if not self._unswept:
            if not self._dead:
                return
            self._sweeping, self._unswept = self._dead, list(self._any)
        keys, self._unswept = self._unswept[-limit:], self._unswept[:-limit]
        for masks in (self._any, self._not_on_top, *self._lower.values()):
            _clear(masks, keys, self._sweeping)
        if not self._unswept:
            self._dead &= ~self._sweeping
            while self._sweeping:
                low = self._sweeping & -self._sweeping
                self._free.append(low.bit_length() - 1)
                self._sweeping ^= low

    def _begin(self, holder: str, incarnation: Incarnation, number: int) -> _Life:
        """A fresh bit for ``holder``: whatever was known of it is dropped."""
        self.drop(holder)
        if self._free:
            at = self._free.pop()
            self._names[at] = holder
        else:
            at = len(self._names)
            self._names.append(holder)
        life = self._lives[holder] = _Life(incarnation, 1 << at, number)
        self._live |= life.bit
        return life

    def _take(self, life: _Life, batch: EventBatch) -> None:
        for event in batch.events[life.next_number - batch.number :]:
            if event.change is BlockChange.STORED:
                self._store(life.bit, event.tier, event.keys)
            else:
                self._remove(life.bit, event.tier, event.keys)
        life.next_number = max(life.next_number, batch.number + len(batch.events))

    def _store(self, bit: int, tier: Tier, keys: Sequence[bytes]) -> None:
        if tier is self.top:
            _set(self._any, keys, bit)
            if self._not_on_top:
                _clear(self._not_on_top, keys, bit)
            return
        fresh = [key for key in keys if not self._any.get(key, 0) & bit]
        _set(self._any, fresh, bit)
        _set(self._not_on_top, fresh, bit)
        _set(self._lower.setdefault(tier, {}), keys, bit)

    def _remove(self, bit: int, tier: Tier, keys: Sequence[bytes]) -> None:
        if not self._lower:
            if tier is self.top:
                _clear(self._any, keys, bit)
            return
        if tier is self.top:
            _set(self._not_on_top, [key for key in keys if self._any.get(key, 0) & bit], bit)
        else:
            _clear(self._lower.get(tier, {}), keys, bit)
        lost = [
            key
            for key in keys
            if self._not_on_top.get(key, 0) & bit and not any(masks.get(key, 0) & bit for masks in self._lower.values())
        ]
        _clear(self._any, lost, bit)
        _clear(self._not_on_top, lost, bit)


def _set(masks: Masks, keys: Iterable[bytes], bit: int) -> None:
    """Blocks stored together have the same holders, so their entries share one int object."""
    with_bit: dict[int, int] = {}
    get = masks.get
    for key in keys:
        old = get(key, 0)
        new = with_bit.get(old)
        if new is None:
            new = with_bit[old] = old | bit
        masks[key] = new


def _clear(masks: Masks, keys: Iterable[bytes], bits: int) -> None:
    without: dict[int, int] = {}
    get, keep = masks.get, ~bits
    for key in keys:
        old = get(key, 0)
        if not old & bits:
            continue
        new = without.get(old)
        if new is None:
            new = without[old] = old & keep
        if new:
            masks[key] = new
        else:
            del masks[key]
