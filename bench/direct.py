"""Asks the workers of a cluster as a gateway does, with placements made by hand, and looks at what came of the KV."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.cluster.gateway.decode_client import DecodeStream
from moonpool.cluster.survey import TIMEOUT_S, members, survey
from moonpool.core.blocks import BlockHasher, load_hash_key, namespace
from moonpool.core.errors import ConfigError
from moonpool.core.idle import not_idle
from moonpool.core.ids import Incarnation, MemberId, RequestId, Role
from moonpool.core.layout import DIGEST_BYTES, KVLayout
from moonpool.core.membership import Liveness, Member
from moonpool.core.placement import Helper, Placement, WorkerRef
from moonpool.core.request import Attempt, Request, SamplingParams
from moonpool.kvstore.client import WorkerStore
from moonpool.wire import pb
from moonpool.wire.channels import dial

IDLE_S = 20.0
DEADLINE_MS = 240_000


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: seconds to its first id, and its ids."""

    ttft_s: float
    ids: tuple[int, ...]


class Direct:
    """Made by ``open``. Nothing else may ask the cluster meanwhile."""

    def __init__(self, registry: str, everybody: Sequence[Member], hash_key: bytes) -> None:
        self._registry = registry
        self._members = everybody
        self.prefills = [m for m in everybody if m.role is Role.PREFILL]
        self.decode = next(m for m in everybody if m.role is Role.DECODE)
        assert self.decode.layout is not None
        self.layout: KVLayout = self.decode.layout
        self._namespace = namespace(self.layout)
        self._hasher = BlockHasher(hash_key, self._namespace, self.layout.block_tokens)
        self._stream = DecodeStream(ref(self.decode))
        self._asked = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, registry: str, hash_key_file: Path) -> AsyncIterator[Direct]:
        known = [change.member for change in await members(registry) if change.liveness is Liveness.LIVE]
        direct = cls(registry, known, load_hash_key(hash_key_file))
        try:
            yield direct
        finally:
            await direct._stream.close()

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        return self._hasher.keys(prompt)

    async def ask(self, prompt: Sequence[int], tokens: int, *, ends: Sequence[int] = ()) -> Run:
        """``ends``: blocks where the spans of prefill workers 0, 1, .. end; the next worker computes the rest. ConfigError: it
        failed."""
        self._asked += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        name = RequestId(f"direct-{self._asked}")
        request = Request(name, tuple(prompt), sampling, self._namespace, tuple(self.keys(prompt)))
        helpers = tuple(Helper(ref(self.prefills[i]), end) for i, end in enumerate(ends))
        placement = Placement(ref(self.prefills[len(ends)]), ref(self.decode), helpers=helpers)
        begun, first, ids = time.perf_counter(), 0.0, []
        async with aclosing(self._stream.run(Attempt(request, 1, deadline_ms=DEADLINE_MS), placement)) as emissions:
            async for emission in emissions:
                if emission.error is not None:
                    raise ConfigError(f"bench: the answer failed: {emission.error.message}", param="bench")
                if emission.sampled is not None:
                    first = first or time.perf_counter() - begun
                    ids.append(emission.sampled.token)
        await self.idle()
        return Run(first, tuple(ids))

    async def idle(self) -> None:
        """Until nothing is under way anywhere."""
        deadline = time.monotonic() + IDLE_S
        while busy := [a.change.member.id for a in await survey(self._registry) if not_idle(a.numbers)]:
            if time.monotonic() > deadline:
                raise ConfigError(f"bench: {', '.join(busy)} did not come to rest within {IDLE_S:g} s", param="bench")
            await asyncio.sleep(0.05)

    async def forget(self) -> None:
        """Drop all KV of all workers and store nodes."""
        for member in self._members:
            async with dial(member.address) as channel:
                if member.role in (Role.PREFILL, Role.DECODE, Role.BOTH):
                    await pb.admin_rpc.AdminStub(channel).ClearDevicePages(pb.types.Empty(), timeout=TIMEOUT_S)
                elif member.role is Role.STORE:
                    await pb.store_rpc.StoreStub(channel).Clear(pb.store.KeysRequest(), timeout=TIMEOUT_S)

    async def counted(self, name: str) -> float:
        """The sum of one of the prefill workers' numbers."""
        prefills = {member.id for member in self.prefills}
        return sum(a.numbers.get(name, 0.0) for a in await survey(self._registry) if a.change.member.id in prefills)

    async def digests(self, prompt: Sequence[int]) -> list[bytes]:
        """Of every whole block of ``prompt`` at the decode worker's host, those of its layers, as in its slot's trailer."""
        store = next(m for m in self._members if m.role is Role.STORE and m.node == self.decode.node)
        reader = replace(self.decode, id=MemberId("direct"), incarnation=Incarnation(time.time_ns() // 1_000_000))
        client = await WorkerStore.connect(
            store.address, reader, self.layout, on_landed=_nothing, on_failed=_nothing, on_lost=lambda: None
        )
        try:
            ticket = await client.pin(self.keys(prompt))
            size, layout = self.layout.layers * DIGEST_BYTES, self.layout
            found = []
            for slot in ticket.slots:
                at = slot.offset + layout.block_bytes
                found.append(client.regions[slot.region][at : at + size].tobytes())
            await client.unpin(ticket)
            return found
        finally:
            await client.close()


def ref(member: Member) -> WorkerRef:
    return WorkerRef(member.id, member.incarnation, member.node, member.address)


def _nothing(_: object) -> None:
    pass
