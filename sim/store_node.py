"""One node's store: the production pool over slots that no memory lies behind, and its events on their way to the conductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.core.events import EventBatch, IndexSnapshot
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.landing import Landing, Ticket
from moonpool.core.membership import Member
from moonpool.core.use import Use
from moonpool.kvstore.claims import LandingAsk, Life, Reserved
from moonpool.kvstore.eviction.make import make_policy
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.slots import SlotMap
from moonpool.sim.clock import Clock
from moonpool.sim.cluster import Group, SimCluster
from moonpool.sim.ssd import SsdTier

Tell = Callable[[EventBatch | IndexSnapshot], None]
NOT_HERE = (Reserved.FULL, Reserved.NO_PARENT)
SESSION = 1  # of everybody: no session ends before its node does


class StoreNode:
    def __init__(
        self, name: str, life: Incarnation, group: Group, cluster: SimCluster, clock: Clock, tell: Tell, address: str = ""
    ) -> None:
        self.node = NodeId(name)
        self.layout = cluster.model.layout(1)
        self.member = Member(
            MemberId(f"store-{name}"),
            Role.STORE,
            self.node,
            life,
            address or f"{name}:1",
            0,
            layout=cluster.model.layout(cluster.model.layers),
        )
        self.alive = True
        self._clock = clock
        self._tell = tell
        self._life = Life(self.member.id, life)
        slots = group.pool_tokens // cluster.model.block_tokens
        self.has_pool = slots > 0
        ssd_policy = make_policy(cluster.eviction) if group.ssd_tokens else None
        regions = [max(slots, 1) * self.layout.slot_bytes]
        self.pool = Pool(self.node, life, SlotMap(regions), make_policy(cluster.eviction), ssd_policy)
        self.pool.register(self.layout)
        self.ssd: SsdTier | None = None
        if group.ssd_tokens and cluster.ssd is not None:
            blocks, size = group.ssd_tokens // cluster.model.block_tokens, self.layout.block_bytes
            self.ssd = SsdTier(self.pool, cluster.ssd, blocks, size, clock, self.flush)

    @property
    def now(self) -> float:
        return self._clock.now

    def pin(self, keys: Sequence[bytes], use: Use) -> Ticket:
        return self.pool.pin(SESSION, keys, use, self.now) if self.alive else Ticket(0, ())

    def unpin(self, ticket: Ticket) -> None:
        if ticket.slots and self.alive:
            self.pool.unpin(SESSION, ticket.id, self.now)

    def reserve(self, keys: Sequence[bytes], parent: bytes | None, use: Use) -> tuple[int, list[int], int]:
        """Slots for ``keys``: how many leading ones will be here, the reservations, and how many blocks must be brought."""
        if not self.has_pool or not keys or not self.alive:
            return 0, [], 0
        answers = self.pool.reservations.reserve(SESSION, self._life, self.layout, keys, parent, use, self.now)
        states = answers.states
        good = next((at for at, state in enumerate(states) if state in NOT_HERE), len(keys))
        ids = [number for number in answers.ids if number]
        brought = good - states[:good].count(Reserved.SEALED)
        self.flush()
        return good, ids, brought

    def seal(self, ids: Sequence[int]) -> None:
        if ids and self.alive:
            self.pool.seal(SESSION, ids, self.now)
            self.flush()

    def abandon(self, ids: Sequence[int]) -> None:
        if ids and self.alive:
            self.pool.abandon(SESSION, ids, self.now)
            self.flush()

    def store(self, keys: Sequence[bytes], use: Use) -> None:
        """Whole blocks of a prompt that was computed: those not here yet, as far as there is room."""
        if not self.alive:
            return
        here = self.pool.lookup(keys)
        _, ids, _ = self.reserve(keys[here:], keys[here - 1] if here else None, use)
        self.seal(ids)

    def grant(self, ask: LandingAsk) -> Landing:
        """Busy where there is no room now."""
        landing = self.pool.landings.grant(ask, self.now)
        self.flush()
        return landing

    def written(self, landing: Landing, writer: Life) -> None:
        """``writer`` writes no more into ``landing``; a no-op for one of an earlier life of this store."""
        if self.alive and landing.incarnation == self.member.incarnation:
            self.pool.landings.drained(landing.id, writer, self.now)
            self.flush()

    def read(self, landing: Landing) -> None:
        """The reader is through with ``landing``."""
        if self.alive and landing.incarnation == self.member.incarnation:
            self.pool.landings.end(landing.id, self.now)
            self.flush()

    def landed(self, landing: Landing) -> None:
        claim = self.pool.landings.get(landing.id) if landing.incarnation == self.member.incarnation else None
        if claim is not None and not claim.fenced:
            for slot in list(claim.targets):
                if claim.targets[slot].left:
                    self.pool.landings.landed(landing.id, slot, 0, self.now)
            self.flush()

    def cool(self, keys: Sequence[bytes]) -> None:
        if self.alive:
            self.pool.cool(keys, self.now)
            self.flush()

    def ended(self, use: Use, output_tokens: int) -> None:
        """The newest request of ``use`` was answered with so many tokens."""
        if self.alive:
            self.pool.ended(use, output_tokens, self.now)

    def flush(self) -> None:
        """Events to the conductor, and what follows from them for the SSD tier."""
        for batch in self.pool.take_events():
            self._tell(batch)
            if self.ssd is not None:
                self.ssd.heard(batch)
        if self.ssd is not None:
            self.ssd.pulse()

    def stop(self) -> None:
        """The process is gone."""
        self.alive = False
        if self.ssd is not None:
            self.ssd.stopped = True
