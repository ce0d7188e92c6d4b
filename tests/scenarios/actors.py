"""What a scenario line means: facts in words, told to a pure part; its actions, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence as Items
from typing import Protocol

from membership_actors import EtcdActor, RegistryActor

from moonpool.core.blocks import BlockHasher
from moonpool.core.errors import Bug, Busy, Failure, Reason
from moonpool.core.handoff import Drained, FirstToken
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId
from moonpool.core.landing import Landed, Landing, LandingSlot, SlotRef
from moonpool.core.membership import PrefillTiming
from moonpool.core.request import Attempt, Request, Sampled, SamplingParams
from moonpool.decode_worker.batcher import Batcher, Limits, Step
from moonpool.decode_worker.sequence import Sequence
from moonpool.engine.pages import PagePool
from moonpool.kvstore.handoffs import sink
from moonpool.prefill_worker import handoff_source as source

BLOCK = 16


class Actor(Protocol):
    def tell(self, fact: str) -> list[str]:
        """The actions, one line each, of a fact."""

    def state(self) -> str: ...


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split()]


def slots(text: str) -> tuple[LandingSlot, ...]:
    """``3 4/5``: block 3 whole, block 4 with 5 valid tokens."""
    out = []
    for word in text.split():
        block, _, valid = word.partition("/")
        out.append(LandingSlot(int(block), SlotRef(0, int(block), bytes(16)), int(valid or BLOCK)))
    return tuple(out)


def landing(number: int, written: str, held: str = "") -> Landing:
    return Landing(
        number, RequestId("r"), 1, NodeId("b"), Incarnation(1), 1, MemberId("prefill-0"), slots(written), slots(held)
    )


def first_token(token: int, *, ends: bool = False) -> FirstToken:
    return FirstToken(Sampled(token), 0, ends, PrefillTiming(1, 0, 0.0))


class SourceActor:
    """``layers=L``. Pages have the number of their block."""

    def __init__(self, layers: int) -> None:
        self._machine = source.HandoffSource("r", 1, layers)
        self._landing = 0

    def state(self) -> str:
        return self._machine.state

    def tell(self, fact: str) -> list[str]:
        return [self._words(action) for action in self._told(fact)]

    def _told(self, fact: str) -> list[source.Action]:
        if found := re.fullmatch(r"granted (\d+):(.*)", fact):
            self._landing = int(found[1])
            return self._machine.granted(landing(self._landing, found[2]))
        if found := re.fullmatch(r"chunk (\d+) layer (\d+):(.*)", fact):
            blocks = [source.Block(s.block, s.block, s.valid) for s in slots(found[3])]
            return self._machine.layer(int(found[1]), int(found[2]), blocks)
        if found := re.fullmatch(r"sampled (\d+)", fact):
            return self._machine.sampled(first_token(int(found[1])))
        if fact == "stopped":
            return self._machine.stopped()
        if fact == "drained":
            return self._machine.drained(Drained(self._landing, 100, "memory"))
        if fact == "cancelled":
            return self._machine.cancelled(Failure(Reason.CANCELLED, "cancelled"))
        if found := re.fullmatch(r"failed (.+)", fact):
            return self._machine.failed(Failure(Reason(found[1]), found[1]))
        raise ValueError(f"no such fact: {fact}")

    @staticmethod
    def _words(action: source.Action) -> str:
        match action:
            case source.EmitBegun(granted):
                return f"emit begun {granted.id}"
            case source.Push(chunk, layer, blocks):
                return f"push chunk {chunk} layer {layer}: {' '.join(_block(b.index, b.valid) for b in blocks)}"
            case source.EmitFirst(first):
                return f"emit first token {first.sampled.token}"
            case source.Drain():
                return "drain"
            case source.Abandon():
                return "abandon"
            case source.EmitDrained(_):
                return "emit drained"
            case source.EmitFailure(failure):
                return f"emit failure {failure.reason}"
            case source.ReleasePages():
                return "release pages"


class SinkActor:
    """``layers=L blocks=N have=H``: N blocks of which the leading H are in pages."""

    def __init__(self, layers: int, blocks: int, have: int = 0) -> None:
        self._machine = sink.HandoffSink("r", 1, layers, range(have, blocks))
        self._landing = 0

    def state(self) -> str:
        return self._machine.state

    def tell(self, fact: str) -> list[str]:
        return [self._words(action) for action in self._told(fact)]

    def _told(self, fact: str) -> list[sink.Action]:
        if found := re.fullmatch(r"begun (\d+):([^|]*)(?:\|(.*))?", fact):
            self._landing = int(found[1])
            return self._machine.begun(landing(self._landing, found[2], found[3] or ""))
        if found := re.fullmatch(r"landed (\d+) layer (\d+):(.*)", fact):
            blocks = tuple(numbers(found[3]))
            return self._machine.landed(Landed(int(found[1]), RequestId("r"), 1, 0, int(found[2]), blocks))
        if found := re.fullmatch(r"first token (\d+)( ends)?", fact):
            return self._machine.first_token(first_token(int(found[1])), ends=bool(found[2]))
        if found := re.fullmatch(r"copied layer (\d+):(.*)", fact):
            return self._machine.copied(int(found[1]), numbers(found[2]))
        if fact == "drained":
            return self._machine.drained(Drained(self._landing, 100, "memory"))
        if fact == "cancelled":
            return self._machine.cancelled()
        if found := re.fullmatch(r"failed (.+)", fact):
            return self._machine.failed(Failure(Reason(found[1]), found[1]))
        raise ValueError(f"no such fact: {fact}")

    @staticmethod
    def _words(action: sink.Action) -> str:
        match action:
            case sink.EmitFirst(first, ends):
                return f"emit first token {first.sampled.token}{' and end' if ends else ''}"
            case sink.Copy(layer, copied):
                return f"copy layer {layer}: {' '.join(_block(s.block, s.valid) for s in copied)}"
            case sink.Join():
                return "join"
            case sink.EndLanding(number):
                return f"end landing {number}"
            case sink.StopCopies():
                return "stop copies"
            case sink.CancelPrefill():
                return "cancel prefill"
            case sink.Fail(failure):
                return f"fail {failure.reason}"
            case sink.ReleasePages():
                return "release pages"


class BatcherActor:
    """``pages=P batch=B chunk=C queue=Q reserve=R%``; blocks of 16. Sequences have one-letter names."""

    def __init__(self, pages: int, batch: int = 8, chunk: int = 64, queue: int = 8, reserve: int = 0) -> None:
        self._pages = PagePool(pages)
        self._batcher = Batcher(self._pages, Limits(BLOCK, batch, chunk, reserve / 100, queue))
        self._sequences: dict[str, Sequence] = {}
        self._step: Step | None = None

    def state(self) -> str:
        pages, batcher = self._pages, self._batcher
        return (
            f"{batcher.running} running, {batcher.holding - batcher.running} filling, {batcher.waiting} waiting; "
            f"pages {pages.used} used, {pages.cached} cached, {pages.free} free"
        )

    def tell(self, fact: str) -> list[str]:
        if found := re.fullmatch(r"add (\w) (\d+)( remote)?(?: like (\w))?", fact):
            self._batcher.add(self._sequence(found[1], int(found[2]), bool(found[3]), found[4] or found[1]))
            return []
        if fact == "admit":
            return [self._admitted(a.sequence, a.matched, a.copy) for a in self._admissions()]
        if found := re.fullmatch(r"join (\w)(?: (\d+))?", fact):
            sequence = self._sequences[found[1]]
            return self._completed(self._batcher.join(sequence, int(found[2]) if found[2] else sequence.computed))
        if fact == "plan":
            return self._plan()
        if fact == "complete":
            assert self._step is not None
            step, self._step = self._step, None
            ids = [int(row.end) % 100 if row.samples else None for row in step.rows]
            return self._completed(self._batcher.complete(step, ids))
        if found := re.fullmatch(r"end (\w)", fact):
            self._batcher.end(self._sequences[found[1]])
            return []
        raise ValueError(f"no such fact: {fact}")

    def _sequence(self, name: str, tokens: int, remote: bool, like: str) -> Sequence:
        hasher = BlockHasher(bytes(32), bytes(16), BLOCK)
        prompt = tuple((ord(like) * 31 + i) % 1000 for i in range(tokens))
        request = Request(RequestId(name), prompt, SamplingParams(100), bytes(16), tuple(hasher.keys(prompt)))
        self._sequences[name] = Sequence(Attempt(request, 1), hasher, 10_000, remote)
        return self._sequences[name]

    def _admissions(self) -> list:  # type: ignore[type-arg]
        admissions = self._batcher.admit()
        for admission in admissions:
            self._batcher.copied(admission)
        return admissions

    def _admitted(self, sequence: Sequence, matched: int, copy: tuple[int, int] | None) -> str:
        private = ", the last one copied" if copy else ""
        return f"{sequence.name[0]}: {len(sequence.pages)} pages, {matched} matched{private}, {sequence.computed} computed"

    def _completed(self, blocks: Items) -> list[str]:  # type: ignore[type-arg]
        self._pages.release([block.page for block in blocks])
        return [f"{len(blocks)} blocks completed"] if blocks else []

    def _plan(self) -> list[str]:
        before = self._batcher.preemptions
        self._step = self._batcher.plan()
        words = [f"{self._batcher.preemptions - before} preempted"] if self._batcher.preemptions > before else []
        if self._step is None:
            return [*words, "nothing to compute"]
        return words + [
            f"{row.sequence.name[0]} [{row.start}, {row.end}){' samples' if row.samples else ''}" for row in self._step.rows
        ]


def _block(index: int, valid: int) -> str:
    return str(index) if valid == BLOCK else f"{index}/{valid}"


def make(kind: str, options: dict[str, int]) -> Actor:
    makers = {
        "source": SourceActor,
        "sink": SinkActor,
        "batcher": BatcherActor,
        "registry": RegistryActor,
        "etcd": EtcdActor,
    }
    return makers[kind](**options)


def told(actor: Actor, fact: str) -> list[str]:
    """Actions, or the error that the fact raised (a bug's story left out)."""
    try:
        return actor.tell(fact)
    except (Bug, Busy) as e:
        return [f"{type(e).__name__}: {e.message.split('; story')[0]}"]
