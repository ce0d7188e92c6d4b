"""A prefill worker of a ``faulty_world``: a thin shell around the real source of hand-offs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moonpool.core.blocks import blocks_for
from moonpool.core.errors import Busy, Failure, Reason
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.ids import Incarnation
from moonpool.core.landing import Landing
from moonpool.core.membership import PrefillTiming
from moonpool.core.request import Attempt, Sampled
from moonpool.engine.pages import OutOfPages
from moonpool.kvstore.claims import LandingAsk, Life
from moonpool.kvstore.handoffs import sink as sinks
from moonpool.kvstore.landings import tail_key
from moonpool.prefill_worker import handoff_source as sources
from support.faulty_store import PATIENCE, PUSHES, Name, StoreNode, Worker, Write
from support.faulty_world import BLOCK, HASHER, LAYERS, LAYOUT, Broken, World, next_id

if TYPE_CHECKING:
    from support.faulty_decode import DecodeWorker


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
