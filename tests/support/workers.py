"""Drives workers in tests the way a gateway does, and answers the same requests with bare engine calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moonpool.bench.tiny_model import make_tiny_model
from moonpool.core.blocks import BlockHasher, blocks_for, load_hash_key, namespace
from moonpool.core.config import ClusterConfig, Config, EngineConfig, ModelConfig, TimingConfig
from moonpool.core.errors import Failure
from moonpool.core.ids import Incarnation, MemberId, NodeId, RequestId, Role
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.core.placement import Placement, WorkerRef
from moonpool.core.request import Attempt, Emission, FinishReason, Request, SamplingParams
from moonpool.decode_worker.stream import TokenStream
from moonpool.decode_worker.worker import DecodeWorker
from moonpool.engine.engine import Engine, Row
from moonpool.engine.sampler import SamplerState, finish_reason, sample

__all__ = ["Answer", "Asker", "Crowd", "Gateway", "config_for", "generate", "idle", "make_tiny_model", "member", "ref"]


def config_for(
    folder: Path,
    *,
    dtype: Literal["bfloat16", "float32"] = "float32",
    reuse: bool = True,
    timing: TimingConfig | None = None,
    **engine: object,
) -> Config:
    return Config(
        model=ModelConfig(path=str(folder), dtype=dtype),
        engine=EngineConfig.model_validate({"block_tokens": 16, "pages": 64, "poison": True, "reuse": reuse, **engine}),
        timing=timing or TimingConfig(),
        cluster=ClusterConfig(key_file=str(folder / "hash.key"), state_dir=str(folder)),
    )


class Crowd:
    """``Peers`` whose members a test changes by hand."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self._changes = {m.id: MemberChange(m, Liveness.LIVE) for m in members}
        self._listeners: list[Callable[[MemberChange], None]] = []

    def tell(self, change: MemberChange) -> None:
        self._changes[change.member.id] = change
        for listener in list(self._listeners):
            listener(change)

    def get(self, member: MemberId) -> MemberChange | None:
        return self._changes.get(member)

    def live(self, role: Role) -> list[Member]:
        return [c.member for c in self._changes.values() if c.member.role is role and c.liveness is Liveness.LIVE]

    def store_of(self, node: NodeId) -> Member | None:
        return next((m for m in self.live(Role.STORE) if m.node == node), None)

    def subscribe(self, on_change: Callable[[MemberChange], None]) -> Callable[[], None]:
        self._listeners.append(on_change)
        for change in list(self._changes.values()):
            on_change(change)
        return lambda: self._listeners.remove(on_change)


def member(name: str, role: Role, layout: KVLayout | None, *, node: str = "a", address: str = "", life: int = 1) -> Member:
    return Member(MemberId(name), role, NodeId(node), Incarnation(life), address, 0, layout)


def ref(member: Member) -> WorkerRef:
    return WorkerRef(member.id, member.incarnation, member.node, member.address)


class Asker:
    """Mints requests for one model; ``config`` gives block size and hash key."""

    def __init__(self, config: Config, layout: KVLayout) -> None:
        self.namespace = namespace(layout)
        self.hasher = BlockHasher(load_hash_key(Path(config.cluster.key_file)), self.namespace, layout.block_tokens)
        self._made = 0

    def request(self, prompt: Sequence[int], name: str = "", **sampling: object) -> Request:
        self._made += 1
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
        name = name or f"r{self._made}"
        return Request(RequestId(name), tuple(prompt), params, self.namespace, tuple(self.hasher.keys(prompt)))


@dataclass
class Answer:
    emissions: list[Emission] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ids(self) -> list[int]:
        return [e.sampled.token for e in self.emissions if e.sampled]

    @property
    def finish(self) -> FinishReason | None:
        return self.emissions[-1].finish

    @property
    def error(self) -> Failure | None:
        return self.emissions[-1].error

    @property
    def cached_tokens(self) -> int:
        return self.emissions[0].cached_tokens

    async def count(self, n: int) -> None:
        """Until ``n`` ids are here."""
        while len(self.ids) < n and not self.over.is_set():
            self.told.clear()
            await self.told.wait()


class Gateway:
    """One token stream to one decode worker (or role both), in its process."""

    def __init__(self, worker: DecodeWorker, placement: Placement) -> None:
        self.worker = worker
        self.placement = placement
        self.stream: TokenStream = worker.open_stream()
        self.steps: list[list[Emission]] = []
        self._answers: dict[tuple[str, int], Answer] = {}
        self._task = asyncio.create_task(self._pump())

    async def _pump(self) -> None:
        while emissions := await self.stream.take():
            self.steps.append(emissions)
            for emission in emissions:
                answer = self._answers[emission.request, emission.attempt]
                answer.emissions.append(emission)
                answer.told.set()
                if emission.finish or emission.error:
                    answer.over.set()

    def begin(self, request: Request, number: int = 1, emitted: Sequence[int] = (), deadline_ms: int = 60_000) -> Answer:
        answer = self.expect(request, number)
        self.worker.begin(self.stream, Attempt(request, number, tuple(emitted), deadline_ms), self.placement)
        return answer

    def expect(self, request: Request, number: int) -> Answer:
        """What comes of an attempt that somebody else begins."""
        return self._answers.setdefault((request.id, number), Answer())

    async def ask(self, request: Request) -> Answer:
        answer = self.begin(request)
        await answer.over.wait()
        return answer

    async def ask_until_answered(self, request: Request, attempts: int = 3) -> Answer:
        """Starts the next attempt when one fails, as a gateway does. No ids must have been streamed by a failed one."""
        for number in range(1, attempts + 1):
            answer = self.begin(request, number)
            await answer.over.wait()
            if answer.error is None:
                break
            assert not answer.ids
        return answer

    async def close(self) -> None:
        self.worker.close_stream(self.stream)
        await self._task


def generate(engine: Engine, request: Request) -> list[int]:
    """The same answer by bare engine calls: the prompt in one piece, then one row at a time, pages of its own."""
    tokens, outputs = list(request.prompt), []
    pages = engine.pages.allocate(blocks_for(len(tokens) + request.sampling.max_tokens, engine.layout.block_tokens))
    start = 0
    try:
        while True:
            logits = engine.forward([Row(tokens[start:], start, pages, True, adapter=request.adapter_digest)])
            start = len(tokens)
            state = SamplerState(request.sampling, request.prompt, outputs, engine.guides.allowed_by(request.sampling, outputs))
            token = sample(logits, [state], engine.eos_ids)[0].token
            outputs.append(token)
            tokens.append(token)
            if finish_reason(request.sampling, token, len(outputs), engine.eos_ids):
                return outputs
    finally:
        engine.pages.release(pages)


async def idle(worker: DecodeWorker, seconds: float = 2.0) -> None:
    """Until nothing is live, running, filling or waiting, and no page is in use; within ``seconds``."""
    names = ("requests_live", "requests_running", "requests_filling", "pages_used")
    deadline = time.monotonic() + seconds
    # A page goes when the last of several tasks lets go of it: there is no one event to wait for.
    while any(worker.numbers()[name] for name in names):
        assert time.monotonic() < deadline, {name: value for name, value in worker.numbers().items() if value}
        await asyncio.sleep(0.005)
