"""A worker's link to its host's store node, which comes and goes while the worker starts."""

from __future__ import annotations

import asyncio

import pytest
from support.scripted_cluster import Membership
from support.store import LAYOUT, member

from moonpool.core.config import TimingConfig
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness
from moonpool.kvstore.client import WorkerStore
from moonpool.kvstore.link import StoreLink


async def test_a_worker_starts_without_a_store_node_that_falls_silent_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(WorkerStore, "connect", hang)
    peers, store = Membership(), member("store-a", Role.STORE, "a")
    peers.say(store)
    link = StoreLink(member("decode-0", Role.DECODE, "a"), LAYOUT, peers, TimingConfig())
    starting = asyncio.create_task(link.start())
    await asyncio.sleep(0.01)
    peers.say(store, Liveness.SILENT, "no heartbeat")
    async with asyncio.timeout(4.0):
        await starting
    assert link.client is None
    await link.close()
