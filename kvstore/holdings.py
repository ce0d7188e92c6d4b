"""Slots and index together: what landings, reservations and tickets all do to a slot.

Every sealed slot belongs to one row of the index, findable or withdrawn; a withdrawn one lives until its last pin ends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from moonpool.core.errors import Bug, LayoutMismatch
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import SlotRef
from moonpool.core.layout import KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.accounts import Accounts
from moonpool.kvstore.event_log import EventLog
from moonpool.kvstore.eviction.policy import EvictionPolicy
from moonpool.kvstore.index import BlockIndex
from moonpool.kvstore.room import Room
from moonpool.kvstore.rows import NONE, Entry
from moonpool.kvstore.slots import SlotMap

_UNFIT = re.compile(r"[^A-Za-z0-9_]")
PLACES = 64  # distinct places of mismatches that are counted by name


class Holdings(Room):
    def __init__(
        self,
        node: NodeId,
        incarnation: Incarnation,
        slots: SlotMap,
        policy: EvictionPolicy,
        ssd_policy: EvictionPolicy | None,
        quotas: Mapping[str, int],
    ) -> None:
        accounts = Accounts(node, quotas)
        self.log = EventLog(node, incarnation)
        super().__init__(node, slots, accounts, BlockIndex(self.log, accounts, policy, ssd_policy))
        self.incarnation = incarnation
        self.mismatches: Counter[str] = Counter()  # by place
        self.pins = 0
        self._writing: dict[bytes, int] = {}  # keys on their way, with how many slots wait for them
        self._ids = incarnation - 1  # nanoseconds: what somebody says of a former life's landing or ticket meets none of this

    @property
    def layouts(self) -> Mapping[str, KVLayout]:
        """What is registered, by fingerprint."""
        return self.accounts.layouts

    def next_id(self, n: int = 1) -> int:
        """The first of ``n`` numbers that were never given out, by this life or one before it."""
        self._ids += n
        return self._ids - n + 1

    def register(self, layout: KVLayout, who: str) -> None:
        """Blocks of this layout may be stored from now on; again is a no-op. Other models live side by side.

        LayoutMismatch, with both values: this model is known with another block size or shape, or its blocks are larger
        than a region.
        """
        if not self.slots.fits(layout.slot_bytes):
            raise LayoutMismatch(
                f"a block of model {layout.model} needs {layout.slot_bytes} bytes, which is more than a region of node "
                f"{self.node} has; raise store.region_bytes and store.pool_bytes"
            )
        if self.accounts.register(layout, who):
            self.add_size(layout.slot_bytes)

    # Pins.

    def leading(self, keys: Iterable[bytes], layout: str) -> list[int]:
        """Rows of the leading keys that are in DRAM; of the layout with this fingerprint only, where one is named."""
        slot, account, layout_of = self.index.slot, self.index.account, self.accounts.layout_of
        out = []
        for row in self.index.leading(keys):
            if slot[row] < 0 or (layout and layout_of[account[row]].fingerprint != layout):
                break
            out.append(row)
        return out

    def pin(self, rows: Sequence[int]) -> None:
        self.index.pin(rows)
        self.pins += len(rows)

    def unpin(self, rows: Sequence[int]) -> None:
        self.pins -= len(rows)
        slots = self.index.unpin(rows)
        if slots:
            self.slots.release(slots)

    # Blocks.

    def seal(
        self, keys: Sequence[bytes], parent: int, slots: Sequence[int], account: int, first: int, use: Use, now: float
    ) -> list[int]:
        """See ``BlockIndex.add``: a chain of blocks."""
        rows = self.index.add(keys, parent, slots, account, first, use, now)
        self.slots.seal(slots, rows)
        return rows

    def seal_apart(self, keys: Sequence[bytes], slots: Sequence[int], account: int, use: Use, now: float) -> None:
        """See ``BlockIndex.add_apart``."""
        self.slots.seal(slots, self.index.add_apart(keys, slots, account, use, now))

    def seal_one(
        self, key: bytes, parent: bytes | None, slot: int, account: int, first: int, use: Use, now: float
    ) -> int | None:
        """Seal a block whose parent is here. Its row; None where it is in DRAM already: the first seal wins."""
        index = self.index
        row = index.row(key)
        if row is None:
            above = NONE if parent is None else index.row(parent)
            if above is None:
                raise Bug(f"block {key.hex()} was sealed before its parent")
            return self.seal((key,), above, (slot,), account, first, use, now)[0]
        if index.slot[row] >= 0:
            return None
        self.put_in_dram(row, slot, account, use, now)
        return row

    def put_in_dram(self, row: int, slot: int, account: int, use: Use, now: float) -> None:
        """A block that was on SSD only lies in ``slot``, too, which was taken for ``account``."""
        self.accounts.slots_of[account] -= 1
        self.accounts.slots_of[self.index.account[row]] += 1
        self.slots.seal((slot,), (row,))
        self.index.put_in_dram(row, slot, use, now)

    def coming(self, key: bytes) -> bool:
        return key in self._writing

    def none_coming(self, keys: Iterable[bytes]) -> bool:
        return self._writing.keys().isdisjoint(keys)

    def expect(self, keys: Sequence[bytes]) -> None:
        """Somebody writes blocks of these keys, each of which is named once."""
        writing = self._writing
        if writing.keys().isdisjoint(keys):
            writing.update(dict.fromkeys(keys, 1))
            return
        for key in keys:
            writing[key] = writing.get(key, 0) + 1

    def expect_no_more(self, keys: Sequence[bytes]) -> None:
        writing = self._writing
        left = list(map(writing.pop, keys))
        if left.count(1) < len(left):
            writing.update((key, n - 1) for key, n in zip(keys, left, strict=True) if n > 1)

    def mismatch(self, place: str) -> None:
        """Count by ``place``, a short name that comes from a peer: at most ``PLACES`` of them, made fit to be a metric's."""
        place = _UNFIT.sub("_", place[:32])
        self.mismatches[place if place in self.mismatches or len(self.mismatches) < PLACES else "other"] += 1

    def ref(self, entry: Entry) -> SlotRef:
        """Bug where the block is not in DRAM."""
        if entry.slot is None:
            raise Bug(f"block {entry.key.hex()} has no slot: it is on SSD only")
        return self.slots.ref(entry.slot, entry.key)

    def refs_of(self, rows: Sequence[int]) -> tuple[SlotRef, ...]:
        slot, key = self.index.slot, self.index.key
        places = self.slots.places([slot[row] for row in rows])
        return tuple([SlotRef(region, offset, key[row]) for (region, offset), row in zip(places, rows, strict=True)])

    def ref_of(self, row: int) -> SlotRef:
        return self.slots.ref(self.index.slot[row], self.index.key[row])
