"""Who holds which block: block key -> holders as an int bitmask, matched by galloping.

Eviction is leaf first, so the holders of a prefix are closed: whoever has block i of a prompt has the blocks before it.
Along a prompt the mask therefore only shrinks, and the places where it shrinks are found by galloping (Bentley and Yao,
1976) over equal masks: O(r log n) look-ups for r different depths among n keys.

Soft state. The index may claim too much (a block evicted a moment ago, a gap inside a prefix): the answer to a pin at
the store node is the truth. It never claims what no event said.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat

from moonpool.core.events import BlockChange, BlockEvent, EventBatch, IndexSnapshot, Tier
from moonpool.core.ids import Incarnation
from moonpool.scheduler.holder_sets import NOBODY, HolderSets, allocated

MOST_BEHIND = 100_000  # keys of events that may wait for a snapshot still being loaded; then it is loaded at once
TIERS = tuple(Tier)  # the fastest first


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
    unloaded: deque[tuple[Tier, tuple[bytes, ...]]] = field(default_factory=deque)  # of its snapshot
    loaded: int = 0  # keys of the first of them that are in
    behind: list[BlockEvent] = field(default_factory=list)  # events after the snapshot, while it is being loaded
    behind_keys: int = 0


class PrefixIndex:
    """Holders share one ``top`` tier, the fastest they have (G1 for workers, G2 for nodes).

    A block is one dict entry, however many hold it and in whatever tiers (``holder_sets``). A dropped holder's bit is
    masked out at once and taken out of the entries by ``sweep``, a few at a time, before it names another holder.
    """

    def __init__(self, top: Tier) -> None:
        self.top = top
        self._first = TIERS.index(top)
        self._found: dict[bytes, int] = {}  # key -> number of its holder set
        self._sets = HolderSets()
        self._lives: dict[str, _Life] = {}
        self._loading: dict[str, _Life] = {}  # those with a part of a snapshot to load, the oldest first
        self._names: list[str] = []  # by bit number; stale for bits that are dead or free
        self._free: list[int] = []  # bit numbers
        self._live = 0  # bits of the followed holders
        self._dead = 0  # dropped, still present in entries
        self._sweeping = 0  # the part of _dead that the sweep under way takes out
        self._unswept: list[bytes] = []

    def __len__(self) -> int:
        """Keys known, those of dropped holders included until they are swept."""
        return len(self._found)

    def memory_bytes(self) -> int:
        """Memory of the entries: the table, every key, and the sets of holders."""
        return allocated(self._found) + sum(map(allocated, self._found)) + self._sets.memory_bytes()

    @property
    def holder_sets(self) -> int:
        """Different sets of holders that blocks have."""
        return len(self._sets) - 1

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
        n, get, holders = len(keys), self._found.get, self._sets.any
        held = holders[get(keys[0], NOBODY)] & self._live if n else 0
        runs: list[tuple[int, int]] = []
        last = 0  # keys[last] is held by all of ``held``
        while held:
            step = 1
            while last + step < n and holders[get(keys[last + step], NOBODY)] & held == held:
                last += step
                step <<= 1
            beyond = min(n, last + step)  # keys[beyond] is not
            while beyond - last > 1:
                middle = (last + beyond) >> 1
                if holders[get(keys[middle], NOBODY)] & held == held:
                    last = middle
                else:
                    beyond = middle
            last += 1
            deeper = holders[get(keys[last], NOBODY)] & held if last < n else 0
            runs.append((last, held & ~deeper))
            held = deeper
        return runs

    def tier_of(self, key: bytes, holder: str) -> Tier | None:
        """The fastest tier in which ``holder`` has ``key``."""
        life = self._lives.get(holder)
        if life is None:
            return None
        levels = self._sets.at[self._found.get(key, NOBODY)]
        return next((TIERS[self._first + level] for level, mask in enumerate(levels) if mask & life.bit), None)

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
        self._take(batch.holder, life, batch)
        return Applied.DONE

    def follow_from(self, batch: EventBatch) -> None:
        """Forget what was known of the holder and follow it from ``batch`` on, in the middle of its events.

        For holders that nobody can ask for a snapshot: what they stored before stays unknown, which only claims less.
        """
        self._take(batch.holder, self._begin(batch.holder, batch.incarnation, batch.number), batch)

    def load(self, snapshot: IndexSnapshot, limit: int | None = None) -> Applied:
        """Replace all that is known of the snapshot's holder, by at most ``limit`` entries now (None: by all of them).

        ``load_more`` brings the others in; until then the holder is claimed to have less than it has.
        """
        life = self._lives.get(snapshot.holder)
        if life is not None and snapshot.incarnation < life.incarnation:
            return Applied.OLD
        life = self._begin(snapshot.holder, snapshot.incarnation, snapshot.number + 1)
        life.unloaded.extend(snapshot.entries)
        self._loading[snapshot.holder] = life
        self._load(snapshot.holder, life, sum(len(keys) for _, keys in snapshot.entries) if limit is None else limit)
        return Applied.DONE

    def load_more(self, limit: int) -> bool:
        """At most ``limit`` more entries of snapshots. Whether some are left."""
        for holder, life in list(self._loading.items()):
            limit -= self._load(holder, life, limit)
            if limit <= 0:
                break
        return bool(self._loading)

    def drop(self, holder: str) -> None:
        life = self._lives.pop(holder, None)
        self._loading.pop(holder, None)
        if life is not None:
            self._live &= ~life.bit
            self._dead |= life.bit

    def sweep(self, limit: int) -> None:
        """Take dropped holders out of at most ``limit`` entries."""
        if not self._unswept:
            if not self._dead:
                return
            self._sweeping, self._unswept = self._dead, list(self._found)
        keys = self._unswept[-limit:]
        del self._unswept[-limit:]
        gone = self._sweeping
        self._change(keys, lambda old: self._sets.without(old, gone))
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

    def _load(self, holder: str, life: _Life, limit: int) -> int:
        """At most ``limit`` entries of one snapshot, then what happened since. Returns how many entries."""
        done = 0
        while life.unloaded and (done < limit or not life.unloaded[0][1]):
            tier, keys = life.unloaded[0]
            part = keys[life.loaded : life.loaded + limit - done]
            self._store(life.bit, tier, part)
            done += len(part)
            life.loaded += len(part)
            if life.loaded == len(keys):
                life.unloaded.popleft()
                life.loaded = 0
        if not life.unloaded:
            del self._loading[holder]
            behind, life.behind, life.behind_keys = life.behind, [], 0
            self._follow(life, behind)
        return done

    def _take(self, holder: str, life: _Life, batch: EventBatch) -> None:
        fresh = batch.events[life.next_number - batch.number :]
        life.next_number = max(life.next_number, batch.number + len(batch.events))
        if holder not in self._loading:
            self._follow(life, fresh)
            return
        life.behind += fresh
        life.behind_keys += sum(len(event.keys) for event in fresh)
        if life.behind_keys > MOST_BEHIND:
            self._load(holder, life, sum(len(keys) for _, keys in life.unloaded))

    def _follow(self, life: _Life, events: Sequence[BlockEvent]) -> None:
        for event in events:
            (self._store if event.change is BlockChange.STORED else self._remove)(life.bit, event.tier, event.keys)

    def _store(self, bit: int, tier: Tier, keys: Sequence[bytes]) -> None:
        level = self._level(tier)
        self._change(keys, lambda old: self._sets.adding(old, level, bit))

    def _remove(self, bit: int, tier: Tier, keys: Sequence[bytes]) -> None:
        level = self._level(tier)
        self._change(keys, lambda old: self._sets.lacking(old, level, bit))

    def _level(self, tier: Tier) -> int:
        return max(TIERS.index(tier) - self._first, 0)

    def _change(self, keys: Sequence[bytes], becomes: Callable[[int], int]) -> None:
        """Every key's set becomes another one. Keys changed together have few different ones: each is worked out once.

        ``becomes`` leaves alone what it made, so a set that is left here is entered by none.
        """
        found = self._found
        olds = dict(zip(keys, map(found.get, keys, repeat(NOBODY)), strict=True))  # names each key once
        news = {old: becomes(old) for old in set(olds.values())}
        if len(news) == 1:
            ((old, new),) = news.items()
            if old == new:
                return
            if new:
                found.update(dict.fromkeys(olds, new))
            else:
                for key in olds:
                    del found[key]
            self._sets.moved(old, new, len(olds))
            return
        found.update(zip(olds, map(news.__getitem__, olds.values()), strict=True))
        for key in [key for key, old in olds.items() if not news[old]]:
            del found[key]
        counts = Counter(olds.values())
        for old, new in news.items():
            if old != new:
                self._sets.moved(old, new, counts[old])
