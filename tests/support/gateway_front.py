"""A real gateway over loopback HTTP, in front of a scripted conductor and scripted decode workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from moonpool.cluster.gateway import Gateway
from moonpool.core.config import Config
from moonpool.core.errors import Failure
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Member
from moonpool.core.placement import Placement, PlaceRequest
from moonpool.core.request import FinishReason
from support.scripted_cluster import (
    Job,
    Membership,
    ScriptedConductor,
    ScriptedDecode,
    Served,
    prefill_member,
    serve,
    store_member,
)

HASH_KEY = bytes(32)


async def silence(job: Job) -> None:
    """Takes the attempt and says nothing."""
    await job.cancelled.wait()


def says(*tokens: int, finish: FinishReason = FinishReason.LENGTH, cached: int = 0) -> Callable[[Job], Awaitable[None]]:
    """Sends the rest of these ids, whatever was sent by earlier attempts."""

    async def script(job: Job) -> None:
        await job.say(tokens[len(job.attempt.emitted) :], finish=finish, cached=cached)

    return script


async def eventually(condition: Callable[[], object], seconds: float = 2) -> None:
    """For states that have no event of their own: gauges, and counts inside scripted servers."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@dataclass
class Front:
    """What a test holds: the gateway, its cluster, and a client."""

    gateway: Gateway
    membership: Membership
    conductor: ScriptedConductor
    conductor_server: Served
    decode: ScriptedDecode
    decode_server: Served
    client: httpx.AsyncClient
    model_dir: Path
    drain_s: float
    left: bool = False

    async def leave(self) -> None:
        """As the gateway's process leaves; once, whoever asks."""
        if not self.left:
            self.left = True
            await self.gateway.drain(self.drain_s)
            await self.gateway.close()


def settings_for(model_dir: Path, config: dict[str, dict[str, object]]) -> Config:
    """``config`` over: the model called tiny, any free port."""
    basis: dict[str, dict[str, object]] = {"model": {"path": str(model_dir), "name": "tiny"}, "gateway": {"port": 0}}
    return Config.model_validate({k: {**basis.get(k, {}), **config.get(k, {})} for k in basis.keys() | config.keys()})


@asynccontextmanager
async def front(
    model_dir: Path,
    *,
    config: dict[str, dict[str, object]] | None = None,
    max_prompt: int = 0,
    decode_pages: int = 0,
    group: str = "",
) -> AsyncIterator[Front]:
    """``group``: the model that the scripted members say they serve; empty: whichever."""
    settings = settings_for(model_dir, config or {})
    async with AsyncExitStack() as stack:
        membership = Membership()
        decode = ScriptedDecode(silence)
        worker = await serve(Role.DECODE, decode, max_prompt=decode_pages)
        stack.push_async_callback(worker.kill)
        prefill = prefill_member(max_prompt=max_prompt)

        def decide(request: PlaceRequest) -> Placement | Failure | None:
            return Placement(worker.ref, worker.ref, booking=7)

        conductor = ScriptedConductor(decide)
        conductor_server = await serve(Role.CONDUCTOR, conductor)
        stack.push_async_callback(conductor_server.kill)
        for member in (store_member(), worker.member, prefill, conductor_server.member):
            membership.say(replace(member, model=group))
        me = Member(MemberId("gateway-0"), Role.GATEWAY, NodeId("b"), Incarnation(1), "127.0.0.1:1", 0)
        gateway = await Gateway.start(settings, me, membership, HASH_KEY, model_dir)
        client = httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False)
        drain_s = settings.gateway.drain_ms / 1000
        running = Front(gateway, membership, conductor, conductor_server, decode, worker, client, model_dir, drain_s)
        stack.push_async_callback(running.leave)
        stack.push_async_callback(client.aclose)
        yield running
