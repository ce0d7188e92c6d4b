"""A small cluster whose messages, writes, copies and steps happen in an order that a seed draws, and which breaks as it likes.

Real: the gateway's ledger, both hand-off machines, the pool with its slots and landings, device pages, block keys. Made here:
the wires (each pair of processes has its own, in order; carriers' writes and notices in none), the model (an id is a digest of
its context) and what the shells around the machines do. Nothing takes time; ``World.run`` goes on until nobody has anything
left to do. What must never happen raises ``Broken``.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence

from moonpool.cluster.gateway.ledger import Ledger
from moonpool.core.blocks import BlockHasher
from moonpool.core.errors import AttemptFailed, Failure, MoonpoolError, PeerSilent
from moonpool.core.ids import Incarnation, MemberId, RequestId
from moonpool.core.layout import KVLayout
from moonpool.core.request import Attempt, Emission, FinishReason, Request, SamplingParams

BLOCK = 4
LAYERS = 2
LAYOUT = KVLayout("m", layers=LAYERS, kv_heads=1, head_dim=4, dtype="float32", block_tokens=BLOCK)
HASHER = BlockHasher(bytes(32), bytes(16), BLOCK)
ATTEMPTS = 50  # more than any world needs
STEPS = 30_000

Slice = tuple[bytes, int]  # (block key, layer): what a digest is seeded with, so the content that it stands for


class Broken(AssertionError):
    """An invariant does not hold."""


def next_id(context: Sequence[int]) -> int:
    return hashlib.blake2b(repr(tuple(context)).encode(), digest_size=2).digest()[0] % 40


def answer(prompt: Sequence[int], n: int) -> list[int]:
    context = list(prompt)
    for _ in range(n):
        context.append(next_id(context))
    return context[len(prompt) :]


class Process:
    """``life`` counts; a frozen process neither reads nor does anything until it wakes."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.life = 1
        self.frozen = False
        self.dead = False

    @property
    def runs(self) -> bool:
        return not self.frozen and not self.dead

    @property
    def id(self) -> MemberId:
        return MemberId(self.name)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.story: deque[str] = deque(maxlen=400)
        self._wires: dict[tuple[str, int, str, int], deque[Callable[[], None]]] = {}
        self._work: list[tuple[Process, int, Callable[[], None]]] = []
        self.loose: list[Callable[[], None]] = []  # happens whoever is alive: bytes and notices on their way
        self.processes: dict[str, Process] = {}

    def say(self, text: str) -> None:
        self.story.append(text)

    # what goes on

    def send(self, source: Process, target: Process, message: Callable[[], None], life: int = 0) -> None:
        """In order behind what ``source`` sent before; lost with ``life`` of ``target`` (0: its present one)."""
        key = (source.name, source.life, target.name, life or target.life)
        self._wires.setdefault(key, deque()).append(message)

    def later(self, process: Process, work: Callable[[], None]) -> None:
        """``process`` does this in its present life, at some time."""
        self._work.append((process, process.life, work))

    def step(self) -> bool:
        """One thing happens. False: nothing can."""
        self.now += 0.001
        ready: list[Callable[[], None]] = []
        for key in list(self._wires):
            target, life = key[2:]
            here = self.processes[target]
            if here.dead or here.life != life or not self._wires[key]:
                del self._wires[key]
            elif here.runs:
                ready.append(self._wires[key].popleft)
        self._work = [w for w in self._work if not w[0].dead and w[0].life == w[1]]
        doable = [i for i, w in enumerate(self._work) if w[0].runs]
        total = len(ready) + len(doable) + len(self.loose)
        if not total:
            return False
        pick = self.random.randrange(total)
        if pick < len(ready):
            ready[pick]()()
        elif pick < len(ready) + len(doable):
            self._work.pop(doable[pick - len(ready)])[2]()
        else:
            self.loose.pop(pick - len(ready) - len(doable))()
        return True

    def run(self, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(STEPS):
            each()
            if not self.step():
                return
        raise Broken("no end:\n" + "\n".join(self.story))


class Client:
    """One request at the gateway: its ledger, and what the client got."""

    def __init__(self, gateway: Gateway, number: int, prompt: tuple[int, ...], tokens: int) -> None:
        keys = tuple(HASHER.keys(prompt))
        request = Request(RequestId(f"r{number}"), prompt, SamplingParams(tokens, temperature=0.0), bytes(16), keys)
        self.ledger = Ledger(request, started=0.0, budget_ms=10_000_000, max_attempts=ATTEMPTS, life_of=gateway.life_of)
        self.gateway = gateway
        self.error: MoonpoolError | None = None
        self.over = False
        self.gone = False  # the client went away
        self.decode: tuple[str, int] | None = None

    @property
    def full(self) -> bool:
        return self.ledger.finish is not None

    def check(self) -> None:
        request = self.ledger.request
        wanted = answer(request.prompt, request.sampling.max_tokens)
        if self.ledger.emitted != wanted[: len(self.ledger.emitted)]:
            raise Broken(f"{request.id} got {self.ledger.emitted}, right is {wanted}")
        if self.full and self.ledger.emitted != wanted:
            raise Broken(f"{request.id} ended with {self.ledger.emitted}, right is {wanted}")


class Gateway(Process):
    """``prefills`` and ``decodes`` are names; who places draws one of each among those that seem alive."""

    def __init__(self, world: World, prefills: Sequence[str], decodes: Sequence[str]) -> None:
        super().__init__(world, "gateway")
        self._prefills, self._decodes = prefills, decodes
        self.clients: list[Client] = []
        self.silent: set[tuple[str, int]] = set()  # lives of decode workers

    def life_of(self, member: MemberId) -> Incarnation | None:
        process = self.world.processes.get(member)
        return None if process is None else Incarnation(process.life)

    def ask(self, prompt: tuple[int, ...], tokens: int) -> Client:
        client = Client(self, len(self.clients), prompt, tokens)
        self.clients.append(client)
        self.world.later(self, lambda: self._attempt(client))
        return client

    def _attempt(self, client: Client) -> None:
        if client.over:
            return
        ledger = client.ledger
        excluded = ledger.place_request().exclude
        silent = {name for name, life in self.silent if self.world.processes[name].life == life}
        known = self.world.processes
        prefills = [n for n in self._prefills if not known[n].dead and n not in excluded]
        decodes = [n for n in self._decodes if not known[n].dead and n not in excluded and n not in silent]
        if not prefills or not decodes:
            self.world.later(self, lambda: self._attempt(client))  # nobody there: asked again, as gateways do
            client.ledger._excluded.clear()  # who failed before may be back
            return
        try:
            ledger.next_attempt(self.world.now)
        except MoonpoolError as e:
            self._end(client, e)
            return
        prefill, decode = known[self.world.random.choice(prefills)], known[self.world.random.choice(decodes)]
        client.decode = (decode.name, decode.life)
        attempt = ledger.attempt(self.world.now)
        self.world.say(
            f"{attempt.request.id} attempt {attempt.number}: {prefill.name}/{prefill.life} {decode.name}/{decode.life}"
        )
        self.world.send(self, decode, lambda: decode.start(self, attempt, prefill, prefill.life))  # type: ignore[attr-defined]

    def emission(self, request: str, emission: Emission) -> None:
        client = next(c for c in self.clients if c.ledger.request.id == request)
        if client.over:
            return
        try:
            client.ledger.accept(emission)
        except MoonpoolError as e:
            self._failed(client, e)
            return
        client.check()
        if client.full:
            client.over = True

    def lost(self, decode: str, life: int) -> None:
        """The token stream broke: every attempt on it fails."""
        self.silent.add((decode, life))
        for client in self.clients:
            if not client.over and client.decode == (decode, life):
                client.decode = None
                self._failed(client, PeerSilent(f"{decode}: token stream broke", peer=decode))

    def _failed(self, client: Client, error: MoonpoolError) -> None:
        try:
            client.ledger.failed(error)
        except MoonpoolError as e:
            self._end(client, e)
            return
        self.world.later(self, lambda: self._attempt(client))

    def leave(self, client: Client) -> None:
        """The client goes away in mid-flight."""
        if client.over:
            return
        client.gone = client.over = True
        request, number = client.ledger.request.id, client.ledger.number
        if client.decode is not None:
            decode = self.world.processes[client.decode[0]]
            if decode.life == client.decode[1] and not decode.dead:
                self.world.send(self, decode, lambda: decode.cancel((request, number)))  # type: ignore[attr-defined]

    def _end(self, client: Client, error: MoonpoolError) -> None:
        if isinstance(error, AttemptFailed) and client.ledger.number < ATTEMPTS:
            raise Broken(f"{client.ledger.request.id} gave up after {client.ledger.number} attempts: {error}")
        client.error, client.over = error, True


def emit(gateway: Gateway, sender: Process, attempt: Attempt, emission: Emission) -> None:
    sender.world.send(sender, gateway, lambda: gateway.emission(attempt.request.id, emission))


def last_word(attempt: Attempt, position: int, failure: Failure | None = None) -> Emission:
    finish = None if failure is not None else FinishReason.CANCELLED
    return Emission(attempt.request.id, attempt.number, position, finish=finish, error=failure)
