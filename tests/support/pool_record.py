"""A pool whose memory and disk a test keeps as plain dicts, and what the test knows of who may touch which of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.core.events import BlockChange, Tier
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import SlotRef
from moonpool.core.layout import SLOT_ALIGN, KVLayout
from moonpool.core.use import Use
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.slots import SlotMap

Place = tuple[int, int]
TOKENS = 16
SMALL = KVLayout("small", layers=1, kv_heads=4, head_dim=4, dtype="float32", block_tokens=TOKENS)  # 1 unit
LARGE = KVLayout("large", layers=2, kv_heads=16, head_dim=4, dtype="float32", block_tokens=TOKENS)  # 5 units
TENANTS = ("default", "t", "u")


def chain(path: str) -> list[bytes]:
    """A sequence of blocks is a path in a tree: "0", "01", "011" ...; the key of a block is the path to it."""
    return [path[: i + 1].encode().ljust(16, b".") for i in range(len(path))]


def parent_of(key: bytes) -> bytes | None:
    path = key.rstrip(b".")
    return path[:-1].ljust(16, b".") if len(path) > 1 else None


def layout_of(key: bytes) -> KVLayout:
    return SMALL if key.startswith(b"0") else LARGE


@dataclass
class Record:
    """``memory`` is what lies in slots, by place; ``disk`` what lies in extents."""

    regions: tuple[int, ...]
    memory: dict[Place, bytes] = field(default_factory=dict)
    disk: dict[int, bytes] = field(default_factory=dict)
    tiers: dict[Tier, dict[bytes, None]] = field(default_factory=lambda: {Tier.G2: {}, Tier.G3: {}})  # from events alone
    guarded: dict[tuple[str, int], set[Place]] = field(default_factory=dict)  # places that must stay what they are, by claim
    next_event: int = 1
    extents: int = 0
    moves: int = 0

    def __post_init__(self) -> None:
        self.slots = SlotMap([n * SLOT_ALIGN for n in self.regions], self._freed, self._moved)
        self.pool = Pool(NodeId("n"), Incarnation(1), self.slots, Lru(), Lru(), quotas={"u": 4 * SMALL.slot_bytes})
        self.pool.register(SMALL)
        self.pool.register(LARGE)

    def is_guarded(self, place: Place) -> bool:
        return any(place in places for places in self.guarded.values())

    def _freed(self, slot: int) -> None:
        place = self.slots.place(slot)
        assert not self.is_guarded(place), "freed under somebody"
        self.memory.pop(place, None)

    def _moved(self, slot: int, to: int) -> None:
        place, new = self.slots.place(slot), self.slots.place(to)
        assert not self.is_guarded(place), "moved under somebody"
        assert not self.is_guarded(new)
        self.memory[new] = self.memory[place]
        self.moves += 1

    def write(self, ref: SlotRef) -> None:
        self.memory[ref.region, ref.offset] = ref.key

    def guard(self, kind: str, number: int, refs: list[SlotRef]) -> None:
        places = {(ref.region, ref.offset) for ref in refs}
        assert len(places) == len(refs)
        for ref in refs:
            assert self.slots.at(ref.region, ref.offset) is not None
        self.guarded[kind, number] = places

    def unguard(self, kind: str, number: int) -> None:
        self.guarded.pop((kind, number), None)

    def new_extent(self, key: bytes) -> int:
        self.extents += 1
        self.disk[self.extents] = key
        return self.extents

    def replay(self) -> dict[Tier, list[bytes]]:
        """Take the events; what was removed, by tier. At every step the union of tiers is prefix-closed."""
        removed: dict[Tier, list[bytes]] = {Tier.G2: [], Tier.G3: []}
        for batch in self.pool.take_events():
            assert batch.number == self.next_event
            self.next_event += len(batch.events)
            for event in batch.events:
                for key in event.keys:
                    self._apply(event.change, event.tier, key)
                    if event.change is BlockChange.REMOVED:
                        removed[event.tier].append(key)
        self.freed_on_disk(self.pool.take_dropped_extents())
        return removed

    def _apply(self, change: BlockChange, tier: Tier, key: bytes) -> None:
        here = self.tiers[tier]
        if change is BlockChange.STORED:
            assert key not in here
            here[key] = None
            assert self.is_here(key)
        else:
            del here[key]

    def freed_on_disk(self, extents: list[int]) -> None:
        for extent in extents:
            del self.disk[extent]

    def is_here(self, key: bytes) -> bool:
        return any(key in keys for keys in self.tiers.values())

    def here(self) -> set[bytes]:
        return {*self.tiers[Tier.G2], *self.tiers[Tier.G3]}

    def leading(self, keys: list[bytes], tier: Tier | None = None) -> list[bytes]:
        out = []
        for key in keys:
            if not (self.is_here(key) if tier is None else key in self.tiers[tier]):
                break
            out.append(key)
        return out


def use_of(tenant: str) -> Use:
    return Use(tenant)
