"""A store node of a ``faulty_world``: the real pool, and bytes that may be damaged or late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonpool.core.errors import Busy, Failure, Reason
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import Landed, Landing, PushNotice, SliceNotice
from moonpool.core.use import Use
from moonpool.engine.pages import PagePool
from moonpool.kvstore.claims import LandingAsk, LandingClaim, Life
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.slots import SlotMap
from support.faulty_world import LAYOUT, Broken, Process, Slice, World

Name = tuple[str, int]  # (request, attempt)
Place = tuple[int, int]  # (region, offset)
USE = Use()
BAD: Slice = (b"damaged", -1)
PATIENCE = 0.95  # chance that the writer waits on for notices that are still on their way
PUSHES = 4  # times that a missing slice is pushed


if TYPE_CHECKING:
    from support.faulty_decode import DecodeWorker
    from support.faulty_prefill import Job


@dataclass(eq=False)
class Write:
    """One slice on its way into a slot; read from the writer's page when it arrives."""

    landing: int
    place: Place
    layer: int
    page: int
    chunk: int
    job: Job
    generation: int


class StoreNode(Process):
    def __init__(self, world: World, name: str, slots: int, damage: float, lose: float) -> None:
        super().__init__(world, name)
        self._slots, self._damage, self._lose = slots, damage, lose
        self.readers: dict[int, tuple[DecodeWorker, int]] = {}  # session -> decode worker, its life
        self.generation = 1
        self._session = 0
        self._made()

    def _made(self) -> None:
        self.pool = Pool(
            NodeId(self.name), Incarnation(self.life * 1_000_000), SlotMap([self._slots * LAYOUT.slot_bytes]), Lru()
        )
        self.pool.register(LAYOUT)
        self.bytes: dict[Place, dict[int, Slice]] = {}
        self.readers.clear()
        self.refused: set[Life] = set()

    def restart(self) -> None:
        self.life += 1
        self.dead = False
        self._made()

    def open(self, reader: DecodeWorker) -> int:
        self._session += 1
        self.readers[self._session] = reader, reader.life
        return self._session

    def tell(self, session: int | None, message: Callable[[DecodeWorker], None]) -> None:
        if session in self.readers:
            reader, life = self.readers[session]
            if reader.life == life:
                self.world.send(self, reader, lambda: message(reader))

    # what writers ask

    def grant(self, ask: LandingAsk) -> Landing:
        if ask.writer in self.refused:
            raise Busy("a life that is over or silent comes too late")
        if ask.reader not in self.readers:
            raise Busy("the reader has no session here")
        return self.pool.landings.grant(ask, self.world.now)

    def arrive(self, write: Write) -> None:
        """Bytes reach their slot: only one that its landing still holds and has not sealed."""
        write.job.out -= 1
        if self.dead or write.job.store_life != self.life or write.generation != self.generation:
            write.job.worker.disconnected(write.job)
            return
        claim = self.pool.landings.get(write.landing)
        slot = self.pool.slots.at(*write.place)
        target = None if claim is None or slot is None else claim.targets.get(slot)
        if target is None or not claim.writer_open:
            raise Broken(f"{write.job.name}: a late write into {write.place}, which landing {write.landing} no longer has")
        content = write.job.worker.bytes[write.page].get(write.layer, BAD)
        if target.row is not None and content != (target.key, write.layer):
            raise Broken(f"{write.job.name}: another content into {write.place}, which is sealed")
        if self.world.random.random() < self._damage:
            content = BAD
        self.bytes.setdefault(write.place, {})[write.layer] = content
        wanted = (target.key, write.layer)
        slices = (SliceNotice(*write.place, target.valid, 0),)
        notice = PushNotice(
            write.landing, write.job.attempt.request.id, write.job.attempt.number, write.chunk, write.layer, slices
        )
        for _ in range(0 if self.world.random.random() < self._lose else self.world.random.choice((1, 1, 2))):
            write.job.notices += 1
            self.world.loose.append(lambda life=self.life: self._notice(write.job, notice, wanted, life))
        write.job.worker.check(write.job)

    def _notice(self, job: Job, notice: PushNotice, wanted: Slice, life: int) -> None:
        if self.frozen and life == self.life:
            self.world.later(self, lambda: self._notice(job, notice, wanted, life))
            return
        job.notices -= 1
        if self.dead or life != self.life:
            return
        _, expected = self.pool.landings.expected(notice)
        for piece in expected:
            place = (piece.ref.region, piece.ref.offset)
            if self.bytes.get(place, {}).get(notice.layer) == wanted:
                if self.pool.landings.misses(notice.landing, piece.slot, notice.layer):
                    self.pool.landings.landed(notice.landing, piece.slot, notice.layer, self.world.now)
                    claim = self.pool.landings.get(notice.landing)
                    landed = Landed(notice.landing, notice.request, notice.attempt, notice.chunk, notice.layer, (piece.block,))
                    self.tell(None if claim is None else claim.ask.reader, lambda r, landed=landed: r.landed(landed))
            else:
                self.pool.landings.rejected(notice.landing, piece.slot, notice.layer)

    def drained(self, landing: int, writer: Life) -> None:
        claim = self.pool.landings.get(landing)
        if not self.pool.landings.drained(landing, writer, self.world.now) or claim is None:
            return
        if claim.reader_open and not claim.fenced:
            self._through(claim, "the writer ended it early" if claim.incomplete else "")

    # what it hears of others

    def writer_silent(self, life: Life) -> None:
        self._end(life, self.pool.writer_silent)

    def writer_gone(self, life: Life) -> None:
        self._end(life, self.pool.writer_gone)

    def _end(self, life: Life, how: Callable[[Life, float], list[Landing]]) -> None:
        self.refused.add(life)
        mine = [c for c in self.pool.landings if c.ask.writer == life and c.writer_open and not c.fenced]
        torn = {landing.id for landing in how(life, self.world.now)}
        for claim in mine:
            if claim.reader_open:
                self._through(claim, f"{life.member} fell silent" if claim.landing.id in torn else "")
        for session, (reader, its_life) in list(self.readers.items()):
            if (reader.id, its_life) == life:
                self.reader_ended(session)

    def _through(self, claim: LandingClaim, why: str) -> None:
        failure = Failure(Reason.TRANSFER_FAILED, why) if why else None
        self.tell(claim.ask.reader, lambda r: r.landing_through(claim.landing, failure))

    def reader_ended(self, session: int) -> None:
        self.readers.pop(session, None)
        self.pool.session_ended(session, self.world.now)

    def remake(self) -> None:
        """Everything posted before is void; healthy writers find out and push again."""
        fenced = self.pool.fenced_remote()
        self.generation += 1
        self.pool.endpoint_remade(fenced, self.world.now)

    def idle(self) -> None:
        numbers = self.pool.numbers()
        for name in ("landings_open", "slots_reserved", "slots_fenced", "tickets", "pins", "reservations"):
            if numbers.get(name):
                raise Broken(f"{self.name}: {name} is {numbers[name]} at the end")


class Worker(Process):
    def __init__(self, world: World, name: str, store: StoreNode, pages: int) -> None:
        super().__init__(world, name)
        self.store, self._pages = store, pages
        self._fresh()

    def _fresh(self) -> None:
        self.pages = PagePool(self._pages)
        self.bytes: list[dict[int, Slice]] = [{} for _ in range(self._pages)]

    @property
    def writer(self) -> Life:
        return Life(self.id, Incarnation(self.life))

    def idle(self) -> None:
        if self.pages.used:
            raise Broken(f"{self.name}: {self.pages.used} pages are held at the end")
