"""Requests before there is a cluster: refused in words until a whole path exists, in whatever order its parts come."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.gateway_front import HASH_KEY, says, settings_for
from support.scripted_cluster import Membership, ScriptedConductor, ScriptedDecode, prefill_member, serve, store_member
from support.tiny_tokenizer import ids_of

from moonpool.cluster.gateway import Gateway
from moonpool.core.errors import Failure
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Member
from moonpool.core.placement import Placement, PlaceRequest

BODY = {"model": "tiny", "prompt": "once", "max_tokens": 3}
PARTS = ("store", "decode", "prefill", "conductor")
ORDERS = random.Random(5).sample(list(itertools.permutations(PARTS)), 5)


async def traffic(client: httpx.AsyncClient, told: list[httpx.Response], enough: asyncio.Event) -> None:
    asked: list[asyncio.Task[httpx.Response]] = []
    while not enough.is_set():
        asked.append(asyncio.create_task(client.post("/v1/completions", json=BODY)))
        await asyncio.sleep(0.03)
    told += await asyncio.gather(*asked)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_every_order_of_arrival_ends_in_answers(tiny_dir: Path, order: tuple[str, ...]) -> None:
    peers = Membership()
    worker = await serve(Role.DECODE, ScriptedDecode(says(*ids_of(tiny_dir, "abc"))))

    def decide(request: PlaceRequest) -> Placement | Failure | None:
        return Placement(worker.ref, worker.ref, booking=7)

    conductor = await serve(Role.CONDUCTOR, ScriptedConductor(decide))
    parts: dict[str, Callable[[], Member]] = {
        "store": store_member,
        "decode": lambda: worker.member,
        "prefill": prefill_member,
        "conductor": lambda: conductor.member,
    }
    me = Member(MemberId("gateway-0"), Role.GATEWAY, NodeId("b"), Incarnation(1), "127.0.0.1:1", 0)
    gateway = await Gateway.start(settings_for(tiny_dir, {"timing": {"conductor_wait_ms": 100}}), me, peers, HASH_KEY, tiny_dir)
    told: list[httpx.Response] = []
    enough = asyncio.Event()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as client:
        running = asyncio.create_task(traffic(client, told, enough))
        for number, part in enumerate(order):
            ready = await client.get("/ready")
            assert ready.status_code == 503 and ready.headers["retry-after"]
            assert set(ready.json()["missing"]) >= {p for p in order[number:] if p != "store"}
            assert gateway.missing(), "what the process's own probe says"
            await asyncio.sleep(0.1)
            peers.say(parts[part]())
        assert (await client.get("/ready")).status_code == 200 and not gateway.missing()
        last = await client.post("/v1/completions", json=BODY)
        enough.set()
        await running
    await gateway.close()
    await worker.kill()
    await conductor.kill()
    assert last.status_code == 200
    assert {r.status_code for r in told} <= {200, 503}, {r.text for r in told if r.status_code not in (200, 503)}
    assert all(int(r.headers["retry-after"]) >= 1 for r in told if r.status_code == 503)
    assert any(r.status_code == 503 for r in told)


async def test_decode_alone_is_no_path(tiny_dir: Path) -> None:
    peers = Membership()
    worker = await serve(Role.DECODE, ScriptedDecode(says(*ids_of(tiny_dir, "abc"))))
    peers.say(worker.member)
    me = Member(MemberId("gateway-0"), Role.GATEWAY, NodeId("b"), Incarnation(1), "127.0.0.1:1", 0)
    gateway = await Gateway.start(settings_for(tiny_dir, {"timing": {"conductor_wait_ms": 100}}), me, peers, HASH_KEY, tiny_dir)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as client:
        assert sorted((await client.get("/ready")).json()["missing"]) == ["conductor", "prefill", "store"]
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    await gateway.close()
    await worker.kill()
