"""The processes of a ``faulty_world``: store nodes, prefill and decode workers, as thin shells around the real machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.core.blocks import blocks_for
from moonpool.core.errors import Busy, Failure, Reason
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.ids import Incarnation, NodeId
from moonpool.core.landing import Landed, Landing, LandingSlot, PushNotice, SliceNotice
from moonpool.core.membership import PrefillTiming
from moonpool.core.request import Attempt, Emission, FinishReason, Sampled
from moonpool.core.use import Use
from moonpool.decode_worker import handoff_sink as sinks
from moonpool.engine.pages import OutOfPages, PagePool
from moonpool.kvstore.claims import LandingAsk, LandingClaim, Life, Reserved
from moonpool.kvstore.eviction.lru import Lru
from moonpool.kvstore.landings import tail_key
from moonpool.kvstore.pool import Pool
from moonpool.kvstore.slots import SlotMap
from moonpool.prefill_worker import handoff_source as sources
from support.faulty_world import BLOCK, HASHER, LAYERS, LAYOUT, Broken, Gateway, Process, Slice, World, emit, last_word, next_id

Name = tuple[str, int]  # (request, attempt)
Place = tuple[int, int]  # (region, offset)
USE = Use()
BAD: Slice = (b"damaged", -1)
PATIENCE = 0.95  # chance that the writer waits on for notices that are still on their way
PUSHES = 4  # times that a missing slice is pushed


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
        self.pool = Pool(NodeId(self.name), Incarnation(self.life * 1_000_000), SlotMap([self._slots * LAYOUT.slot_bytes]), Lru())
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


@dataclass(eq=False)
class Job:
    worker: PrefillWorker
    attempt: Attempt
    have: int
    decode: DecodeWorker
    decode_life: int
    session: int
    source: sources.HandoffSource
    tokens: tuple[int, ...] = ()
    keys: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    matched: int = 0
    landing: Landing | None = None
    store_life: int = 0
    life: int = 0  # of the worker
    before: int = 0  # generation of the endpoint that it had when it asked for the landing; 0: none
    generation: int = 0  # of the one that it pushes to
    out: int = 0  # writes on their way
    notices: int = 0  # the same
    ending: str = ""  # drain, abandon
    pushed: int = 0
    computes: bool = False
    tries: int = 0

    @property
    def name(self) -> Name:
        return self.attempt.request.id, self.attempt.number


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


class PrefillWorker(Worker):
    def __init__(self, world: World, name: str, store: StoreNode, pages: int) -> None:
        super().__init__(world, name, store, pages)
        self.jobs: dict[Name, Job] = {}
        self.lost: set[tuple[str, int]] = set()  # lives of decode workers that are silent or gone
        self.endpoints: dict[tuple[str, int], int] = {}  # of store nodes' lives: the newest generation that it heard of

    def restart(self) -> None:
        self.life += 1
        self.dead = self.frozen = False
        self.jobs, self.endpoints = {}, {}
        self._fresh()

    def run(self, attempt: Attempt, have: int, decode: DecodeWorker, decode_life: int, session: int) -> None:
        name = (attempt.request.id, attempt.number)
        if (decode.name, decode_life) in self.lost:
            return
        source = sources.HandoffSource(*name, LAYERS)
        job = Job(self, attempt, have, decode, decode_life, session, source, tokens=attempt.context, life=self.life)
        job.keys = HASHER.keys(job.tokens)
        self.jobs[name] = job
        self.world.later(self, lambda: self._begin(job))

    def cancel(self, name: Name, why: str = "cancelled") -> None:
        job = self.jobs.get(name)
        if job is not None and not job.source.stop:
            self._act(job, job.source.cancelled(Failure(Reason.CANCELLED, why)))

    def reader_lost(self, decode: DecodeWorker, life: int) -> None:
        self.lost.add((decode.name, life))
        for job in list(self.jobs.values()):
            if job.decode is decode and job.decode_life == life:
                self.cancel(job.name, "its reader is gone")

    def store_lost(self, store: StoreNode, life: int) -> None:
        for job in list(self.jobs.values()):
            if job.decode.store is store and job.store_life == life:
                self._act(job, job.source.failed(Failure(Reason.PEER_SILENT, f"{store.name} is gone", store.name)))
                if job.ending:  # what was asked there gets no answer
                    job.ending = "abandon"
                    self.check(job)

    def _begin(self, job: Job) -> None:
        if job.source.stop:
            return
        matched = self.pages.match(job.keys)
        full = len(matched) * BLOCK == len(job.tokens)
        try:
            fresh = self.pages.allocate(blocks_for(len(job.tokens), BLOCK) - len(matched) + full)
        except OutOfPages:
            self.pages.release(matched)
            self._again(job)
            return
        if full:
            shared = matched.pop()
            self.bytes[fresh[0]] = dict(self.bytes[shared])
            self.pages.release([shared])
        for page in fresh[full:]:
            self.bytes[page] = {}
        job.pages, job.matched = matched + fresh, len(matched) + full
        store, writer = job.decode.store, self.writer
        job.store_life = store.life
        job.before = self.endpoints.get((store.name, store.life), 0)
        keys = tuple(job.keys[job.have :])
        parent = job.keys[job.have - 1] if job.have else None
        tail = len(job.tokens) % BLOCK
        ask = LandingAsk(job.attempt.request.id, job.attempt.number, writer, job.session, LAYOUT, keys, job.have, tail, parent)
        if store.dead:
            self._act(job, job.source.failed(Failure(Reason.PEER_SILENT, "no store node", store.name)))
            return
        self.world.send(self, store, lambda: self._ask(job, store, ask))

    def _ask(self, job: Job, store: StoreNode, ask: LandingAsk) -> None:
        """At the store node."""
        try:
            landing = store.grant(ask)
        except Busy:
            self.world.send(store, self, lambda: self._refused(job), job.life)
            return
        self.world.send(store, self, lambda: self._granted(job, landing), job.life)

    def _refused(self, job: Job) -> None:
        pages, job.pages = job.pages, []
        if not job.source.stop:
            self.pages.release(pages)
            self._again(job)

    def _again(self, job: Job) -> None:
        job.tries += 1
        if job.tries > 200:
            self._act(job, job.source.failed(Failure(Reason.DEADLINE, "its time was over")))
        else:
            self.world.later(self, lambda: self._begin(job))

    def _granted(self, job: Job, landing: Landing) -> None:
        job.landing = landing
        self._act(job, job.source.granted(landing))
        known = self.endpoints.get((job.decode.store.name, job.store_life), 0)
        if job.before and known == job.before:
            job.generation = known  # whatever ended the landing since has ended this endpoint, too
            self._start(job)
        elif not job.source.stop:
            self._connect(job, lambda: self._start(job))

    def disconnected(self, job: Job) -> None:
        """The endpoint that it pushed to is no more: go on with the next one; what is missing is pushed at the end."""
        if job.out == 0 and job.ending in ("", "drain") and not job.source.stop:
            self._connect(job, lambda: self.check(job))
        else:
            self.check(job)

    def _connect(self, job: Job, then: Callable[[], None]) -> None:
        """The node's endpoint of now; refused where the landing is over, because its slots may be another's by now."""
        store = job.decode.store
        assert job.landing is not None
        landing = job.landing.id

        def answer() -> None:
            open_ = store.pool.landings.missing(landing) is not None and self.writer not in store.refused
            self.world.send(store, self, lambda generation=store.generation: told(generation, open_), job.life)

        def told(generation: int, open_: bool) -> None:
            self.endpoints[store.name, job.store_life] = job.generation = generation
            if open_:
                then()
            elif not job.source.stop:
                self._act(job, job.source.failed(Failure(Reason.TRANSFER_FAILED, "the landing is over")))

        self.world.send(self, store, answer, job.store_life)

    def _start(self, job: Job) -> None:
        if job.source.stop:
            return
        job.computes = True
        blocks = blocks_for(len(job.tokens), BLOCK)
        chunks = [range(job.matched)] if job.matched else []
        chunks += [range(at, min(at + 2, blocks)) for at in range(job.matched, blocks, 2)]
        layers = [(chunk, layer, part) for chunk, part in enumerate(chunks) for layer in range(LAYERS)]
        self.world.later(self, lambda: self._layer(job, layers, 0))

    def _layer(self, job: Job, layers: list[tuple[int, int, range]], at: int) -> None:
        """One layer of one chunk is computed, or was there."""
        if job.source.stop:
            self._act(job, job.source.stopped())
            return
        if at == len(layers):
            self._publish(job)
            first = FirstToken(Sampled(next_id(job.tokens)), 0, False, PrefillTiming(1, 0, 0.0))
            self._act(job, job.source.sampled(first))
            return
        chunk, layer, blocks = layers[at]
        for block in blocks:
            page = job.pages[block]
            self.bytes[page][layer] = (self._key(job, block), layer)
        told = [sources.Block(b, job.pages[b], min(BLOCK, len(job.tokens) - b * BLOCK)) for b in blocks]
        self._act(job, job.source.layer(chunk, layer, told))
        self.world.later(self, lambda: self._layer(job, layers, at + 1))

    def _key(self, job: Job, block: int) -> bytes:
        return job.keys[block] if block < len(job.keys) else tail_key(job.attempt.request.id, job.attempt.number, block)

    def _publish(self, job: Job) -> None:
        for block, key in enumerate(job.keys):
            self.pages.publish(job.pages[block], key, job.keys[block - 1] if block else None)

    # what the source wants done

    def _act(self, job: Job, actions: Sequence[sources.Action]) -> None:
        decode, life = job.decode, job.decode_life
        for action in actions:
            match action:
                case sources.EmitBegun(landing):
                    self._tell(job, lambda s, landing=landing: s.begun(landing))
                case sources.Push(chunk, layer, blocks):
                    self._push(job, chunk, [(b.index, layer) for b in blocks])
                case sources.EmitFirst(first):
                    self._tell(job, lambda s, first=first: s.first_token(first, ends=decode.first_ends(job.name)))
                case sources.Drain():
                    job.ending = "drain"
                    self.check(job)
                case sources.Abandon():
                    job.ending = "abandon"
                    if job.landing is None:  # granted too late: given up at once
                        raise Broken(f"{job.name}: abandons no landing")
                    self.check(job)
                    if not job.computes:
                        self._act(job, job.source.stopped())
                case sources.EmitDrained(drained):
                    self._tell(job, lambda s, drained=drained: s.drained(drained))
                case sources.EmitFailure(failure):
                    if decode.life == life:
                        self.world.send(self, decode, lambda failure=failure: decode.prefill_failed(job.name, failure))
                case sources.ReleasePages():
                    pages, job.pages = job.pages, []
                    self.pages.release(pages)
                    if not job.ending:
                        self.jobs.pop(job.name, None)

    def _tell(self, job: Job, fact: Callable[[sinks.HandoffSink], list[sinks.Action]]) -> None:
        if job.decode.life == job.decode_life:
            self.world.send(self, job.decode, lambda: job.decode.tell(job.name, fact))

    def _push(self, job: Job, chunk: int, slices: Sequence[tuple[int, int]]) -> None:
        assert job.landing is not None
        slots = {slot.block: slot for slot in job.landing.slots}
        for block, layer in slices:
            slot = slots[block]
            place = (slot.slot.region, slot.slot.offset)
            write = Write(job.landing.id, place, layer, job.pages[block], chunk, job, job.generation)
            job.out += 1
            self.world.loose.append(lambda write=write, life=self.life: self._arrives(write, life))

    def _arrives(self, write: Write, life: int) -> None:
        if self.life == life and not self.dead:  # nothing of a dead process is posted any more
            write.job.decode.store.arrive(write)

    def check(self, job: Job) -> None:
        """Nothing of it is on its way any more: what ends it may go on."""
        if job.ending in ("drain", "abandon") and not job.out:
            how = job.ending
            self.world.later(self, lambda: self._quiet(job, how))
            job.ending += "ing"

    def _quiet(self, job: Job, how: str) -> None:
        store = job.decode.store
        assert job.landing is not None
        if store.dead or store.life != job.store_life:
            self._act(job, job.source.failed(Failure(Reason.PEER_SILENT, "store node gone", store.name)))
            self._drained(job)
        elif how == "drain" and not job.source.stop:
            self.world.send(self, store, lambda: self._ask_missing(job, store), job.store_life)
        else:
            self.world.send(self, store, lambda: self._end(job, store), job.store_life)

    def _ask_missing(self, job: Job, store: StoreNode) -> None:
        """At the store node: what has not landed, or else the writer's word that it writes no more."""
        assert job.landing is not None
        state = store.pool.landings.missing(job.landing.id)
        if state is not None and state[0] and job.notices and self.world.random.random() < PATIENCE:
            self.world.later(store, lambda: self._ask_missing(job, store))
            return
        if state is not None and state[0] and job.pushed < PUSHES:
            self.world.send(store, self, lambda: self._push_again(job, state[0]), job.life)
        else:
            self.world.send(
                store, self, lambda: self.world.send(self, store, lambda: self._end(job, store), job.store_life), job.life
            )

    def _push_again(self, job: Job, missing: Sequence[tuple[int, int]]) -> None:
        job.pushed += 1
        job.ending = "abandon" if job.source.stop else "drain"
        if not job.source.stop:
            self._push(job, 99, missing)
        self.check(job)

    def _end(self, job: Job, store: StoreNode) -> None:
        """At the store node."""
        assert job.landing is not None
        store.drained(job.landing.id, Life(self.id, Incarnation(job.life)))
        self.world.send(store, self, lambda: self._drained(job), job.life)

    def _drained(self, job: Job) -> None:
        assert job.landing is not None
        self._act(job, job.source.drained(Drained(job.landing.id, 0, "simulated")))
        self.jobs.pop(job.name, None)


@dataclass(eq=False)
class Try:
    """One attempt at its decode worker."""

    attempt: Attempt
    gateway: Gateway
    prefill: PrefillWorker
    prefill_life: int
    sink: sinks.HandoffSink
    tokens: list[int]
    pages: list[int]
    mapped: dict[Place, dict[int, Slice]]  # the store node's regions: they can be read after its death
    skip: bool = False  # copies not yet begun are of no use
    over: bool = False  # its gateway has had the last word
    running: bool = False
    untold: int = 0  # a whole landing that the prefill worker has not told of

    @property
    def name(self) -> Name:
        return self.attempt.request.id, self.attempt.number

    @property
    def position(self) -> int:
        return len(self.tokens) - len(self.attempt.request.prompt)


class DecodeWorker(Worker):
    def __init__(self, world: World, name: str, store: StoreNode, pages: int) -> None:
        super().__init__(world, name, store, pages)
        self.tries: dict[Name, Try] = {}
        self.lost: set[tuple[str, int]] = set()  # lives of prefill workers that are silent or gone
        self.session = store.open(self)

    def restart(self) -> None:
        self.life += 1
        self.dead = self.frozen = False
        self.tries = {}
        self._fresh()
        self.session = self.store.open(self)

    # what gateways ask

    def start(self, gateway: Gateway, attempt: Attempt, prefill: PrefillWorker, prefill_life: int) -> None:
        for older in list(self.tries.values()):
            if older.attempt.request.id == attempt.request.id:
                self.cancel(older.name)
        keys, blocks = HASHER.keys(attempt.context), blocks_for(len(attempt.context), BLOCK)
        matched = self.pages.match(keys[: blocks - 1])
        try:
            pages = matched + self.pages.allocate(blocks - len(matched))
        except OutOfPages:
            self.pages.release(matched)
            failure = Failure(Reason.BUSY, f"{self.name} has no pages", self.name)
            emit(gateway, self, attempt, last_word(attempt, len(attempt.emitted), failure))
            return
        for page in pages[len(matched) :]:
            self.bytes[page] = {}
        sink = sinks.HandoffSink(attempt.request.id, attempt.number, LAYERS, range(len(matched), blocks))
        one = Try(attempt, gateway, prefill, prefill_life, sink, list(attempt.context), pages, self.store.bytes)
        self.tries[one.name] = one
        if (prefill.name, prefill_life) in self.lost:
            self.prefill_lost(prefill, prefill_life)
            return
        have, session = len(matched), self.session
        life = self.life
        self.world.send(self, prefill, lambda: prefill.run(attempt, have, self, life, session), prefill_life)

    def cancel(self, name: Name) -> None:
        one = self.tries.get(name)
        if one is None or one.over:
            return
        one.over = True
        if one.running:
            self._end(one)
        else:
            self._act(one, one.sink.cancelled())

    # what it hears

    def tell(self, name: Name, fact: Callable[[sinks.HandoffSink], list[sinks.Action]]) -> None:
        if name in self.tries:
            self._act(self.tries[name], fact(self.tries[name].sink))

    def landed(self, landed: Landed) -> None:
        self.tell((landed.request, landed.attempt), lambda s: s.landed(landed))

    def landing_through(self, landing: Landing, failure: Failure | None) -> None:
        one = self.tries.get((landing.request, landing.attempt))
        told = one is not None and one.sink.landing is not None and one.sink.landing.id == landing.id
        if not told and (failure is not None or one is None or not one.pages):
            self._end_landing(landing.id)
        elif not told:
            one.untold = landing.id
        if one is not None and failure is not None:
            self._act(one, one.sink.failed(failure))

    def prefill_failed(self, name: Name, failure: Failure) -> None:
        self.tell(name, lambda s: s.failed(failure))

    def prefill_lost(self, prefill: PrefillWorker, life: int) -> None:
        self.lost.add((prefill.name, life))
        for one in list(self.tries.values()):
            if one.prefill is prefill and one.prefill_life == life:
                self._act(one, one.sink.failed(Failure(Reason.PEER_SILENT, f"{prefill.name} is gone", prefill.name)))

    def store_lost(self, store: StoreNode) -> None:
        if store is self.store:
            for one in list(self.tries.values()):
                self._act(one, one.sink.failed(Failure(Reason.PEER_SILENT, f"{store.name} is gone")))

    def first_ends(self, name: Name) -> bool:
        one = self.tries[name]
        return one.position + 1 >= one.attempt.request.sampling.max_tokens

    # what the sink wants done

    def _act(self, one: Try, actions: Sequence[sinks.Action]) -> None:
        for action in actions:
            match action:
                case sinks.EmitFirst(first, ends):
                    self._emit(one, first.sampled.token)
                    one.over = one.over or ends
                case sinks.Copy(layer, slots):
                    self.world.later(self, lambda layer=layer, slots=slots: self._copy(one, layer, slots))
                case sinks.Join():
                    self._join(one)
                case sinks.EndLanding(landing):
                    self._end_landing(landing)
                case sinks.StopCopies():
                    one.skip = True
                case sinks.CancelPrefill():
                    if one.prefill.life == one.prefill_life:
                        self.world.send(self, one.prefill, lambda: one.prefill.cancel(one.name), one.prefill_life)
                case sinks.Fail(failure):
                    self._fail(one, failure)
                case sinks.ReleasePages():
                    self.pages.release(one.pages)
                    one.pages = []
                    if one.untold and one.sink.landing is None:
                        self._end_landing(one.untold)

    def _end_landing(self, landing: int) -> None:
        store, life = self.store, self.store.life

        def end() -> None:
            if store.life == life:
                store.pool.landings.end(landing, self.world.now)

        self.world.send(self, store, end)

    def _fail(self, one: Try, failure: Failure) -> None:
        if not one.over:
            one.over = True
            emit(one.gateway, self, one.attempt, last_word(one.attempt, one.position, failure))

    def _copy(self, one: Try, layer: int, slots: Sequence[LandingSlot]) -> None:
        for slot in slots:
            content = one.mapped.get((slot.slot.region, slot.slot.offset), {}).get(layer, BAD)
            if one.skip:
                pass
            elif content == (slot.slot.key, layer):
                self.bytes[one.pages[slot.block]][layer] = content
            else:
                self.world.send(self, self.store, lambda slot=slot: self.store.pool.quarantine(slot.slot.key, "landing_copy"))
                self._act(one, one.sink.failed(Failure(Reason.DIGEST_MISMATCH, "a copy is not what it should be")))
            self._act(one, one.sink.copied(layer, [slot.block]))

    def _join(self, one: Try) -> None:
        self._check(one, one.attempt.context)
        if one.over:
            self._end(one)
            return
        one.running = True
        self.world.later(self, lambda: self._step(one))

    def _check(self, one: Try, context: Sequence[int]) -> None:
        """Every page of it holds what it should."""
        keys = HASHER.keys(context)
        for block, page in enumerate(one.pages):
            key = keys[block] if block < len(keys) else tail_key(*one.name, block)
            for layer in range(LAYERS):
                if self.bytes[page].get(layer) != (key, layer):
                    raise Broken(
                        f"{one.name}: page {page} holds {self.bytes[page].get(layer)} as layer {layer} of block {block}"
                    )

    # decoding

    def _emit(self, one: Try, token: int) -> None:
        one.tokens.append(token)
        position = one.position - 1
        finish = FinishReason.LENGTH if one.position >= one.attempt.request.sampling.max_tokens else None
        if not one.over:
            emission = Emission(one.attempt.request.id, one.attempt.number, position, Sampled(token), finish)
            emit(one.gateway, self, one.attempt, emission)

    def _step(self, one: Try) -> None:
        """The KV of the newest token is computed, and the next one drawn."""
        if not one.running:
            return
        block = (len(one.tokens) - 1) // BLOCK
        if block == len(one.pages):
            try:
                one.pages += self.pages.allocate(1)
            except OutOfPages:
                self._fail(one, Failure(Reason.BUSY, f"{self.name} has no pages", self.name))
                self._end(one)
                return
            self.bytes[one.pages[block]] = {}
        if len(one.tokens) % BLOCK == 0:
            self._completed(one, block)
        self._emit(one, next_id(one.tokens))
        if one.position >= one.attempt.request.sampling.max_tokens:
            one.over = True
            self._end(one)
        else:
            self.world.later(self, lambda: self._step(one))

    def _completed(self, one: Try, block: int) -> None:
        keys, page = HASHER.keys(one.tokens), one.pages[block]
        self.bytes[page] = {layer: (keys[block], layer) for layer in range(LAYERS)}
        parent = keys[block - 1] if block else None
        for at in range(block + 1):
            self.pages.publish(one.pages[at], keys[at], keys[at - 1] if at else None)
        self.pages.retain([page])
        store, life, session, writer = self.store, self.store.life, self.session, self.writer
        self.world.later(self, lambda: self.pages.release([page]))

        def reserve() -> None:
            if session not in store.readers or store.life != life:
                return
            (reply,) = store.pool.reserve(session, writer, LAYOUT, [keys[block]], parent, USE, self.world.now)
            if reply.state is Reserved.NEW:
                place = (reply.slot.region, reply.slot.offset)
                self.world.send(
                    store, self, lambda: self._write(store, life, session, place, keys[block], reply.id), writer.incarnation
                )

        self.world.send(self, store, reserve)

    def _write(self, store: StoreNode, life: int, session: int, place: Place, key: bytes, id: int) -> None:
        """Through its mapping of the region file."""
        if store.life != life or store.dead:
            return
        if store.pool.slots.owner(store.pool.slots.at(*place) or 0) is not None:
            raise Broken(f"{self.name} writes into {place}, which is sealed")
        store.bytes[place] = {layer: (key, layer) for layer in range(LAYERS)}
        self.world.send(self, store, lambda: store.pool.seal(session, [id], self.world.now))

    def _end(self, one: Try) -> None:
        one.running = False
        self.pages.release(one.pages)
        one.pages = []
