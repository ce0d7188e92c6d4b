"""A decode worker of a ``faulty_world``: a thin shell around the real sink of hand-offs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonpool.core.blocks import blocks_for
from moonpool.core.errors import Failure, Reason
from moonpool.core.landing import Landed, Landing, LandingSlot
from moonpool.core.request import Attempt, Emission, FinishReason, Sampled
from moonpool.engine.pages import OutOfPages
from moonpool.kvstore.claims import Reserved
from moonpool.kvstore.handoffs import sink as sinks
from moonpool.kvstore.landings import tail_key
from support.faulty_prefill import PrefillWorker
from support.faulty_store import BAD, USE, Name, Place, StoreNode, Worker
from support.faulty_world import BLOCK, HASHER, LAYERS, LAYOUT, Broken, Gateway, Slice, World, emit, last_word, next_id


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
                    self._emit(one, first.ids[0].token)
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
