"""Publishing: local workers reserve slots, fill them through their mapping, and seal them.

What one call reserves is kept together: a batch of blocks that follow one another, with consecutive numbers. So the usual
life of a reservation (all sealed at once) costs little per block.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import overload

from moonpool.core.landing import SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.claims import Life, Reservation, Reserved
from moonpool.kvstore.holdings import Holdings
from moonpool.kvstore.landings import Landings
from moonpool.kvstore.rows import NONE


@dataclass(slots=True, eq=False)
class Batch:
    """Reservations ``first`` .. ``first + len(keys) - 1`` of a chain; ``parent`` comes before its first block.

    ``apart``: of no chain, but each of a sequence that it begins.
    """

    first: int
    session: int
    writer: Life
    account: int
    use: Use
    keys: Sequence[bytes]
    slots: Sequence[int]
    parent: bytes | None
    depth: int  # block number of the first in its prompt
    anchor: list[int]  # the row of ``parent``, pinned so that making room cannot evict it; none where that is not here
    open: list[int] = field(default_factory=list)  # places in ``keys`` of what is neither sealed nor given up
    fenced: bool = False
    apart: bool = False


class Answers(Sequence[Reservation]):
    """One answer per key, as parallel sequences: ``ids`` and ``slots`` are 0 and None where ``states`` is not NEW."""

    def __init__(
        self, keys: Sequence[bytes], states: list[Reserved], ids: list[int], places: list[tuple[int, int] | None]
    ) -> None:
        self.keys, self.states, self.ids, self.places = keys, states, ids, places

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, at: int) -> Reservation: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Reservation]: ...
    def __getitem__(self, at: int | slice) -> Reservation | Sequence[Reservation]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        place, key = self.places[at], self.keys[at]
        return Reservation(key, self.states[at], None if place is None else SlotRef(*place, key), self.ids[at])

    def __iter__(self) -> Iterator[Reservation]:
        return (self[i] for i in range(len(self)))


class Reservations:
    def __init__(self, holdings: Holdings, landings: Landings) -> None:
        self._held = holdings
        self._landings = landings
        self._batches: dict[int, Batch] = {}  # by first number
        self._firsts: list[int] = []  # ascending

    def __len__(self) -> int:
        return sum(len(batch.open) for batch in self._batches.values())

    def __iter__(self) -> Iterator[Batch]:
        return iter(list(self._batches.values()))

    def reserve(
        self,
        session: int,
        writer: Life,
        layout: KVLayout,
        keys: Sequence[bytes],
        parent: bytes | None,
        use: Use,
        now: float,
    ) -> Answers:
        """See ``Pool.reserve``."""
        held = self._held
        account = held.accounts.number(layout, use.tenant)
        states = self._states(keys, parent)
        ids, places = [0] * len(keys), [None] * len(keys)  # type: list[int], list[tuple[int, int] | None]
        batches = []
        for start, end in _new_runs(states):
            above = keys[start - 1] if start else parent
            row = None if above is None else held.index.row(above)
            anchor = [] if row is None else [row]
            depth = 0 if above is None else start if row is None else held.index.depth(row) + 1
            held.pin(anchor)
            batches.append((start, end, Batch(0, session, writer, account, use, (), (), above, depth, anchor)))
        slots = held.take_some(account, sum(end - start for start, end, _ in batches), now)
        used = 0
        for start, end, batch in batches:
            n = min(end - start, len(slots) - used)
            states[start + n : end] = [Reserved.FULL] * (end - start - n)
            if not n:
                held.unpin(batch.anchor)
                continue
            batch.keys, batch.slots = keys[start : start + n], slots[used : used + n]
            used += n
            self._add(batch)
            ids[start : start + n] = range(batch.first, batch.first + n)
            places[start : start + n] = held.slots.places(batch.slots)
        return Answers(keys, states, ids, places)

    def reserve_apart(
        self, session: int, writer: Life, layout: KVLayout, keys: Sequence[bytes], use: Use, now: float
    ) -> Answers:
        """As ``reserve``, but each key begins a sequence of its own."""
        held = self._held
        account = held.accounts.number(layout, use.tenant)
        states, places = [Reserved.NEW] * len(keys), [None] * len(keys)  # type: list[Reserved], list[tuple[int, int] | None]
        ids = [0] * len(keys)
        if len(set(keys)) < len(keys) or not held.index.lacks_all(keys) or not held.none_coming(keys):
            seen: set[bytes] = set()
            for at, key in enumerate(keys):
                if held.index.row(key) is not None:
                    states[at] = Reserved.SEALED
                elif key in seen or held.coming(key):
                    states[at] = Reserved.IN_FLIGHT
                seen.add(key)
        new = [at for at, state in enumerate(states) if state is Reserved.NEW]
        slots = held.take_some(account, len(new), now)
        if full := {keys[at] for at in new[len(slots) :]}:  # a key that is named twice is answered alike
            states = [Reserved.FULL if key in full else state for key, state in zip(keys, states, strict=True)]
            del new[len(slots) :]
        if new:
            batch = Batch(0, session, writer, account, use, [keys[at] for at in new], slots, None, 0, [], apart=True)
            self._add(batch)
            for at, id, place in zip(new, batch.open, map(held.slots.place, slots), strict=True):
                ids[at], places[at] = batch.first + id, place
        return Answers(keys, states, ids, places)

    def _states(self, keys: Sequence[bytes], parent: bytes | None) -> list[Reserved]:
        index, held = self._held.index, self._held
        known = parent is None or index.row(parent) is not None or held.coming(parent)
        seen = set(keys)
        if known and len(seen) == len(keys) and index.lacks_all(keys) and held.none_coming(keys):
            return [Reserved.NEW] * len(keys)
        out: list[Reserved] = []
        for key in keys:
            if index.row(key) is not None:
                out.append(Reserved.SEALED)
            elif key not in seen or held.coming(key):
                out.append(Reserved.IN_FLIGHT)
            else:
                out.append(Reserved.NEW if known else Reserved.NO_PARENT)
            known = out[-1] is not Reserved.NO_PARENT
            seen.discard(key)
        return out

    def _add(self, batch: Batch) -> None:
        n = len(batch.keys)
        batch.first = self._held.next_id(n)
        batch.open = list(range(n))
        self._batches[batch.first] = batch
        insort(self._firsts, batch.first)
        self._held.expect(batch.keys)

    # Ends.

    def seal(self, session: int, ids: Sequence[int], now: float) -> int:
        """See ``Pool.seal``."""
        return sum(self._seal(batch, places, now) for batch, places in self._own(session, ids))

    def _seal(self, batch: Batch, places: list[int], now: float) -> int:
        held = self._held
        index, keys, parent = held.index, batch.keys, batch.parent
        whole = len(places) == len(keys) and not batch.fenced and index.lacks_all(keys)
        above = NONE if parent is None else index.row(parent)
        if whole and batch.apart:
            held.seal_apart(keys, batch.slots, batch.account, batch.use, now)
            self._over(batch)
            self._landings.wake(keys, now)
            return len(keys)
        if whole and above is not None:
            held.seal(keys, above, batch.slots, batch.account, batch.depth, batch.use, now)
            self._over(batch)
            self._landings.wake(keys, now)
            return len(keys)
        sealed = 0
        for at in places:
            sealed += self._seal_one(batch, at, now)
        self._close(batch, places)
        return sealed

    def _seal_one(self, batch: Batch, at: int, now: float) -> bool:
        """Fenced meanwhile, sealed by somebody else first, or without its parent: freed instead."""
        held, key = self._held, batch.keys[at]
        parent = batch.keys[at - 1] if at and not batch.apart else batch.parent
        orphan = parent is not None and held.index.row(parent) is None
        row = None
        if not batch.fenced and not orphan:
            depth = 0 if batch.apart else batch.depth + at
            row = held.seal_one(key, parent, batch.slots[at], batch.account, depth, batch.use, now)
        if row is None:
            lost = held.index.row(key) is not None
            held.counted["seals_lost" if lost else "seals_dropped"] += 1
            held.release(batch.account, [batch.slots[at]])
            return False
        self._landings.wake((key,), now)
        return True

    def abandon(self, session: int, ids: Sequence[int]) -> int:
        """See ``Pool.abandon``."""
        given = 0
        for batch, places in self._own(session, ids):
            self._give_up(batch, places)
            given += len(places)
        return given

    def _give_up(self, batch: Batch, places: list[int]) -> None:
        self._held.release(batch.account, [batch.slots[at] for at in places])
        self._close(batch, places)

    def _own(self, session: int, ids: Sequence[int]) -> list[tuple[Batch, list[int]]]:
        """The session's batches with the places in them, ascending. What is unknown, over or somebody else's is counted."""
        batch = self._batches.get(ids[0]) if len(ids) else None
        mine = batch is not None and batch.session == session and len(batch.open) == len(ids)
        if batch is not None and mine and _is_all(ids, batch):
            return [(batch, batch.open)]
        known = 0
        out = []
        for first, group in groupby(sorted(set(ids)), self._first_of):
            batch = self._batches.get(first)
            if batch is not None and batch.session == session:
                asked = set(group)
                places = [at for at in batch.open if first + at in asked]
                known += len(places)
                out.append((batch, places))
        self._held.counted["reservations_unknown"] += len(ids) - known
        return [(batch, places) for batch, places in out if places]

    def _first_of(self, id: int) -> int:
        at = bisect_right(self._firsts, id)
        return self._firsts[at - 1] if at else 0

    def _close(self, batch: Batch, places: list[int]) -> None:
        """These places of the batch are over; their slots are sealed or released."""
        if len(places) == len(batch.open):
            self._over(batch)
            return
        done = set(places)
        if not batch.fenced:
            self._held.expect_no_more([batch.keys[at] for at in places])
        batch.open = [at for at in batch.open if at not in done]

    def _over(self, batch: Batch) -> None:
        del self._batches[batch.first]
        del self._firsts[bisect_right(self._firsts, batch.first) - 1]
        if not batch.fenced:
            whole = len(batch.open) == len(batch.keys)
            self._held.expect_no_more(batch.keys if whole else [batch.keys[at] for at in batch.open])
        self._held.unpin(batch.anchor)

    def session_ended(self, session: int) -> None:
        """What the session was publishing is fenced: its worker may still write."""
        for batch in self._batches.values():
            if batch.session == session and not batch.fenced:
                batch.fenced = True
                self._held.slots.fence([batch.slots[at] for at in batch.open])
                self._held.expect_no_more([batch.keys[at] for at in batch.open])

    def writer_gone(self, life: Life) -> None:
        """Proof that nothing of ``life`` can be written any more."""
        for batch in [b for b in self._batches.values() if b.writer == life]:
            self._give_up(batch, batch.open)

    def writers(self) -> set[Life]:
        return {batch.writer for batch in self._batches.values()}


def _is_all(ids: Sequence[int], batch: Batch) -> bool:
    """Whether ``ids``, as many as are open, are those that are open, in order."""
    if len(ids) == len(batch.keys):
        return list(ids) == list(range(batch.first, batch.first + len(ids)))
    return list(ids) == [batch.first + at for at in batch.open]


def _new_runs(states: Sequence[Reserved]) -> list[tuple[int, int]]:
    """Where NEW ones follow one another: (first, after the last)."""
    if states and states.count(Reserved.NEW) == len(states):
        return [(0, len(states))]
    out, at = [], 0
    for new, group in groupby(states, lambda state: state is Reserved.NEW):
        n = len(list(group))
        if new:
            out.append((at, at + n))
        at += n
    return out
