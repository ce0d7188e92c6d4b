"""Hand-offs in any order of events, with any faults between them: nothing wrong, nothing lost, nothing left held."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from support.faulty_decode import DecodeWorker
from support.faulty_prefill import PrefillWorker
from support.faulty_store import StoreNode
from support.faulty_world import Client, Gateway, Process, World

from moonpool.core.errors import Failure, Reason

WORLDS = int(os.environ.get("MOONPOOL_FAULT_WORLDS", "150"))  # of each kind; many more explore longer
FAULTS = 6  # in one world, at most


class Cluster:
    """Two of each: prefill workers, decode workers, each decode worker beside its store node."""

    def __init__(self, seed: int, *, slots: int, pages: int, damage: float, lose: float) -> None:
        self.world = world = World(seed)
        self.stores = [StoreNode(world, f"s{i}", slots, damage, lose) for i in range(2)]
        self.prefills = [PrefillWorker(world, f"p{i}", self.stores[i], pages) for i in range(2)]
        self.decodes = [DecodeWorker(world, f"d{i}", self.stores[i], pages) for i in range(2)]
        self.gateway = Gateway(world, [p.name for p in self.prefills], [d.name for d in self.decodes])
        self.everybody: list[Process] = [*self.stores, *self.prefills, *self.decodes, self.gateway]
        world.processes = {p.name: p for p in self.everybody}
        self.left = FAULTS

    def ask(self, requests: int) -> list[Client]:
        rng = self.world.random
        stems = [tuple(rng.randrange(40) for _ in range(12)) for _ in range(2)]
        clients = []
        for _ in range(requests):
            prompt = rng.choice(stems)[: rng.randrange(1, 13)] + tuple(rng.randrange(40) for _ in range(rng.randrange(0, 4)))
            clients.append(self.gateway.ask(prompt, rng.randrange(1, 9)))
        return clients

    # faults

    def hear(self, process: Process, fact: Callable[[], None]) -> None:
        self.world.later(process, fact)

    def kill(self, process: Process) -> None:
        if process.dead:
            return
        self.world.say(f"kill {process.name}/{process.life}")
        process.dead, process.frozen = True, False
        self._told_of(process, proved=True)
        self.world.loose.append(lambda: self._restart(process))

    def _restart(self, process: Process) -> None:
        process.restart()  # type: ignore[attr-defined]
        self.world.say(f"restart {process.name}/{process.life}")
        if isinstance(process, StoreNode):
            for decode in self.decodes:
                if decode.store is process and not decode.dead:
                    decode.session = process.open(decode)

    def _told_of(self, process: Process, *, proved: bool) -> None:
        """Everybody hears, each at some time, that this life of ``process`` is silent; with ``proved`` that it is gone."""
        life = process.life
        if isinstance(process, StoreNode):
            for decode in self.decodes:
                self.hear(decode, lambda decode=decode: decode.store_lost(process))
            for prefill in self.prefills:
                self.hear(prefill, lambda prefill=prefill: prefill.store_lost(process, life))
            return
        assert isinstance(process, PrefillWorker | DecodeWorker)
        writer = process.writer
        for store in self.stores:
            self.hear(store, lambda store=store: store.writer_silent(writer))
            if proved:
                self.hear(store, lambda store=store: store.writer_gone(writer))
        if isinstance(process, PrefillWorker):
            for decode in self.decodes:
                self.hear(decode, lambda decode=decode: decode.prefill_lost(process, life))
        else:
            session, store = process.session, process.store
            self.hear(store, lambda: store.reader_ended(session))
            for prefill in self.prefills:
                self.hear(prefill, lambda prefill=prefill: prefill.reader_lost(process, life))
            self.hear(self.gateway, lambda: self.gateway.lost(process.name, life))

    def freeze(self, process: Process) -> None:
        """A store node that is frozen only makes others wait; a worker is called silent, and wakes or is killed."""
        if not process.runs:
            return
        self.world.say(f"freeze {process.name}/{process.life}")
        process.frozen = True
        life = process.life

        def silent() -> None:
            if process.frozen and process.life == life and not isinstance(process, StoreNode):
                self._told_of(process, proved=False)
                self.world.loose.append(lambda: self._end_of_silence(process, life))
            elif process.life == life:
                process.frozen = False

        self.world.loose.append(silent)

    def _end_of_silence(self, process: Process, life: int) -> None:
        if process.dead or process.life != life:
            return
        if self.world.random.random() < 0.5:
            self.kill(process)
            return
        self.world.say(f"wake {process.name}")
        process.frozen = False
        self._rejoin(process)

    def _rejoin(self, process: Process) -> None:
        """It learns that its life is over: lets go of everything, and joins as a new one once nothing of it is on its way."""
        assert isinstance(process, PrefillWorker | DecodeWorker)
        busy = process.jobs if isinstance(process, PrefillWorker) else process.tries
        for name in list(busy):
            process.cancel(name)
        if process.pages.used:
            self.world.later(process, lambda: self._rejoin(process))
            return
        old = process.writer
        process.restart()
        self.world.say(f"back as {process.name}/{process.life}")
        for store in self.stores:
            self.hear(store, lambda store=store: store.writer_gone(old))

    def fault(self) -> None:
        rng = self.world.random
        match rng.choice(("kill", "kill", "freeze", "freeze", "call", "remake", "clear", "leave")):
            case "kill":
                self.kill(rng.choice(self.everybody[:-1]))
            case "freeze":
                self.freeze(rng.choice(self.everybody[:-1]))
            case "call":
                self._break_call()
            case "remake":
                rng.choice(self.stores).remake()
            case "clear":
                rng.choice(self.stores).pool.clear()
                rng.choice([*self.prefills, *self.decodes]).pages.clear_cached()
            case "leave":
                self.gateway.leave(rng.choice(self.gateway.clients))

    def _break_call(self) -> None:
        prefill = self.world.random.choice(self.prefills)
        if not prefill.jobs:
            return
        job = next(iter(prefill.jobs.values()))
        self.world.say(f"call of {job.name} breaks")
        self.hear(prefill, lambda: prefill.cancel(job.name, "the call broke"))
        if job.decode.life == job.decode_life:
            failure = Failure(Reason.PEER_SILENT, "the call broke", prefill.name)
            self.hear(job.decode, lambda: job.decode.prefill_failed(job.name, failure))

    def maybe_fault(self) -> None:
        if self.left and self.world.random.random() < 0.01:
            self.left -= 1
            self.fault()

    # the end

    def check(self, clients: list[Client]) -> None:
        for client in clients:
            client.check()
            assert client.full or client.error or client.gone, f"{client.ledger.request.id} was lost"
        for store in self.stores:
            store.idle()
        for worker in (*self.prefills, *self.decodes):
            worker.idle()


@pytest.mark.parametrize(
    ("slots", "pages", "damage", "lose"),
    [(64, 64, 0.0, 0.0), (64, 64, 0.03, 0.1), (12, 14, 0.02, 0.05)],
    ids=["with room", "bad wires", "with little room"],
)
def test_whatever_the_order_and_the_faults_answers_are_right_and_all_is_given_back(
    slots: int, pages: int, damage: float, lose: float
) -> None:
    for seed in range(WORLDS):
        cluster = Cluster(seed, slots=slots, pages=pages, damage=damage, lose=lose)
        clients = cluster.ask(8)
        try:
            cluster.world.run(cluster.maybe_fault)
            cluster.check(clients)
        except Exception as e:
            story = "\n".join(cluster.world.story)
            raise AssertionError(f"world {seed}: {type(e).__name__}: {e}\n{story}") from e


def test_without_faults_every_request_is_answered_in_its_first_attempt() -> None:
    for seed in range(20):
        cluster = Cluster(seed, slots=64, pages=64, damage=0.0, lose=0.0)
        clients = cluster.ask(8)
        cluster.world.run()
        cluster.check(clients)
        assert all(client.full and client.ledger.number == 1 for client in clients)
